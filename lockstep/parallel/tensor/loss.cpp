#include <lockstep/parallel/tensor_parallel_loss.h>

#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <torch/csrc/autograd/custom_function.h>

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kTag = "vocab_parallel_cross_entropy";

// Loss of each target; zero for ignored targets. With m the largest logit and S the sum of exp(x - m), both
// over the group, it is log S - (x[target] - m); smoothed by e, it is (1 - e) times that + e (log S - mean(x
// - m)). The gradient, softmax(x) - (1 - e) onehot(target) - e / V, needs only this rank's slice.
struct VocabCrossEntropy : torch::autograd::Function<VocabCrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& targets,
                            Group group, std::int64_t ignore_index, double smoothing) {
    const auto columns = logits.size(-1), first = columns * group.rank(), whole = columns * group.size();
    // Half-precision values are summed as floats.
    const auto values = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
    const auto ignored = targets == ignore_index;
    const auto local = targets - first;
    const auto others = ignored | ((targets >= 0) & (targets < whole) & ((local < 0) | (local >= columns)));
    // Targets outside the vocabulary stay out of range, so that gather throws on every rank.
    const auto places = local.masked_fill(others, 0).unsqueeze(-1);

    auto largest = values.amax(-1);
    group.all_reduce(largest, {.op = ReduceOp::MAX, .tag = kTag}).wait();
    const auto shifted = values - largest.unsqueeze(-1);
    auto chosen = shifted.gather(-1, places).squeeze(-1).masked_fill_(others, 0);
    const auto spread = smoothing > 0 ? shifted.sum(-1) : at::Tensor();
    auto soft = shifted.exp();
    auto sums =
        spread.defined() ? at::stack({soft.sum(-1), chosen, spread}) : at::stack({soft.sum(-1), chosen});
    group.all_reduce(sums, {.tag = kTag}).wait();
    soft.div_(sums[0].unsqueeze(-1));
    const auto log_sum = sums[0].log();
    auto loss = log_sum - sums[1];
    if (spread.defined())
      loss = loss * (1 - smoothing) + (log_sum - sums[2] / static_cast<double>(whole)) * smoothing;
    loss.masked_fill_(ignored, 0);

    context->save_for_backward({soft, places, others, ignored});
    context->saved_data["smoothing"] = smoothing;
    context->saved_data["share"] = smoothing / static_cast<double>(whole);
    context->saved_data["dtype"] = static_cast<std::int64_t>(logits.scalar_type());
    return loss;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (at::GradMode::is_enabled())
      throw ConfigError(
          "backward() with create_graph reached vocab_parallel_cross_entropy, which has no second "
          "derivative");
    const auto saved = context->get_saved_variables();
    const auto &soft = saved[0], &places = saved[1], &others = saved[2], &ignored = saved[3];
    const double smoothing = context->saved_data["smoothing"].toDouble();
    auto result = smoothing > 0 ? soft - context->saved_data["share"].toDouble() : soft.clone();
    const auto hit = others.logical_not().to(result.scalar_type()).mul_(smoothing - 1).unsqueeze(-1);
    result.scatter_add_(-1, places, hit);
    result.mul_(gradients[0].masked_fill(ignored, 0).unsqueeze(-1));
    // Zero even if a logit was infinite.
    result.masked_fill_(ignored.unsqueeze(-1), 0);
    return {result.to(static_cast<at::ScalarType>(context->saved_data["dtype"].toInt())), {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                        const Group& group, VocabCrossEntropyOptions options) {
  if (logits.dim() == 0 ||
      logits.sizes().slice(0, static_cast<std::size_t>(logits.dim() - 1)) != targets.sizes() ||
      targets.scalar_type() != at::kLong || !logits.is_floating_point())
    throw ConfigError(
        fmt::format("vocab_parallel_cross_entropy: expected floating-point logits [..., vocabulary / "
                    "ranks] and int64 targets [...], got logits {} [{}] and targets {} [{}]",
                    at::toString(logits.scalar_type()), fmt::join(logits.sizes(), ", "),
                    at::toString(targets.scalar_type()), fmt::join(targets.sizes(), ", ")));
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1))
    throw ConfigError(
        fmt::format("vocab_parallel_cross_entropy: expected label_smoothing from 0 to 1, got {}",
                    options.label_smoothing));
  auto losses =
      VocabCrossEntropy::apply(logits, targets, group, options.ignore_index, options.label_smoothing);
  switch (options.reduction) {
    case at::Reduction::None: return losses;
    case at::Reduction::Sum: return losses.sum();
    default: return losses.sum() / (targets != options.ignore_index).sum();
  }
}

}  // namespace lockstep
