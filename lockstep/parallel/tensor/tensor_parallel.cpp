#include <lockstep/parallel/tensor_parallel.h>

#include <algorithm>
#include <set>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/replicas.h>
#include <lockstep/nn/dropout.h>
#include <lockstep/nn/linear.h>
#include <lockstep/parallel/tensor/calls.h>
#include <lockstep/parallel/tensor/plan.h>

namespace lockstep {
namespace detail {
namespace {

// Replaces a layer's forward.
template <typename Impl>
class ParallelCall final : public Attachment, public CommunicatesInForward, public HoldsShards {
 public:
  ParallelCall(Impl& module, const Target& target, Group group)
      : Attachment("tensor parallelism (" + shown(target.style) + ")"),
        module_(module),
        style_(target.style),
        group_(std::move(group)) {
    for (const auto& split : target.splits)
      shards_.push_back({split.parameter, split.tensor, split.dim, split.parts, group_});
  }
  std::vector<ParameterShard> shards() const override { return shards_; }
  const Group& slices_over() const override { return group_; }

 private:
  at::Tensor forward(const at::Tensor& input) override {
    if constexpr (std::is_same_v<Impl, torch::nn::LinearImpl>) {
      if (const auto* colwise = std::get_if<Colwise>(&style_))
        return column_parallel_linear(input, module_.weight, module_.bias, group_,
                                      {.gather_output = colwise->gather_output,
                                       .sequence_dim = colwise->sequence_dim,
                                       .parts = colwise->parts});
      const auto& rowwise = std::get<Rowwise>(style_);
      return row_parallel_linear(
          input, module_.weight, module_.bias, group_,
          {.input_is_parallel = rowwise.input_is_parallel, .sequence_dim = rowwise.sequence_dim});
    } else if constexpr (std::is_same_v<Impl, torch::nn::EmbeddingImpl>) {
      return embedded(input);
    } else if constexpr (std::is_same_v<Impl, torch::nn::LayerNormImpl>) {
      const auto copied = copy_to_group(module_.weight, module_.bias, group_);
      return at::layer_norm(input, module_.options.normalized_shape(), copied.weight, copied.bias,
                            module_.options.eps());
    } else {
      return at::rms_norm(input, module_.normalized_shape, copy_to_group(module_.weight, {}, group_).weight,
                          module_.eps);
    }
  }

  at::Tensor embedded(const at::Tensor& indices) {
    const auto& options = module_.options;
    if (const auto* rowwise = std::get_if<Rowwise>(&style_))
      return vocab_parallel_embedding(
          indices, module_.weight, group_,
          {.padding_idx = options.padding_idx(), .sequence_dim = rowwise->sequence_dim});
    const auto& colwise = std::get<Colwise>(style_);
    const auto output = at::embedding(module_.weight, indices, options.padding_idx().value_or(-1),
                                      options.scale_grad_by_freq(), options.sparse());
    return colwise.gather_output ? gather_parts(output, colwise.parts, group_) : output;
  }

