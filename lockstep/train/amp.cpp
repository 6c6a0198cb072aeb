#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <fmt/ostream.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/detail/unready_gradient.h>
#include <lockstep/optim/distributed_optimizer.h>
#include <lockstep/train/autocast.h>
#include <lockstep/train/grad_scaler.h>
#include <torch/optim/optimizer.h>

namespace lockstep {

namespace autocast = at::autocast;

Autocast::Autocast(at::DeviceType device, std::optional<at::ScalarType> dtype, AutocastOptions options)
    : device_(device) {
  if (device != at::kCPU && device != at::kCUDA)
    throw ConfigError(fmt::format("Autocast: device: expected cpu or cuda, got {}", fmt::streamed(device)));
  if (dtype && *dtype != at::kBFloat16 && *dtype != at::kHalf)
    throw ConfigError(
        fmt::format("Autocast: dtype: expected BFloat16 or Half, got {}", fmt::streamed(*dtype)));
  enabled_before_ = autocast::is_autocast_enabled(device);
  cache_enabled_before_ = autocast::is_autocast_cache_enabled();
  dtype_before_ = autocast::get_autocast_dtype(device);
  autocast::set_autocast_enabled(device, options.enabled);
  if (dtype) autocast::set_autocast_dtype(device, *dtype);
  autocast::increment_nesting();
  if (options.cache_enabled) autocast::set_autocast_cache_enabled(*options.cache_enabled);
}

Autocast::~Autocast() {
  if (autocast::decrement_nesting() == 0) autocast::clear_cache();
  autocast::set_autocast_enabled(device_, enabled_before_);
  autocast::set_autocast_dtype(device_, dtype_before_);
  autocast::set_autocast_cache_enabled(cache_enabled_before_);
}

GradScaler::GradScaler(GradScalerOptions options) : options_(std::move(options)) {
  if (!options_.enabled) return;
  if (!(options_.init_scale > 0) || std::isinf(options_.init_scale))
    throw ConfigError(
        fmt::format("GradScaler: init_scale: expected a number above 0, got {}", options_.init_scale));
  if (!(options_.growth_factor > 1))
    throw ConfigError(
        fmt::format("GradScaler: growth_factor: expected more than 1, got {}", options_.growth_factor));
  if (!(options_.backoff_factor < 1 && options_.backoff_factor > 0))
    throw ConfigError(fmt::format("GradScaler: backoff_factor: expected a number between 0 and 1, got {}",
                                  options_.backoff_factor));
  if (options_.growth_interval < 1)
    throw ConfigError(
        fmt::format("GradScaler: growth_interval: expected at least 1, got {}", options_.growth_interval));
}

void GradScaler::need_scale(const char* what) const {
  if (!scale_.defined()) throw ConfigError(fmt::format("GradScaler::{}: call scale(loss) first", what));
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!options_.enabled) return loss;
  if (!scale_.defined()) {
    const at::TensorOptions on_device = at::TensorOptions().device(loss.device());
    scale_ = at::full({}, options_.init_scale, on_device.dtype(at::kFloat));
    growth_tracker_ = at::full({}, first_growth_, on_device.dtype(at::kInt));
  }
  return loss * scale_.to(loss.device());
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  need_scale("unscale_");
  auto& own = optimizers_[&optimizer];
  if (own.stage == Stage::unscaled)
    throw ConfigError("GradScaler::unscale_: already called for this optimizer since the last update()");
  if (own.stage == Stage::stepped) throw ConfigError("GradScaler::unscale_: call it before step()");

