#include <lockstep/parallel/pipeline/plan.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/detail/unready_gradient.h>
#include <lockstep/modules/replicas.h>
#include <lockstep/parallel/pipeline/backward.h>
#include <lockstep/schedule/cut.h>
#include <torch/nn/modules/container/any.h>

namespace lockstep::detail {
namespace {

std::vector<double> parameters_of(const std::vector<PipelineStage>& pieces) {
  std::vector<double> costs;
  for (const auto& piece : pieces) {
    std::set<const void*> seen;
    std::vector<at::Tensor> found;
    if (piece.module()) add_parameters(*piece.module(), seen, found);
    costs.push_back(std::accumulate(found.begin(), found.end(), 1.0, [](double sum, const at::Tensor& each) {
      return sum + static_cast<double>(each.numel());
    }));
  }
  return costs;
}

// Saves what measuring would change (gradients, buffers, the random generator) and restores it.
class Untouched {
 public:
  explicit Untouched(const std::vector<PipelineStage>& pieces) {
    std::set<const void*> seen;
    for (const auto& piece : pieces) {
      add_parameters(*piece.module(), seen, weights_);
      for (const auto& buffer : piece.module()->buffers())
        if (buffer.defined() && seen.insert(buffer.unsafeGetTensorImpl()).second)
          buffers_.emplace_back(buffer, buffer.clone());
    }
    for (auto& weight : weights_) gradients_.push_back(take_gradient(weight));
    auto generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(generator.mutex());
    state_ = generator.get_state();
  }
  Untouched(const Untouched&) = delete;
  Untouched& operator=(const Untouched&) = delete;
  ~Untouched() {
    at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < weights_.size(); ++i) weights_[i].mutable_grad() = gradients_[i];
    for (auto& [buffer, before] : buffers_) buffer.copy_(before);
    auto generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(generator.mutex());
    generator.set_state(state_);
  }

 private:
  std::vector<at::Tensor> weights_, gradients_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
  at::Tensor state_;
};

// Measures forward and backward of each piece, in seconds; the best of a few rounds.
std::vector<double> times_of(const std::vector<PipelineStage>& pieces, StageValues values) {
  constexpr int kRounds = 3;
  const Untouched untouched(pieces);
  std::vector<double> costs;
  for (const auto& piece : pieces) {
    double best = 0;
    StageValues outputs;
    for (int round = 0; round < kRounds; ++round) {
      StageValues inputs;
      for (const auto& value : values) {
        inputs.push_back(value.defined() ? value.detach() : value);
        if (value.defined() && at::isFloatingType(value.scalar_type())) inputs.back().requires_grad_();
      }
      const auto begin = std::chrono::steady_clock::now();
      outputs = piece(inputs);
      StageValues ones;
      for (const auto& output : outputs)
        ones.push_back(output.defined() && output.requires_grad() ? at::ones_like(output) : at::Tensor());
      PipelineBackward(outputs, ones, inputs).whole();
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      best = round == 0 ? seconds : std::min(best, seconds);
    }
    costs.push_back(best);
    values = outputs;
  }
  return costs;
}

// Throws ConfigError for names that cannot coexist in one module.
void check_names(const std::vector<PipelineStage>& pieces) {
  std::map<std::string, std::size_t> names;
  const auto add = [&](const std::string& name, std::size_t piece) {
    if (!names.emplace(name, piece).second)
      throw ConfigError(
          fmt::format("Pipeline: two pieces have the name '{}'; give each a different one", name));
  };
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto name = name_of(pieces, i);
    if (!name.empty()) {
      add(name, i);
      continue;
    }
    for (const auto& child : pieces[i].module()->named_children()) add(child.key(), i);
    for (const auto& item : pieces[i].module()->named_parameters(/*recurse=*/false)) add(item.key(), i);
    for (const auto& item : pieces[i].module()->named_buffers(/*recurse=*/false)) add(item.key(), i);
  }
  for (const auto& [name, piece] : names) {
    const auto inside = names.lower_bound(name + ".");
    if (inside != names.end() && inside->first.starts_with(name + "."))
      throw ConfigError(fmt::format("Pipeline: piece '{}' would be inside piece '{}'", inside->first, name));
  }
}

void check_pieces(const std::vector<PipelineStage>& pieces, const PipelineSchedule& schedule,
                  const PipelineOptions& options, int ranks) {
  if (schedule.num_ranks() != ranks)
    throw ConfigError(fmt::format("schedule '{}' is for {} ranks, but the group has {}", schedule.name,
                                  schedule.num_ranks(), ranks));
  check_schedule(schedule);
  const int stages = schedule.num_stages(), count = static_cast<int>(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i)
    if (!pieces[i].module())
      throw ConfigError(fmt::format("Pipeline: the module holder of piece {} is empty", i));
  check_names(pieces);
  if (count < stages)
    throw ConfigError(
        fmt::format("Pipeline: the model has {} pieces, but schedule '{}' on {} ranks needs at least one "
                    "for each of {} stages",
                    count, schedule.name, ranks, stages));
  if (!options.cut.empty()) {
    const bool fits =
        static_cast<int>(options.cut.size()) == stages &&
        std::all_of(options.cut.begin(), options.cut.end(), [](int each) { return each > 0; }) &&
        std::accumulate(options.cut.begin(), options.cut.end(), 0) == count;
    if (!fits)
      throw ConfigError(
          fmt::format("PipelineOptions::cut: expected {1} positive numbers, one per stage, that add up to "
                      "{2} pieces; got {{{0}}}",
                      fmt::join(options.cut, ", "), stages, count));
  }
  if (options.balance == PipelineBalance::time && options.cut.empty() && count > stages &&
      options.sample.empty())
    throw ConfigError(
        "PipelineOptions: balance = time needs a sample, a micro-batch to run through the pieces");
}

}  // namespace

