#include <lockstep/parallel/tensor_parallel_regions.h>

#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/detail/held_group.h>
#include <torch/csrc/autograd/custom_function.h>

namespace lockstep {
namespace detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Forward and backward, and each kind of function, have different tags. If a rank catches an exception and
// continues, its peers then get an error instead of sums of unrelated tensors.
constexpr const char *kCopyBack = "copy_to_group backward", *kReduce = "reduce_from_group",
                     *kGather = "gather", *kGatherBack = "gather backward", *kScatter = "scatter",
                     *kScatterBack = "scatter backward";

void hold(AutogradContext* context, const Group& group, std::int64_t dim = 0) {
  context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<HeldGroup>(group));
  context->saved_data["dim"] = dim;
}

Group held(AutogradContext* context) {
  if (at::GradMode::is_enabled())
    throw ConfigError(
        "backward() with create_graph reached tensor parallelism, which has no second derivative; run the "
        "model on one rank to compute it");
  return static_cast<HeldGroup&>(*context->saved_data["group"].toCapsule()).group;
}

std::int64_t counted(std::int64_t dim, const at::Tensor& tensor, const char* what) {
  const auto from_front = dim < 0 ? dim + tensor.dim() : dim;
  if (from_front < 0 || from_front >= tensor.dim())
    throw ConfigError(fmt::format("{}: dimension {} is out of range for a tensor of shape [{}]", what, dim,
                                  fmt::join(tensor.sizes(), ", ")));
  return from_front;
}

// Reports sizes that do not divide before anything is sent.
std::int64_t counted_and_divisible(std::int64_t dim, const at::Tensor& tensor, const Group& group,
                                   const char* what) {
  const auto from_front = counted(dim, tensor, what);
  if (tensor.size(from_front) % group.size() != 0)
    throw ConfigError(fmt::format(
        "{} along dimension {}: a tensor of shape [{}] cannot be split, because {} is not divisible by the "
        "group's {} "
        "ranks",
        what, dim, fmt::join(tensor.sizes(), ", "), tensor.size(from_front), group.size()));
  return from_front;
}

at::Tensor summed(const at::Tensor& values, Group group, const char* tag) {
  auto sum = values.clone(at::MemoryFormat::Contiguous);
  group.all_reduce(sum, {.tag = tag}).wait();
  return sum;
}

// Sums the tensors of all ranks and returns this rank's slice of the sum.
at::Tensor summed_slice(const at::Tensor& values, Group group, std::int64_t dim, const char* tag) {
  const auto parts = values.unflatten(dim, {group.size(), values.size(dim) / group.size()}).movedim(dim, 0);
  auto out = at::empty(parts.sizes().slice(1), values.options());
  group.reduce_scatter(out, parts.contiguous(), {.tag = tag}).wait();
  return out;
}

// Copies views, because autograd does not allow in-place changes of a function's result that is a view.
at::Tensor own_memory(const at::Tensor& tensor) {
  return tensor.is_view() ? at::_unsafe_view(tensor.contiguous(), tensor.sizes()) : tensor;
}

struct CopyFunction : torch::autograd::Function<CopyFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const Group& group) {
    hold(context, group);
    return input;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {summed(gradients[0], held(context), kCopyBack), {}};
  }
};

// Two parameters at once: their gradients are reduced together.
struct CopyTwoFunction : torch::autograd::Function<CopyTwoFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& bias,
                               const Group& group) {
    hold(context, group);
    return {weight, bias};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto group = held(context);
    auto both = at::cat({gradients[0].reshape(-1), gradients[1].reshape(-1)});
    group.all_reduce(both, {.tag = kCopyBack}).wait();
    const auto count = gradients[0].numel();
    // Clones, because autograd may keep them as gradients, which must not share memory.
    return {both.narrow(0, 0, count).clone().view(gradients[0].sizes()),
            both.narrow(0, count, gradients[1].numel()).clone().view(gradients[1].sizes()),
            {}};
  }
};

struct ReduceFunction : torch::autograd::Function<ReduceFunction> {
  static at::Tensor forward(AutogradContext* context, at::Tensor input, const Group& group, bool in_place) {
    hold(context, group);
    if (!in_place) return summed(input, group, kReduce);
    context->mark_dirty({input});
    auto mine = group;
    mine.all_reduce(input, {.tag = kReduce}).wait();
    return input;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    held(context);
    return {gradients[0], {}, {}};
  }
};

