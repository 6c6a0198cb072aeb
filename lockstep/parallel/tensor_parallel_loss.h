// Cross entropy of logits whose vocabulary is split over a group.
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

// Like torch::nn::functional::cross_entropy, for logits split along the last dimension, [..., vocabulary /
// size()], and targets [...] that are the same on every rank. The full logits are never materialised: the
// ranks exchange up to three numbers per target, in two all-reduces. The loss is the same on every rank.
// Collective: every rank must call it.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                        const Group& group, VocabCrossEntropyOptions options = {});

}  // namespace lockstep
