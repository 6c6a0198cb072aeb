#include <lockstep/optim/clip_grad.h>

#include <cmath>
#include <span>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/detail/unready_gradient.h>

namespace lockstep {
namespace {

std::vector<at::Tensor> defined_gradients(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters)
    if (parameter.defined() && parameter.grad().defined()) {
      detail::require_ready(parameter.grad());
      gradients.push_back(parameter.grad());
    }
  return gradients;
}

// As in PyTorch: groups gradients by device and dtype, in order of first appearance.
std::vector<std::vector<at::Tensor>> by_kind(const std::vector<at::Tensor>& gradients) {
  std::vector<std::vector<at::Tensor>> kinds;
  for (const auto& gradient : gradients) {
    auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const auto& each) {
      return each[0].device() == gradient.device() && each[0].scalar_type() == gradient.scalar_type();
    });
    if (kind == kinds.end()) kind = kinds.emplace(kinds.end());
    kind->push_back(gradient);
  }
  return kinds;
}

at::Tensor local_norm(const std::vector<std::vector<at::Tensor>>& kinds, double norm_type) {
  std::vector<at::Tensor> norms;
  for (const auto& kind : kinds)
    for (const auto& norm : at::_foreach_norm(kind, norm_type))
      norms.push_back(norm.to(kinds[0][0].device()));
  return at::linalg_vector_norm(at::stack(norms), norm_type);
}

// Sums over ranks in the order of the aligned binary tree (comm/reduce/reduce.h), as tensors, so that it
// does not wait for a device.
at::Tensor tree(std::span<const at::Tensor> values) {
  if (values.size() == 1) return values[0];
  std::size_t left = 1;
  while (2 * left < values.size()) left *= 2;
  return tree(values.first(left)) + tree(values.subspan(left));
}

at::Tensor group_norm(const at::Tensor& local, double norm_type, Group group) {
  const bool largest = std::isinf(norm_type);
  auto power = local.to(at::kDouble);
  if (!largest) power = power.pow(norm_type);
  auto powers = at::empty({group.size()}, power.options());
  group.all_gather(powers, power.view({1}), {.tag = "clip_grad_norm"}).wait();
  // In double on every rank: dtypes may differ between ranks, but the factor must not.
  return largest ? powers.max() : tree(powers.unbind()).pow(1 / norm_type);
}

}  // namespace

at::Tensor clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                          ClipGradNormOptions options) {
  at::NoGradGuard no_grad;
  if (std::isnan(options.norm_type) || (options.group && !(options.norm_type > 0)))
    throw ConfigError(fmt::format("clip_grad_norm: norm_type: expected {}, got {}",
                                  options.group ? "a number above 0 with a group" : "a number",
                                  options.norm_type));
  if (options.counted && !options.group)
    throw ConfigError(
        "clip_grad_norm: {.counted} needs {.group}: the ranks among which the parameters are counted once");
  const auto kinds = by_kind(defined_gradients(parameters));
  const auto counted = options.counted ? by_kind(defined_gradients(*options.counted)) : kinds;
  const auto device = parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
  auto norm = counted.empty() ? at::zeros({}, at::TensorOptions(at::kFloat).device(device))
                              : local_norm(counted, options.norm_type);
  const auto type = norm.scalar_type();
  if (options.group) norm = group_norm(norm, options.norm_type, *options.group);
  if (options.error_if_nonfinite && !std::isfinite(norm.item<double>()))
    throw Error(fmt::format("clip_grad_norm: cannot clip: the gradients' norm of order {} is {}",
                            options.norm_type, norm.item<double>()));
  const auto factor = at::clamp_max(at::mul((norm + 1e-6).reciprocal(), max_norm), 1.0);
  for (const auto& kind : kinds) at::_foreach_mul_(kind, factor.to(kind[0].device()));
  return norm.to(type);
}

void clip_grad_value(const std::vector<at::Tensor>& parameters, double clip_value) {
  at::NoGradGuard no_grad;
  if (!(clip_value >= 0))
    throw ConfigError(fmt::format("clip_grad_value: clip_value: expected 0 or more, got {}", clip_value));
  for (const auto& kind : by_kind(defined_gradients(parameters))) {
    at::_foreach_clamp_min_(kind, -clip_value);
    at::_foreach_clamp_max_(kind, clip_value);
  }
}

}  // namespace lockstep
