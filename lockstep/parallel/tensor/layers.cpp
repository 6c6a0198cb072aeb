#include <lockstep/parallel/tensor_parallel_layers.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/parallel/tensor/calls.h>
#include <lockstep/parallel/tensor_parallel_regions.h>
#include <torch/nn/modules/linear.h>

namespace lockstep {
namespace detail {
namespace {

void check_divides(const char* layer, std::int64_t size, const char* what, const Group& group,
                   int parts = 1) {
  if (parts < 1) throw ConfigError(fmt::format("{}: expected parts of at least 1, got {}", layer, parts));
  if (size % (static_cast<std::int64_t>(parts) * group.size()) != 0)
    throw ConfigError(fmt::format("{}: {} {} cannot be split over the {} ranks of group {}{}", layer, size,
                                  what, group.size(), group.name(),
                                  parts > 1 ? fmt::format(" in {} equal parts", parts) : ""));
}

torch::nn::Linear whole_linear(std::int64_t in, std::int64_t out, bool bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

}  // namespace

void refuse_norm_clone() {
  throw ConfigError("a sequence-parallel norm cannot be cloned; construct another one with the same group");
}

at::Tensor ParallelLayer::keep_slice(const std::string& name, const at::Tensor& whole, std::int64_t dim,
                                     int parts) {
  if (!whole.defined()) return register_parameter(name, whole, /*requires_grad=*/false);
  auto kept = register_parameter(name, own_slice(whole.detach(), group_, dim, parts));
  shards_.push_back({name, kept, dim, parts, group_});
  return kept;
}

at::Tensor column_parallel_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                                  const Group& group, const ColumnParallelOptions& options) {
  const auto whole = options.sequence_dim ? gather_sequence(input, group, *options.sequence_dim)
                                          : copy_to_group(input, group);
  const auto output = at::linear(whole, weight, bias);
  return options.gather_output ? gather_parts(output, options.parts, group) : output;
}

at::Tensor gather_parts(const at::Tensor& slices, int parts, const Group& group) {
  if (group.size() == 1) return slices;
  if (parts == 1) return gather_from_group(slices, group);
  return gather_from_group(slices.unflatten(-1, {parts, slices.size(-1) / parts}), group).flatten(-2);
}

at::Tensor row_parallel_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                               const Group& group, const RowParallelOptions& options) {
  if (group.size() == 1) return at::linear(input, weight, bias);
  const auto slice = options.input_is_parallel ? input : scatter_to_group(input, group);
  auto partial = at::linear(slice, weight);
  auto output = options.sequence_dim ? reduce_scatter_sequence(partial, group, *options.sequence_dim)
                                     : reduce_from_group_in_place(std::move(partial), group);
  if (!bias.defined()) return output;
  // On a slice of the sequence, each rank computes only part of the bias's gradient.
  return output.add_(options.sequence_dim ? lockstep::copy_to_group(bias, group) : bias);
}

at::Tensor vocab_parallel_embedding(const at::Tensor& indices, const at::Tensor& weight, const Group& group,
                                    const VocabParallelOptions& options) {
  const auto rows = weight.size(0), first = rows * group.rank(), whole = rows * group.size();
  const auto padding = options.padding_idx.value_or(-1) - first;
  const auto padding_here = options.padding_idx && padding >= 0 && padding < rows ? padding : -1;
  if (group.size() == 1) return at::embedding(weight, indices, padding_here);
  // Indices of other ranks' rows become row 0 here and are zeroed below. Indices outside the vocabulary stay
  // out of range, so that at::embedding throws on every rank.
  const auto local = indices - first;
  const auto others = (indices >= 0) & (indices < whole) & ((local < 0) | (local >= rows));
  auto embedded = at::embedding(weight, local.masked_fill(others, 0), padding_here);
  embedded.masked_fill_(others.unsqueeze(-1), 0);
  return options.sequence_dim ? reduce_scatter_sequence(embedded, group, *options.sequence_dim)
                              : reduce_from_group_in_place(std::move(embedded), group);
}

}  // namespace detail

ColumnParallelLinearImpl::ColumnParallelLinearImpl(std::int64_t in_features, std::int64_t out_features,
                                                   Group group, ColumnParallelOptions given)
    : ParallelLayer(std::move(group),
                    fmt::format("lockstep::ColumnParallelLinear({}, {})", in_features, out_features)),
      options(given) {
  detail::check_divides("ColumnParallelLinear", out_features, "output features", group_, options.parts);
  const auto whole = detail::whole_linear(in_features, out_features, options.bias);
  weight = keep_slice("weight", whole->weight, 0, options.parts);
  bias = keep_slice("bias", whole->bias, 0, options.parts);
}

at::Tensor ColumnParallelLinearImpl::forward(const at::Tensor& input) {
  return detail::column_parallel_linear(input, weight, bias, group_, options);
}

RowParallelLinearImpl::RowParallelLinearImpl(std::int64_t in_features, std::int64_t out_features, Group group,
                                             RowParallelOptions given)
    : ParallelLayer(std::move(group),
                    fmt::format("lockstep::RowParallelLinear({}, {})", in_features, out_features)),
      options(given) {
  detail::check_divides("RowParallelLinear", in_features, "input features", group_);
  const auto whole = detail::whole_linear(in_features, out_features, options.bias);
  weight = keep_slice("weight", whole->weight, 1);
  bias = register_parameter("bias", whole->bias.defined() ? whole->bias.detach() : at::Tensor(),
                            /*requires_grad=*/options.bias);
}

at::Tensor RowParallelLinearImpl::forward(const at::Tensor& input) {
  return detail::row_parallel_linear(input, weight, bias, group_, options);
}

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(std::int64_t num_embeddings,
                                                       std::int64_t embedding_dim, Group group,
                                                       VocabParallelOptions given)
    : ParallelLayer(std::move(group),
                    fmt::format("lockstep::VocabParallelEmbedding({}, {})", num_embeddings, embedding_dim)),
      options(given) {
  detail::check_divides("VocabParallelEmbedding", num_embeddings, "embeddings", group_);
  if (options.padding_idx && (*options.padding_idx < 0 || *options.padding_idx >= num_embeddings))
    throw ConfigError(fmt::format("VocabParallelEmbedding({0}): expected padding_idx from 0 to {2}, got {1}",
                                  num_embeddings, *options.padding_idx, num_embeddings - 1));
  const torch::nn::Embedding whole(
      torch::nn::EmbeddingOptions(num_embeddings, embedding_dim).padding_idx(options.padding_idx));
  weight = keep_slice("weight", whole->weight, 0);
}

at::Tensor VocabParallelEmbeddingImpl::forward(const at::Tensor& indices) {
  return detail::vocab_parallel_embedding(indices, weight, group_, options);
}

at::Tensor SequenceParallelLayerNormImpl::forward(const at::Tensor& input) {
  const auto copied = detail::copy_to_group(weight, bias, group_);
  return at::layer_norm(input, options.normalized_shape(), copied.weight, copied.bias, options.eps());
}

at::Tensor SequenceParallelRMSNormImpl::forward(const at::Tensor& input) {
  return at::rms_norm(input, normalized_shape, detail::copy_to_group(weight, {}, group_).weight, eps);
}

}  // namespace lockstep
