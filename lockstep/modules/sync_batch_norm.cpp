#include <lockstep/modules/sync_batch_norm.h>

#include <algorithm>
#include <map>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/detail/held_group.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/sequential.h>

namespace lockstep {
namespace detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Reshapes [C] to broadcast against [N, C, ...].
at::Tensor along_channels(const at::Tensor& values, const at::Tensor& input) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = values.size(0);
  return values.view(shape);
}

std::vector<std::int64_t> other_dims(const at::Tensor& input) {
  std::vector<std::int64_t> dims = {0};
  for (std::int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

// Moves small values to the CPU if the group has no transport for their device.
at::Tensor exchangeable(const at::Tensor& values, Group& group) {
  return group.backend(values.device().type()).empty() ? values.cpu() : values;
}

// Mean and sum of squared deviations over all ranks, combined from each rank's own in one exchange of 2C + 1
// numbers.
struct GlobalMoments {
  at::Tensor mean, deviations;  // double
  double count;
};
GlobalMoments global_moments(const at::Tensor& input, Group& group) {
  const auto channels = input.size(1), count = channels == 0 ? 0 : input.numel() / channels;
  auto mine = at::zeros({2 * channels + 1}, input.options().dtype(at::kDouble));
  if (count > 0) {
    auto mean = input.mean(other_dims(input));
    mine.narrow(0, 0, channels).copy_(mean);
    mine.narrow(0, channels, channels)
        .copy_((input - along_channels(mean, input)).square_().sum(other_dims(input)));
    mine[2 * channels] = static_cast<double>(count);
  }
  mine = exchangeable(mine, group);
  auto all = at::empty({group.size(), 2 * channels + 1}, mine.options());
  group.all_gather(all, mine, {.tag = "sync_batch_norm"}).wait();
  const auto counts = all.narrow(1, 2 * channels, 1), means = all.narrow(1, 0, channels),
             own = all.narrow(1, channels, channels);
  const double total = counts.sum().item<double>();
  auto mean = (means * counts).sum(0) / total;
  auto deviations = (own + (means - mean).square() * counts).sum(0);
  return {mean.to(input.device()), deviations.to(input.device()), total};
}

struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  using Optional = std::optional<at::Tensor>;  // Function does not accept undefined tensors.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given, const Optional& given_weight,
                            const Optional& given_bias, const Optional& given_mean, const Optional& given_var,
                            double factor, double eps, Group group) {
    const auto weight = given_weight.value_or(at::Tensor()), bias = given_bias.value_or(at::Tensor());
    const auto running_mean = given_mean.value_or(at::Tensor()),
               running_var = given_var.value_or(at::Tensor());
    // Half-precision values are summed as floats.
    const auto input = given.scalar_type() == at::kDouble ? given : given.to(at::kFloat);
    const auto moments = global_moments(input, group);
    if (moments.count <= 1)
      throw ConfigError(
          fmt::format("SyncBatchNorm: training needs more than one value per channel over all ranks, got {}",
                      moments.count));
    const auto variance = moments.deviations / moments.count;
    if (running_mean.defined()) {
      running_mean.mul_(1 - factor).add_(moments.mean.to(running_mean.scalar_type()), factor);
      running_var.mul_(1 - factor)
          .add_((moments.deviations / (moments.count - 1)).to(running_var.scalar_type()), factor);
    }
    const auto inverse = (variance + eps).rsqrt();
    auto scale = weight.defined() ? weight.to(at::kDouble) * inverse : inverse;
    auto shift = bias.defined() ? bias.to(at::kDouble) - moments.mean * scale : -moments.mean * scale;
    const auto type = input.scalar_type();
    auto output = input * along_channels(scale.to(type), input) + along_channels(shift.to(type), input);
    context->save_for_backward({given, weight, moments.mean.to(type), inverse.to(type)});
    context->saved_data["count"] = moments.count;
    context->saved_data["bias"] = bias.defined();
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<HeldGroup>(group));
    return output.to(given.scalar_type());
  }

  // dx = (dy - mean(dy) - (x - mean) * mean(dy * (x - mean)) / var) * weight / std, with means over all
  // ranks. The gradients of weight and bias are this rank's part, like those of every parameter.
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (at::GradMode::is_enabled())
      throw ConfigError(
          "backward() with create_graph reached SyncBatchNorm, which has no second derivative: use "
          "BatchNorm to compute it");
    const auto saved = context->get_saved_variables();
    const auto &given = saved[0], &weight = saved[1], &mean = saved[2], &inverse = saved[3];
    auto& group = static_cast<HeldGroup&>(*context->saved_data["group"].toCapsule()).group;
    const double count = context->saved_data["count"].toDouble();
    const auto type = mean.scalar_type();
    const auto input = given.to(type), gradient = gradients[0].to(type);
    const auto centred = input - along_channels(mean, input);
    const auto sum = gradient.sum(other_dims(input)), product = (gradient * centred).sum(other_dims(input));
    auto sums = exchangeable(at::stack({sum, product}).to(at::kDouble), group);
    group.all_reduce(sums, {.tag = "sync_batch_norm"}).wait();
    sums = (sums / count).to(input.device());
    const auto slope = (sums[1] * inverse.to(at::kDouble).square()).to(type);
    auto result = gradient - along_channels(sums[0].to(type), input) - centred * along_channels(slope, input);
    const auto scale = weight.defined() ? weight.to(type) * inverse : inverse;
    result.mul_(along_channels(scale, input));
    at::Tensor weights, biases;
    if (weight.defined()) weights = (product * inverse).to(weight.scalar_type());
    if (context->saved_data["bias"].toBool()) biases = sum.to(weight.defined() ? weight.scalar_type() : type);
    return {result.to(given.scalar_type()), weights, biases, {}, {}, {}, {}, {}};
  }
};