  at::NoGradGuard no_grad;
  auto* sharded = dynamic_cast<detail::ShardedOptimizer*>(&optimizer);
  if (sharded != nullptr) sharded->require_complete();
  // Grouped by device and dtype, as LibTorch's kernel requires. Check all gradients before changing any.
  std::map<std::tuple<at::DeviceType, int, at::ScalarType>, std::vector<at::Tensor>> kinds;
  for (auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      const auto& gradient = parameter.grad();
      detail::require_ready(gradient);
      // For a sharded optimizer, check the parameter: some ranks may have no slice of it.
      const bool half = sharded != nullptr ? parameter.scalar_type() == at::kHalf
                                           : gradient.defined() && gradient.scalar_type() == at::kHalf;
      if (half)
        throw ConfigError(
            "GradScaler::unscale_: cannot unscale float16 gradients; keep parameters in float32 and use "
            "Autocast");
      if (!gradient.defined()) continue;
      const auto values = gradient.is_sparse() ? gradient._values() : gradient;
      kinds[{values.device().type(), values.device().index(), values.scalar_type()}].push_back(values);
    }
  const auto inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  own.found_inf = at::zeros({}, scale_.options());
  for (const auto& [kind, gradients] : kinds) {
    const auto device = gradients[0].device();
    auto found = at::zeros({}, scale_.options().device(device));
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse.to(device));
    own.found_inf.add_(found.to(scale_.device()));
  }
  // Ranks that each have a part of the gradients must skip a step together.
  const auto agree = [&](Group group) {
    group.all_reduce(own.found_inf, {.op = ReduceOp::MAX, .tag = "GradScaler found_inf"}).wait();
  };
  if (sharded != nullptr) agree(sharded->group());
  if (options_.group) agree(*options_.group);
  own.stage = Stage::unscaled;
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  need_scale("step");
  if (optimizers_[&optimizer].stage == Stage::stepped)
    throw ConfigError("GradScaler::step: already called for this optimizer since the last update()");
  if (optimizers_[&optimizer].stage == Stage::ready) unscale_(optimizer);
  auto& own = optimizers_[&optimizer];
  own.stage = Stage::stepped;
  if (own.found_inf.item<float>() != 0) {
    // The sharded gradients are not the model's, so model->zero_grad() would not clear them, and all later
    // steps would be skipped, too.
    if (auto* sharded = dynamic_cast<detail::ShardedOptimizer*>(&optimizer)) sharded->drop_gradients();
    return false;
  }
  optimizer.step();
  return true;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  need_scale("update");
  at::NoGradGuard no_grad;
  if (new_scale) {
    if (!(*new_scale > 0) || std::isinf(*new_scale))
      throw ConfigError(fmt::format("GradScaler::update: expected a scale above 0, got {}", *new_scale));
    scale_.fill_(*new_scale);
  } else {
    at::Tensor found;
    for (const auto& [optimizer, own] : optimizers_)
      if (own.found_inf.defined()) found = found.defined() ? found + own.found_inf : own.found_inf;
    if (!found.defined()) throw ConfigError("GradScaler::update: call step(optimizer) first");
    at::_amp_update_scale_(scale_, growth_tracker_, found, options_.growth_factor, options_.backoff_factor,
                           options_.growth_interval);
  }
  optimizers_.clear();
}

double GradScaler::current_scale() const {
  if (!options_.enabled) return 1;
  return scale_.defined() ? scale_.item<float>() : options_.init_scale;
}

std::map<std::string, double> GradScaler::state() const {
  if (!options_.enabled) return {};
  const auto tracker = growth_tracker_.defined() ? growth_tracker_.item<int>() : first_growth_;
  return {{"scale", current_scale()},
          {"growth_factor", options_.growth_factor},
          {"backoff_factor", options_.backoff_factor},
          {"growth_interval", static_cast<double>(options_.growth_interval)},
          {"_growth_tracker", static_cast<double>(tracker)}};
}

void GradScaler::load_state(const std::map<std::string, double>& state) {
  if (!options_.enabled) return;
  // Read and validate everything before changing anything.
  auto number = [&](const char* name, bool whole, double lowest, double highest) {
    const auto found = state.find(name);
    if (found == state.end())
      throw ConfigError(fmt::format("GradScaler::load_state: missing '{}'{}", name,
                                    state.empty() ? "; the state was saved by a disabled GradScaler" : ""));
    const double value = found->second;
    if (!(value >= lowest && value <= highest) || (whole && value != std::floor(value)))
      throw ConfigError(fmt::format("GradScaler::load_state: invalid {} = {}", name, value));
    return value;
  };
  constexpr double most = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::denorm_min();
  const double scale = number("scale", false, 0, most);
  const double growth_factor = number("growth_factor", false, 1, most);
  const double backoff_factor = number("backoff_factor", false, least, 1);
  const double growth_interval = number("growth_interval", true, 1, 1e15);
  const double tracker = number("_growth_tracker", true, 0, std::numeric_limits<int>::max());
  options_.init_scale = scale;
  options_.growth_factor = growth_factor;
  options_.backoff_factor = backoff_factor;
  options_.growth_interval = static_cast<std::int64_t>(growth_interval);
  first_growth_ = static_cast<std::int64_t>(tracker);
  if (!scale_.defined()) return;
  scale_.fill_(options_.init_scale);
  growth_tracker_.fill_(first_growth_);
}

}  // namespace lockstep