  Impl& module_;  // The owner of this object.
  ParallelStyle style_;
  Group group_;
  std::vector<ParameterShard> shards_;
};

// A child of a Sequential: LibTorch's layer with the same parameters, whose forward calls the attachment.
template <typename Base>
class InSequenceImpl final : public Base, public UnitSlot {
 public:
  explicit InSequenceImpl(const Base& other) : Base(other) {}
  at::Tensor forward(const at::Tensor& input) { return (*attachment)(input); }
  at::Tensor call(const at::Tensor& input) override { return forward(input); }
  const std::type_info& forward_of() const override { return typeid(Base); }
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>&) const override {
    refuse_clone(*attachment);
  }
};

void keep_slices(const Target& target, const Group& group, std::set<const at::TensorImpl*>& done) {
  torch::NoGradGuard no_grad;
  for (const auto& split : target.splits) {
    auto tensor = split.tensor;
    if (group.size() == 1 || !done.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (tensor.grad().defined())
      tensor.mutable_grad() = own_slice(tensor.grad(), group, split.dim, split.parts);
    // Changes the tensor for all its holders and frees the whole.
    tensor.set_data(own_slice(tensor.detach(), group, split.dim, split.parts));
  }
}

template <typename Call, typename Base>
void replace_in_sequences(const Target& target, const Group& group, Base& module) {
  auto made = std::make_shared<InSequenceImpl<Base>>(module);
  made->attachment = std::make_shared<ParallelCall<Call>>(*made, target, group);
  for (const auto& place : target.places) {
    if (!place.sequence) continue;
    for (auto& any : *place.sequence)
      if (any.ptr() == target.module) any = torch::nn::AnyModule(made);
    place.sequence->replace_module(place.key, made);
  }
}

template <typename Impl, typename Base = Impl>
bool convert(const Target& target, const Group& group) {
  auto* module = dynamic_cast<Base*>(target.module.get());
  if (!module) return false;
  const bool in_sequence = std::any_of(target.places.begin(), target.places.end(),
                                       [](const auto& place) { return place.sequence != nullptr; });
  // A Unit may be called through its holder, and also through a Sequential that contains it.
  if (slot_of(module))
    attach(*module, target.name, std::make_shared<ParallelCall<Impl>>(*module, target, group),
           /*watch=*/!in_sequence);
  if (in_sequence) replace_in_sequences<Impl, Base>(target, group, *module);
  return true;
}

void apply(const Target& target, const Group& group) {
  if (auto* dropout = dynamic_cast<nn::DropoutImpl*>(target.module.get())) {
    dropout->options.shard = nn::Shard{
        .dim = std::get<SequenceParallel>(target.style).dim, .index = group.rank(), .count = group.size()};
    return;
  }
  const bool done =
      convert<torch::nn::LinearImpl, nn::LinearImpl>(target, group) ||
      convert<torch::nn::LinearImpl>(target, group) || convert<torch::nn::EmbeddingImpl>(target, group) ||
      convert<torch::nn::LayerNormImpl>(target, group) || convert<nn::RMSNormImpl>(target, group);
  LOCKSTEP_ASSERT(done, "a planned layer is of an unknown kind");
}

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const auto end = text.find('\n');
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
  }
  return lines;
}

// Compares all ranks in one exchange. If any rank differs from rank 0, all ranks throw the same error.
void check_all_alike(const ResolvedPlan& resolved, Group& group, const ParallelPlan& plan) {
  std::string mine;
  for (const auto& [pattern, style] : plan)
    mine += fmt::format("the plan's '{}' is {}\n", pattern, shown(style));
  for (const auto& target : resolved.targets)
    for (const auto& split : target.splits)
      mine += fmt::format("'{}.{}' is {} [{}]\n", target.name, split.parameter,
                          at::toString(split.tensor.scalar_type()), fmt::join(split.tensor.sizes(), ", "));
  for (const auto& problem : resolved.problems) mine += problem + "\n";
  const auto all = group.all_gather_values(std::string_view(mine), {.tag = "parallelize_module"});
  const auto expected = lines_of(all[0]);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    const auto given = lines_of(all[rank]);
    for (std::size_t i = 0; i < std::max(given.size(), expected.size()); ++i) {
      const auto line = [i](const auto& lines) { return i < lines.size() ? lines[i] : "nothing more"; };
      if (line(given) != line(expected))
        throw ConfigError(fmt::format("parallelize_module: ranks differ. On rank {}: {}; on rank 0: {}", rank,
                                      line(given), line(expected)));
    }
  }
}

}  // namespace
}  // namespace detail

int parallelize_module(torch::nn::Module& module, Group group, const ParallelPlan& plan) {
  const auto resolved = detail::resolve(module, group, plan);
  if (group.size() > 1) detail::check_all_alike(resolved, group, plan);
  if (!resolved.problems.empty())
    throw ConfigError(
        fmt::format("parallelize_module: nothing was changed: {}", fmt::join(resolved.problems, "; ")));
  // Values that differ now would stay different. Existing slices differ by design.
  CheckReplicasOptions same{.buffers = true};
  for (const auto& shard : tensor_shards(module)) same.ignore.push_back(shard.name);
  if (group.size() > 1) check_replicas(module, group, same);
  std::set<const at::TensorImpl*> done;  // A tied tensor is split once.
  for (const auto& target : resolved.targets) detail::keep_slices(target, group, done);
  for (const auto& target : resolved.targets) detail::apply(target, group);
  return static_cast<int>(resolved.targets.size());
}

}  // namespace lockstep
