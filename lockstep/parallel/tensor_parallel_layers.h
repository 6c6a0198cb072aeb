// Layers whose weights are split over a group: each rank holds a slice.
//
//   ColumnParallelLinear up(768, 3072, mesh["tp"]);          // output: this rank's slice of the features
//   RowParallelLinear down(3072, 768, mesh["tp"]);           // takes the slice, returns the whole sum
//   auto y = down(torch::gelu(up(x)));                       // one all-reduce forward, one backward
//
// Initial values are slices of those that LibTorch's layer would draw from the same seed, and the generator
// ends in the same state. With sequence_dim, the tensors outside the layers are slices along that dimension
// (sequence parallelism): an all-gather before and a reduce-scatter after replace the all-reduces. Forward
// and backward communicate: every rank must call them in the same order. Throws ConfigError if a size is not
// divisible.
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
  bool gather_output = false;                     // Gather the output into whole tensors.
  std::optional<std::int64_t> sequence_dim = {};  // Sequence dimension of the input.
  // Number of tensors that the output concatenates and that are split separately: 3 for a fused qkv.
  int parts = 1;
};
struct RowParallelOptions {
  bool bias = true;
  // If false, the input is whole, and this rank takes its slice.
  bool input_is_parallel = true;
  std::optional<std::int64_t> sequence_dim = {};  // Sequence dimension of the output.
};
struct VocabParallelOptions {
  std::optional<std::int64_t> padding_idx = {};
  std::optional<std::int64_t> sequence_dim = {};  // Sequence dimension of the output.
};
namespace detail {

struct ParameterShard {
  std::string name;  // Name in its module.
  at::Tensor parameter;
  std::int64_t dim;
  int parts;
  Group group;
};
// A module, or an attachment of one, whose parameters are slices.
class HoldsShards : public HoldsSlices {
 public:
  virtual std::vector<ParameterShard> shards() const = 0;
};

[[noreturn]] void refuse_norm_clone();

// Base of the tensor-parallel layers.
class ParallelLayer : public torch::nn::Module, public CommunicatesInForward, public HoldsShards {
 public:
  std::vector<ParameterShard> shards() const override { return shards_; }
  const Group& slices_over() const override { return group_; }
  void pretty_print(std::ostream& stream) const override { stream << text_; }

 protected:
  ParallelLayer(Group group, std::string text) : group_(std::move(group)), text_(std::move(text)) {}
  // Registers this rank's slice of a parameter. `whole` may be undefined.
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
  // Throws, because a copy would lack the group.
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
  // Throws, because a copy would lack the group.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& = std::nullopt) const override {
    detail::refuse_norm_clone();
  }

 private:
  Group group_;
};
TORCH_MODULE(SequenceParallelLayerNorm);
TORCH_MODULE(SequenceParallelRMSNorm);

// Holders written by hand, so that options can be given in braces.
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
