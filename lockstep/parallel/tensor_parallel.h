// Tensor and sequence parallelism: splits the weights of a model's layers over a group.
//
//   parallelize_module(*model, mesh["tp"], {
//       {"blocks.*.norm", SequenceParallel{}},
//       {"blocks.*.attention.qkv", Colwise{.sequence_dim = 1, .parts = 3}},
//       {"blocks.*.attention.out", Rowwise{.sequence_dim = 1}},
//       {"embedding", Rowwise{.sequence_dim = 1}},
//   });
//
// The model's code needs two changes only: layers are held as Unit<torch::nn::Linear>, and code between
// Colwise and Rowwise layers counts this rank's slice of the features (heads / group.size()). Parameters keep
// their names and become slices. Call it before constructing DistributedDataParallel and before the
// optimizer's first step.
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

// Input: whole, or slices along sequence_dim. Output: slices of the last dimension, or whole with
// gather_output. Splits the rows of a Linear's weight, or the columns of an Embedding's; an Embedding does
// not support sequence_dim.
struct Colwise {
  bool gather_output = false;
  std::optional<std::int64_t> sequence_dim = {};
  // Number of tensors that the output concatenates and that are split separately: 3 for a fused qkv.
  int parts = 1;
};
// Input: slices of the last dimension, as produced by Colwise. Output: whole, or slices along sequence_dim.
// Splits the columns of a Linear's weight, or the rows of an Embedding's, that is its vocabulary.
struct Rowwise {
  bool input_is_parallel = true;  // If false, the input is whole, as an Embedding's always is.
  std::optional<std::int64_t> sequence_dim = {};
};
// Input and output are slices along a dimension. LayerNorm and nn::RMSNorm: the gradients of their parameters
// are summed over the group. nn::Dropout: each rank's mask is its slice of the mask that a single rank would
// draw; between Colwise and Rowwise, use dim = -1.
struct SequenceParallel {
  std::int64_t dim = 1;
};
using ParallelStyle = std::variant<Colwise, Rowwise, SequenceParallel>;

// Pairs of a module name and its style. '*' in a name stands for any text without a dot; "" is the module
// itself.
using ParallelPlan = std::vector<std::pair<std::string, ParallelStyle>>;

// Splits the module's layers. Every rank of the group must call it, with the same plan and module. Each layer
// must be held in a Unit or a Sequential. Returns the number of layers. Throws ConfigError, which lists all
// problems and differences between ranks and leaves the module unchanged, and DriftError if weights or
// buffers differ between ranks.
int parallelize_module(torch::nn::Module& module, Group group, const ParallelPlan& plan);

// A parameter that is this rank's slice of a whole one. The whole consists of `parts` equal parts along dim,
// each of which is split over the group. All other parameters are the same on every rank of the group.
struct TensorShard {
  std::string name;
  at::Tensor parameter;
  std::int64_t dim;
  int parts;
  Group group;
};
// Returns the shards of the module and its submodules, each once. Does not communicate.
std::vector<TensorShard> tensor_shards(torch::nn::Module& module);

// Returns the parameters that this rank must count so that each element of the whole model is counted once:
// its slices, and on the group's rank 0 also the replicated parameters. For clip_grad_norm.
std::vector<at::Tensor> own_parameters(torch::nn::Module& module, const Group& group,
                                       const std::vector<at::Tensor>& parameters);

// Returns copies of all parameters and buffers by name, each whole. Collective: every rank must call it.
using FullState = std::vector<std::pair<std::string, at::Tensor>>;
FullState full_state(torch::nn::Module& module);
// Loads whole tensors, given in any order, and keeps this rank's slices. Does not communicate. Throws
// ConfigError, which lists missing, unexpected and misshapen tensors; the module is then unchanged.
void load_full_state(torch::nn::Module& module, const FullState& state);

}  // namespace lockstep
