// Layers that a group holds together, each rank a slice of the weights.
//
//   ColumnParallelLinear up(768, 3072, mesh["tp"]);          // output: this rank's slice of the features
//   RowParallelLinear down(3072, 768, mesh["tp"]);           // takes it, gives the whole sum
//   auto y = down(torch::gelu(up(x)));                       // one all-reduce forward, one backward
//
// First values are the slices of what LibTorch's layer would draw from the same seed, and the generator is
// then where LibTorch's would be. With sequence_dim the tensors outside are slices along that dimension
// (sequence parallelism): an all-gather before and a reduce-scatter after take the place of the all-reduces.
// Forward and backward communicate: every rank calls them in the same order. ConfigError where sizes do not
// divide.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/comm/group.h>
#include <lockstep/modules/unit.h>
#include <lockstep/nn/rms_norm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

namespace lockstep {

struct ColumnParallelOptions {
  bool bias = true;
  bool gather_output = false;                     // to whole tensors
  std::optional<std::int64_t> sequence_dim = {};  // of the input
  int parts = 1;  // the output is that many tensors side by side, each of which is split: 3 for a fused qkv
};
struct RowParallelOptions {
  bool bias = true;
  bool input_is_parallel = true;                  // else the input is whole, and this rank takes its slice
  std::optional<std::int64_t> sequence_dim = {};  // of the output
};
struct VocabParallelOptions {
  std::optional<std::int64_t> padding_idx = {};
  std::optional<std::int64_t> sequence_dim = {};  // of the output
};
namespace detail {

struct ParameterShard {
  std::string name;  // in its module
  at::Tensor parameter;
  std::int64_t dim;
  int parts;
  Group group;
};
// A module, or what is attached to one, that has slices for parameters.
class HoldsShards : public HoldsSlices {
 public:
  virtual std::vector<ParameterShard> shards() const = 0;
};

[[noreturn]] void refuse_norm_clone();

// What tensor parallelism's own layers have in common.
class ParallelLayer : public torch::nn::Module, public CommunicatesInForward, public HoldsShards {
 public:
  std::vector<ParameterShard> shards() const override { return shards_; }
  const Group& slices_over() const override { return group_; }
  void pretty_print(std::ostream& stream) const override { stream << text_; }

 protected:
  ParallelLayer(Group group, std::string text) : group_(std::move(group)), text_(std::move(text)) {}
  // Registers this rank's slice of a parameter; an undefined one too.
  at::Tensor keep_slice(const std::string& name, const at::Tensor& whole, std::int64_t dim, int parts = 1);
  Group group_;

 private:
  std::string text_;
  std::vector<ParameterShard> shards_;
};

}  // namespace detail

class ColumnParallelLinearImpl : public detail::ParallelLayer {
 public:
  ColumnParallelLinearImpl(std::int64_t in_features, std::int64_t out_features, Group group,
                           ColumnParallelOptions given = {});
  at::Tensor forward(const at::Tensor& input);
  const ColumnParallelOptions options;
  at::Tensor weight, bias;  // slices of the rows
};

class RowParallelLinearImpl : public detail::ParallelLayer {
 public:
  RowParallelLinearImpl(std::int64_t in_features, std::int64_t out_features, Group group,
                        RowParallelOptions given = {});
  at::Tensor forward(const at::Tensor& input);
  const RowParallelOptions options;
  at::Tensor weight, bias;  // a slice of the columns; the whole bias
};

class VocabParallelEmbeddingImpl : public detail::ParallelLayer {
 public:
  VocabParallelEmbeddingImpl(std::int64_t num_embeddings, std::int64_t embedding_dim, Group group,
                             VocabParallelOptions given = {});
  at::Tensor forward(const at::Tensor& indices);
  const VocabParallelOptions options;
  at::Tensor weight;  // a slice of the rows
};

// Norms whose input is a slice of the sequence: the gradients of their parameters are summed over the group.
class SequenceParallelLayerNormImpl : public torch::nn::LayerNormImpl, public detail::CommunicatesInForward {
 public:
  SequenceParallelLayerNormImpl(torch::nn::LayerNormOptions given, Group group)
      : torch::nn::LayerNormImpl(std::move(given)), group_(std::move(group)) {}
  at::Tensor forward(const at::Tensor& input);
  // A copy would be without the group.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& = std::nullopt) const override {
    detail::refuse_norm_clone();
  }

 private:
  Group group_;
};
class SequenceParallelRMSNormImpl : public nn::RMSNormImpl, public detail::CommunicatesInForward {
 public:
  SequenceParallelRMSNormImpl(std::vector<std::int64_t> shape, Group group,
                              std::optional<double> given_eps = std::nullopt)
      : nn::RMSNormImpl(std::move(shape), given_eps), group_(std::move(group)) {}
  at::Tensor forward(const at::Tensor& input);
  // A copy would be without the group.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& = std::nullopt) const override {
    detail::refuse_norm_clone();
  }

 private:
  Group group_;
};
TORCH_MODULE(SequenceParallelLayerNorm);
TORCH_MODULE(SequenceParallelRMSNorm);

// Holders by hand, so that options can be written in braces.
class ColumnParallelLinear : public torch::nn::ModuleHolder<ColumnParallelLinearImpl> {
 public:
  using ModuleHolder::ModuleHolder;
  ColumnParallelLinear(std::int64_t in_features, std::int64_t out_features, Group group,
                       ColumnParallelOptions options = {})
      : ModuleHolder(std::make_shared<ColumnParallelLinearImpl>(in_features, out_features, std::move(group),
                                                                options)) {}
};
class RowParallelLinear : public torch::nn::ModuleHolder<RowParallelLinearImpl> {
 public:
  using ModuleHolder::ModuleHolder;
  RowParallelLinear(std::int64_t in_features, std::int64_t out_features, Group group,
                    RowParallelOptions options = {})
      : ModuleHolder(
            std::make_shared<RowParallelLinearImpl>(in_features, out_features, std::move(group), options)) {}
};
class VocabParallelEmbedding : public torch::nn::ModuleHolder<VocabParallelEmbeddingImpl> {
 public:
  using ModuleHolder::ModuleHolder;
  VocabParallelEmbedding(std::int64_t num_embeddings, std::int64_t embedding_dim, Group group,
                         VocabParallelOptions options = {})
      : ModuleHolder(std::make_shared<VocabParallelEmbeddingImpl>(num_embeddings, embedding_dim,
                                                                  std::move(group), options)) {}
};

}  // namespace lockstep
