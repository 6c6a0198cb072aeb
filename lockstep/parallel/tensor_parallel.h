// Tensor and sequence parallelism: the weights of a model's layers split over a group.
//
//   parallelize_module(*model, mesh["tp"], {
//       {"blocks.*.norm", SequenceParallel{}},
//       {"blocks.*.attention.qkv", Colwise{.sequence_dim = 1, .parts = 3}},
//       {"blocks.*.attention.out", Rowwise{.sequence_dim = 1}},
//       {"embedding", Rowwise{.sequence_dim = 1}},
//   });
//
// The model's code stays as it is, but for layers held as Unit<torch::nn::Linear> and for what counts
// features: between Colwise and Rowwise a rank has its slice of them (heads / group.size()). Parameters keep
// their names, and are slices. Call it before DistributedDataParallel and before the optimizer's first step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <lockstep/comm/group.h>
#include <lockstep/parallel/tensor_parallel_layers.h>
#include <lockstep/parallel/tensor_parallel_loss.h>
#include <lockstep/parallel/tensor_parallel_regions.h>

namespace lockstep {

// The input is whole, or with sequence_dim slices along it; the output is slices of the last dimension, or
// with gather_output whole. Linear: rows of the weight. Embedding: its columns; sequence_dim is not for it.
struct Colwise {
  bool gather_output = false;
  std::optional<std::int64_t> sequence_dim = {};
  int parts = 1;  // the output is that many tensors side by side, each of which is split: 3 for a fused qkv
};
// The input is slices of the last dimension, as Colwise leaves it; the output is whole, or with sequence_dim
// slices along it. Linear: columns of the weight. Embedding: rows of it, that is the vocabulary.
struct Rowwise {
  bool input_is_parallel = true;  // else it is whole; an Embedding's always is
  std::optional<std::int64_t> sequence_dim = {};
};
// Input and output are slices along a dimension. LayerNorm, nn::RMSNorm: the gradients of their parameters
// are summed over the group. nn::Dropout: its masks are the slices of one rank's (also where it lies between
// Colwise and Rowwise, with dim = -1).
struct SequenceParallel {
  std::int64_t dim = 1;
};
using ParallelStyle = std::variant<Colwise, Rowwise, SequenceParallel>;

// Names of modules, where '*' stands for any text without a dot, and what becomes of them. "" is the module
// itself.
using ParallelPlan = std::vector<std::pair<std::string, ParallelStyle>>;

// Every rank of the group calls it with the same plan and module. The layers must be in a Unit or a
// Sequential. ConfigError where anything is wrong or differs between ranks: it names all that is, and nothing
// is changed; DriftError where their weights or buffers differ. Returns the number of layers.
int parallelize_module(torch::nn::Module& module, Group group, const ParallelPlan& plan);

// A parameter that is this rank's slice: along dim, of each of that many equal parts of the whole. What a
// rank has beside these is the same on every rank of the group.
struct TensorShard {
  std::string name;
  at::Tensor parameter;
  std::int64_t dim;
  int parts;
  Group group;
};
// Those below (and including) the module, each once. Local.
std::vector<TensorShard> tensor_shards(torch::nn::Module& module);

// Of the parameters those that this rank counts where each of the whole model's is to be counted once: its
// slices, and on the group's rank 0 what all have. For clip_grad_norm.
std::vector<at::Tensor> own_parameters(torch::nn::Module& module, const Group& group,
                                       const std::vector<at::Tensor>& parameters);

// Parameters and buffers by name, each whole: copies. Every rank calls it.
using FullState = std::vector<std::pair<std::string, at::Tensor>>;
FullState full_state(torch::nn::Module& module);
// Takes whole tensors, in any order, and keeps this rank's slices. Local. ConfigError names what is missing,
// superfluous or of another shape; nothing is changed then.
void load_full_state(torch::nn::Module& module, const FullState& state);

}  // namespace lockstep