template <typename Impl>
BatchNormState state_of(Impl& module, int dims) {
  return {module.weight,
          module.bias,
          module.running_mean,
          module.running_var,
          module.num_batches_tracked,
          module.options,
          module.is_training(),
          dims};
}

template <typename Impl>
class SyncedCall final : public Attachment, public CommunicatesInForward {
 public:
  SyncedCall(Impl& module, int dims, Group group)
      : Attachment("SyncBatchNorm"), module_(module), dims_(dims), group_(std::move(group)) {}

 private:
  at::Tensor forward(const at::Tensor& input) override {
    return sync_batch_norm(input, state_of(module_, dims_), group_);
  }

  Impl& module_;  // The owner of this object.
  int dims_;
  Group group_;
};

// A BatchNorm of a model and its holder.
struct Found {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  torch::nn::SequentialImpl* sequence;  // The Sequential that contains it; null: a Unit or a plain member.
  std::string key;                      // Key in the Sequential.
  int dims;
  bool synced;          // True if it is already synchronised.
  bool shared = false;  // True if a Sequential holds it too; calls through it do not bypass its Unit.
};

int dims_of(const torch::nn::Module& module) {
  if (dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module)) return 1;
  if (dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module)) return 2;
  if (dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module)) return 3;
  return 0;
}

bool is_synced(torch::nn::Module& module) {
  auto* slot = slot_of(&module);
  if (slot && slot->attachment) return slot->attachment->what() == "SyncBatchNorm";
  return dynamic_cast<SyncBatchNorm1dImpl*>(&module) || dynamic_cast<SyncBatchNorm2dImpl*>(&module) ||
         dynamic_cast<SyncBatchNorm3dImpl*>(&module);
}

void collect(torch::nn::Module& parent, const std::string& prefix, std::vector<Found>& found) {
  for (const auto& child : parent.named_children()) {
    const auto name = prefix + child.key();
    if (const int dims = dims_of(*child.value()))
      found.push_back({name, child.value(), dynamic_cast<torch::nn::SequentialImpl*>(&parent), child.key(),
                       dims, is_synced(*child.value())});
    collect(*child.value(), name + ".", found);
  }
}

template <typename Sync, typename Impl>
std::shared_ptr<torch::nn::Module> convert(const Found& found, const Group& group,
                                           const std::shared_ptr<torch::nn::Module>& made) {
  auto& module = dynamic_cast<Impl&>(*found.module);
  if (!found.sequence) {
    attach(module, found.name, std::make_shared<SyncedCall<Impl>>(module, found.dims, group),
           /*watch=*/!found.shared);
    return nullptr;
  }
  auto synced = std::dynamic_pointer_cast<Sync>(made);
  if (!synced) {
    synced = std::make_shared<Sync>(module.options, group);
    synced->share(module);
  }
  for (auto& any : *found.sequence)
    if (any.ptr() == found.module) any = torch::nn::AnyModule(synced);
  found.sequence->replace_module(found.key, synced);
  return synced;
}

}  // namespace

at::Tensor sync_batch_norm(const at::Tensor& input, const BatchNormState& state, Group& group) {
  const bool fits = state.dims == 1 ? input.dim() == 2 || input.dim() == 3 : input.dim() == state.dims + 2;
  if (!fits || input.size(1) != state.options.num_features())
    throw ConfigError(fmt::format(
        "SyncBatchNorm{}d({}): expected a tensor of {} dimensions with {} channels in dim 1, got shape [{}]",
        state.dims, state.options.num_features(), state.dims == 1 ? "2 or 3" : std::to_string(state.dims + 2),
        state.options.num_features(), fmt::join(input.sizes(), ", ")));
  double factor = state.options.momentum().value_or(0.0);
  if (state.training && state.num_batches_tracked.defined()) {
    auto tracked = state.num_batches_tracked;
    tracked += 1;
    if (!state.options.momentum()) factor = 1.0 / tracked.item<double>();
  }
  const bool batch = state.training || !state.running_mean.defined();
  // In evaluation the ranks do not communicate.
  if (!state.training || group.size() == 1)
    return at::batch_norm(input, state.weight, state.bias, state.running_mean, state.running_var, batch,
                          factor, state.options.eps(), /*cudnn_enabled=*/true);
  const auto optional = [](const at::Tensor& tensor, bool wanted = true) {
    return tensor.defined() && wanted ? std::optional(tensor) : std::nullopt;
  };
  const bool track = state.training && state.options.track_running_stats();
  return SyncBatchNormFunction::apply(input, optional(state.weight), optional(state.bias),
                                      optional(state.running_mean, track), optional(state.running_var, track),
                                      factor, state.options.eps(), group);
}

