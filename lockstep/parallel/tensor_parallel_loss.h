// Cross entropy of logits that are split over a group along the vocabulary.
//
//   auto logits = head(x);                                   // Colwise: [batch, length, vocabulary / size()]
//   auto loss = vocab_parallel_cross_entropy(logits, targets, mesh["tp"]);
#pragma once

#include <cstdint>

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <lockstep/comm/group.h>

namespace lockstep {

struct VocabCrossEntropyOptions {
  std::int64_t ignore_index = -100;
  at::Reduction::Reduction reduction = at::Reduction::Mean;
  double label_smoothing = 0;
};

// As torch::nn::functional::cross_entropy, of logits that are split along the last dimension: [...,
// vocabulary / size()], and targets [...] that every rank has. The whole logits are nowhere; two exchanges of
// up to three numbers per target. The loss is the same on every rank.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                        const Group& group, VocabCrossEntropyOptions options = {});

}  // namespace lockstep