void add_parameters(const torch::nn::Module& module, std::set<const void*>& seen,
                    std::vector<at::Tensor>& found) {
  for (const auto& parameter : module.parameters())
    if (parameter.defined() && seen.insert(parameter.unsafeGetTensorImpl()).second)
      found.push_back(parameter);
}

std::string name_of(const std::vector<PipelineStage>& pieces, std::size_t number) {
  return pieces[number].name().value_or(std::to_string(number));
}

PipelineSchedule planned_schedule(const std::vector<PipelineStage>& pieces, const AnySchedule& schedule,
                                  const PipelineOptions& options, Group& group) {
  std::vector<std::string> lines = {fmt::format("options: cut {{{}}}, balance {}, scale_gradients {}",
                                                fmt::join(options.cut, ", "),
                                                static_cast<int>(options.balance), options.scale_gradients)};
  PipelineSchedule planned;
  std::exception_ptr wrong;
  try {
    planned = schedule.on(group.size());
    check_pieces(pieces, planned, options, group.size());
    lines.push_back(fmt::format("schedule '{}', {} micro-batches: {}", planned.name, planned.microbatches,
                                to_csv(planned)));
  } catch (const ConfigError& error) {
    wrong = std::current_exception();
    lines.push_back(error.what());
  }
  std::map<const void*, std::string> known;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    lines.push_back(fmt::format("piece {} '{}'", i, name_of(pieces, i)));
    if (!pieces[i].module()) continue;
    for (const auto& item : pieces[i].module()->named_parameters()) {
      const auto& weight = item.value();
      if (!weight.defined()) continue;
      const auto here = fmt::format("piece {}, parameter '{}'", i, item.key());
      const auto [first, is_new] = known.emplace(weight.unsafeGetTensorImpl(), here);
      lines.push_back(fmt::format("{}: {} [{}]{}{}", here, c10::toString(weight.scalar_type()),
                                  fmt::join(weight.sizes(), ", "), weight.requires_grad() ? "" : ", frozen",
                                  is_new ? "" : ", which is that of " + first->second));
    }
  }
  require_same_lines(group, lines, "Pipeline: schedules, options or pieces differ between ranks");
  if (wrong) std::rethrow_exception(wrong);
  return planned;
}

std::vector<int> find_cut(const std::vector<PipelineStage>& pieces, int stages,
                          const PipelineOptions& options, Group& group) {
  if (!options.cut.empty()) return options.cut;
  if (options.balance != PipelineBalance::time || static_cast<int>(pieces.size()) == stages)
    return balanced_cut(options.balance == PipelineBalance::pieces ? std::vector<double>(pieces.size(), 1.0)
                                                                   : parameters_of(pieces),
                        stages);
  // Only one rank measures, so that all ranks agree. If it fails, every rank throws.
  auto all = options.agree.value_or(group);
  std::string text;
  std::exception_ptr wrong;
  try {
    if (all.rank() == 0)
      for (const int each : balanced_cut(times_of(pieces, options.sample), stages))
        text += fmt::format("{} ", each);
  } catch (...) {
    wrong = std::current_exception();
    text = "failed";
  }
  text = all.broadcast_value(std::string_view(text), {.tag = "pipeline cut"});
  if (wrong) std::rethrow_exception(wrong);
  if (text == "failed") throw Error("Pipeline: the first rank could not measure the pieces with the sample");
  std::vector<int> cut;
  for (std::size_t at = 0; at < text.size(); at = text.find(' ', at) + 1)
    cut.push_back(std::stoi(text.substr(at)));
  return cut;
}

void PlacedPieces::place(const std::string& name, const std::shared_ptr<torch::nn::Module>& module) {
  if (name.empty()) {
    unnamed_.push_back(module);
    for (const auto& item : module->named_parameters(/*recurse=*/false))
      register_parameter(item.key(), item.value(), item.value().requires_grad());
    for (const auto& item : module->named_buffers(/*recurse=*/false))
      register_buffer(item.key(), item.value());
    for (const auto& child : module->named_children()) register_module(child.key(), child.value());
    return;
  }
  // "blocks.0": a module "0" in a module "blocks".
  torch::nn::Module* at = this;
  std::size_t begin = 0;
  for (auto dot = name.find('.'); dot != name.npos; begin = dot + 1, dot = name.find('.', begin)) {
    const auto part = name.substr(begin, dot - begin);
    const auto children = at->named_children();
    const auto* found = children.find(part);
    at = found ? found->get() : at->register_module(part, std::make_shared<torch::nn::Module>()).get();
  }
  at->register_module(name.substr(begin), module);
}

void PlacedPieces::train(bool on) {
  torch::nn::Module::train(on);
  for (const auto& module : unnamed_) module->train(on);
}

std::vector<PipelineStage> pieces_of(const torch::nn::Sequential& model) {
  if (model.is_empty()) throw ConfigError("Pipeline: the Sequential is empty (constructed from nullptr)");
  std::vector<PipelineStage> pieces;
  for (const auto& child : model->named_children()) {
    auto& any = *(model->begin() + static_cast<std::ptrdiff_t>(pieces.size()));
    pieces.emplace_back(
        child.value(),
        [any = any](const StageValues& values) mutable {
          if (values.size() != 1) refuse_stage_values("one tensor", values.size(), 1);
          return StageValues{any.forward<at::Tensor>(values[0])};
        },
        child.key());
  }
  return pieces;
}

}  // namespace lockstep::detail