struct GatherFunction : torch::autograd::Function<GatherFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const Group& group,
                            std::int64_t dim, bool sequence) {
    hold(context, group, dim);
    context->saved_data["sequence"] = sequence;
    return joined(input, group, dim, kGather);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto group = held(context);
    const auto dim = context->saved_data["dim"].toInt();
    return {context->saved_data["sequence"].toBool() ? summed_slice(gradients[0], group, dim, kGatherBack)
                                                     : own_slice(gradients[0], group, dim),
            {},
            {},
            {}};
  }
};

struct ScatterFunction : torch::autograd::Function<ScatterFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const Group& group,
                            std::int64_t dim, bool reduce) {
    hold(context, group, dim);
    return reduce ? summed_slice(input, group, dim, kScatter) : own_slice(input, group, dim);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto group = held(context);
    return {joined(gradients[0], group, context->saved_data["dim"].toInt(), kScatterBack), {}, {}, {}};
  }
};

}  // namespace

at::Tensor joined(const at::Tensor& slice, Group group, std::int64_t dim, const char* tag) {
  if (group.size() == 1) return slice;
  auto sizes = slice.sizes().vec();
  sizes.insert(sizes.begin(), group.size());
  auto all = at::empty(sizes, slice.options());
  group.all_gather(all, slice.contiguous(), {.tag = tag}).wait();
  // Dimension 0 is joined without a copy, others with one.
  return own_memory(all.movedim(0, dim).flatten(dim, dim + 1));
}

at::Tensor own_slice(const at::Tensor& whole, const Group& group, std::int64_t dim, int parts) {
  if (group.size() == 1) return whole;
  return own_memory(whole.unflatten(dim, {parts, group.size(), whole.size(dim) / parts / group.size()})
                        .select(dim + 1, group.rank())
                        .clone(at::MemoryFormat::Contiguous)
                        .flatten(dim, dim + 1));
}

at::Tensor reduce_from_group_in_place(at::Tensor input, const Group& group) {
  if (group.size() == 1) return input;
  // Autograd would not see changes through memory shared with a view, and does not allow changes of a leaf.
  const bool own = !input.is_view() && input.is_contiguous() && !(input.requires_grad() && input.is_leaf());
  return ReduceFunction::apply(std::move(input), group, own);
}

Copied copy_to_group(const at::Tensor& weight, const at::Tensor& bias, const Group& group) {
  const auto alone = [&](const at::Tensor& each) {
    return each.defined() ? lockstep::copy_to_group(each, group) : each;
  };
  const bool both = weight.defined() && bias.defined() && weight.requires_grad() && bias.requires_grad() &&
                    weight.scalar_type() == bias.scalar_type();
  if (!both || group.size() == 1) return {alone(weight), alone(bias)};
  const auto copies = CopyTwoFunction::apply(weight, bias, group);
  return {copies[0], copies[1]};
}

}  // namespace detail

at::Tensor copy_to_group(const at::Tensor& input, const Group& group) {
  // Without a backward pass there is nothing to reduce.
  if (group.size() == 1 || !input.requires_grad() || !at::GradMode::is_enabled()) return input;
  return detail::CopyFunction::apply(input, group);
}

at::Tensor reduce_from_group(const at::Tensor& input, const Group& group) {
  if (group.size() == 1) return input;
  return detail::ReduceFunction::apply(input, group, /*in_place=*/false);
}

at::Tensor gather_from_group(const at::Tensor& input, const Group& group, std::int64_t dim) {
  dim = detail::counted(dim, input, "gather_from_group");
  if (group.size() == 1) return input;
  return detail::GatherFunction::apply(input, group, dim, /*sequence=*/false);
}

at::Tensor scatter_to_group(const at::Tensor& input, const Group& group, std::int64_t dim) {
  dim = detail::counted_and_divisible(dim, input, group, "scatter_to_group");
  if (group.size() == 1) return input;
  return detail::ScatterFunction::apply(input, group, dim, /*reduce=*/false);
}

at::Tensor gather_sequence(const at::Tensor& input, const Group& group, std::int64_t dim) {
  dim = detail::counted(dim, input, "gather_sequence");
  if (group.size() == 1) return input;
  return detail::GatherFunction::apply(input, group, dim, /*sequence=*/true);
}

at::Tensor reduce_scatter_sequence(const at::Tensor& input, const Group& group, std::int64_t dim) {
  dim = detail::counted_and_divisible(dim, input, group, "reduce_scatter_sequence");
  if (group.size() == 1) return input;
  return detail::ScatterFunction::apply(input, group, dim, /*reduce=*/true);
}

}  // namespace lockstep