template <int D, typename Base>
void SyncBatchNormImpl<D, Base>::share(const Base& other) {
  // LibTorch does not allow replacing a module's buffers, so their memory is shared.
  for (const auto& [name, mine, theirs] :
       {std::tuple{"weight", &this->weight, &other.weight}, {"bias", &this->bias, &other.bias}}) {
    *mine = *theirs;
    this->parameters_[name] = *theirs;
  }
  if (other.running_mean.defined()) {
    this->running_mean.set_data(other.running_mean);
    this->running_var.set_data(other.running_var);
    this->num_batches_tracked.set_data(other.num_batches_tracked);
  }
  this->train(other.is_training());
}

template <int D, typename Base>
std::shared_ptr<torch::nn::Module> SyncBatchNormImpl<D, Base>::clone(
    const std::optional<at::Device>& device) const {
  using Self = std::conditional_t<D == 1, SyncBatchNorm1dImpl,
                                  std::conditional_t<D == 2, SyncBatchNorm2dImpl, SyncBatchNorm3dImpl>>;
  const auto plain = std::dynamic_pointer_cast<Base>(Base::clone(device));
  auto copy = std::make_shared<Self>(this->options, group_);
  copy->share(*plain);
  return copy;
}

template <int D, typename Base>
void SyncBatchNormImpl<D, Base>::pretty_print(std::ostream& stream) const {
  stream << "lockstep::SyncBatchNorm" << D << "d(" << this->options.num_features() << ", over "
         << group_.size() << " ranks)";
}

template class SyncBatchNormImpl<1, torch::nn::BatchNorm1dImpl>;
template class SyncBatchNormImpl<2, torch::nn::BatchNorm2dImpl>;
template class SyncBatchNormImpl<3, torch::nn::BatchNorm3dImpl>;

}  // namespace detail

int convert_sync_batchnorm(torch::nn::Module& module, Group group, Site site) {
  using detail::Found;
  std::vector<Found> found;
  if (const int dims = detail::dims_of(module))
    found.push_back(
        {"the module itself", module.shared_from_this(), nullptr, "", dims, detail::is_synced(module)});
  detail::collect(module, "", found);
  std::vector<std::string> unreachable;
  for (const auto& each : found)
    if (!each.synced && !each.sequence && !detail::slot_of(each.module.get()))
      unreachable.push_back(fmt::format("{} (BatchNorm{}d)", each.name, each.dims));
  if (!unreachable.empty())
    throw ConfigError(fmt::format(
        "convert_sync_batchnorm: cannot intercept {}, because C++ binds the call of a plain member "
        "statically. Hold it as lockstep::Unit<torch::nn::BatchNorm...>, put it in a "
        "torch::nn::Sequential, or use lockstep::SyncBatchNorm",
        fmt::join(unreachable, ", ")));
  for (auto& each : found)
    each.shared = std::any_of(found.begin(), found.end(), [&](const auto& other) {
      return other.sequence && other.module == each.module;
    });
  // A separate group, so that its collectives and those of gradients need no common order.
  std::vector<int> ranks(static_cast<std::size_t>(group.size()));
  for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = static_cast<int>(i);
  auto own = group.subgroup(ranks, {.name = group.name() + " sync_batch_norm"}).called_at(site);
  // A module that is held twice stays one.
  std::map<torch::nn::Module*, std::shared_ptr<torch::nn::Module>> made;
  int converted = 0;
  for (const auto& each : found) {
    if (each.synced) continue;
    auto& twin = made[each.module.get()];
    if (!each.sequence && detail::slot_of(each.module.get())->attachment) continue;  // Held twice.
    if (!twin) ++converted;
    auto synced =
        each.dims == 1   ? detail::convert<SyncBatchNorm1dImpl, torch::nn::BatchNorm1dImpl>(each, own, twin)
        : each.dims == 2 ? detail::convert<SyncBatchNorm2dImpl, torch::nn::BatchNorm2dImpl>(each, own, twin)
                         : detail::convert<SyncBatchNorm3dImpl, torch::nn::BatchNorm3dImpl>(each, own, twin);
    if (synced) twin = synced;
  }
  return converted;
}

}  // namespace lockstep
