#include <lockstep/parallel/pipeline.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline_cut.h>
#include <lockstep/parallel/pipeline_run.h>
#include <lockstep/parallel/replicas.h>
#include <torch/nn/modules/container/any.h>

namespace lockstep {
namespace {

using detail::PipelineRun;

// Each tensor once, though several modules may have it.
void add_parameters(const torch::nn::Module& module, std::set<const void*>& seen,
                    std::vector<at::Tensor>& found) {
  for (const auto& parameter : module.parameters())
    if (parameter.defined() && seen.insert(parameter.unsafeGetTensorImpl()).second)
      found.push_back(parameter);
}

bool has_transfers(const PipelineSchedule& schedule) {
  return std::any_of(schedule.ranks.begin(), schedule.ranks.end(), [](const auto& actions) {
    return std::any_of(actions.begin(), actions.end(),
                       [](const auto& action) { return action.op >= PipelineOp::send_forward; });
  });
}

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

// Seconds of forward and backward, the best of a few, piece after piece.
std::vector<double> times_of(const std::vector<PipelineStage>& pieces, StageValues values) {
  constexpr int kRounds = 3;
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
      // Gradients are of the inputs and weights; nothing of them is kept.
      std::vector<at::Tensor> weights, kept;
      if (piece.module()) weights = piece.module()->parameters();
      for (auto& weight : weights) kept.push_back(std::exchange(weight.mutable_grad(), {}));
      detail::PipelineBackward(outputs, ones, inputs).whole();
      for (std::size_t i = 0; i < weights.size(); ++i) weights[i].mutable_grad() = kept[i];
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      best = round == 0 ? seconds : std::min(best, seconds);
    }
    costs.push_back(best);
    values = outputs;
  }
  return costs;
}

void check_pieces(const std::vector<PipelineStage>& pieces, const PipelineSchedule& schedule,
                  const PipelineOptions& options, int ranks) {
  if (schedule.num_ranks() != ranks)
    throw ConfigError(fmt::format("schedule '{}' is one for {} ranks; the group has {}", schedule.name,
                                  schedule.num_ranks(), ranks));
  check_schedule(schedule);
  const int stages = schedule.num_stages(), count = static_cast<int>(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i)
    if (!pieces[i].module())
      throw ConfigError(fmt::format("piece {} of the pipeline is an empty module: make it first", i));
  if (count < stages)
    throw ConfigError(
        fmt::format("the model has {} pieces, and schedule '{}' on {} ranks needs one for each of {} stages",
                    count, schedule.name, ranks, stages));
  if (!options.cut.empty()) {
    const bool fits =
        static_cast<int>(options.cut.size()) == stages &&
        std::all_of(options.cut.begin(), options.cut.end(), [](int each) { return each > 0; }) &&
        std::accumulate(options.cut.begin(), options.cut.end(), 0) == count;
    if (!fits)
      throw ConfigError(
          fmt::format("cut = {{{}}} is not allowed: {} numbers above 0 are, one for each stage, which add up "
                      "to the {} pieces",
                      fmt::join(options.cut, ", "), stages, count));
  }
  if (options.balance == PipelineBalance::time && options.cut.empty() && count > stages &&
      options.sample.empty())
    throw ConfigError("balance = time needs a sample: a micro-batch that goes through the pieces");
}

// Every rank's are the same, or every rank is told what is not.
void check_everywhere(const std::vector<PipelineStage>& pieces, const PipelineSchedule& schedule,
                      const PipelineOptions& options, Group& group) {
  std::vector<std::string> lines = {
      fmt::format("schedule '{}', {} micro-batches", schedule.name, schedule.microbatches),
      fmt::format("options: cut {{{}}}, balance {}, scale_gradients {}", fmt::join(options.cut, ", "),
                  static_cast<int>(options.balance), options.scale_gradients)};
  std::exception_ptr wrong;
  try {
    check_pieces(pieces, schedule, options, group.size());
    lines.push_back("actions: " + to_csv(schedule));
  } catch (const ConfigError& error) {
    wrong = std::current_exception();
    lines.push_back(error.what());
  }
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    lines.push_back(fmt::format("piece {} '{}'", i, pieces[i].name().value_or(std::to_string(i))));
    if (!pieces[i].module()) continue;
    for (const auto& item : pieces[i].module()->named_parameters())
      if (item.value().defined())
        lines.push_back(fmt::format(
            "piece {}, parameter '{}': {} [{}]{}", i, item.key(), c10::toString(item.value().scalar_type()),
            fmt::join(item.value().sizes(), ", "), item.value().requires_grad() ? "" : ", frozen"));
  }
  detail::require_same_lines(group, lines, "Pipeline: schedules, options or pieces differ between ranks");
  if (wrong) std::rethrow_exception(wrong);
}

std::vector<int> find_cut(const std::vector<PipelineStage>& pieces, int stages,
                          const PipelineOptions& options, Group& group) {
  if (!options.cut.empty()) return options.cut;
  if (options.balance != PipelineBalance::time || static_cast<int>(pieces.size()) == stages)
    return detail::balanced_cut(options.balance == PipelineBalance::pieces
                                    ? std::vector<double>(pieces.size(), 1.0)
                                    : parameters_of(pieces),
                                stages);
  // Measured once, so that all agree; an error there is everybody's.
  std::string text;
  std::exception_ptr wrong;
  try {
    if (group.rank() == 0)
      for (const int each : detail::balanced_cut(times_of(pieces, options.sample), stages))
        text += fmt::format("{} ", each);
  } catch (...) {
    wrong = std::current_exception();
    text = "failed";
  }
  text = group.broadcast_value(std::string_view(text), {.tag = "pipeline cut"});
  if (wrong) std::rethrow_exception(wrong);
  if (text == "failed") throw Error("rank 0 of the pipeline could not measure the pieces with the sample");
  std::vector<int> cut;
  for (std::size_t at = 0; at < text.size(); at = text.find(' ', at) + 1)
    cut.push_back(std::stoi(text.substr(at)));
  return cut;
}

// "blocks.0": a module "0" in a module "blocks". "": its children and tensors, in the root itself.
void place(torch::nn::Module& root, const std::string& name,
           const std::shared_ptr<torch::nn::Module>& module) {
  if (name.empty()) {
    for (const auto& item : module->named_parameters(/*recurse=*/false))
      root.register_parameter(item.key(), item.value(), item.value().requires_grad());
    for (const auto& item : module->named_buffers(/*recurse=*/false))
      root.register_buffer(item.key(), item.value());
    for (const auto& child : module->named_children()) place(root, child.key(), child.value());
    return;
  }
  const auto dot = name.find('.');
  const auto head = name.substr(0, dot);
  const auto children = root.named_children();
  auto* found = children.find(head);
  if (dot == std::string::npos) {
    if (found) throw ConfigError(fmt::format("two pieces of the pipeline have the name '{}'", name));
    root.register_module(name, module);
    return;
  }
  if (!found) root.register_module(head, std::make_shared<torch::nn::Module>());
  place(**root.named_children().find(head), name.substr(dot + 1), module);
}

std::vector<PipelineStage> pieces_of(const torch::nn::Sequential& model) {
  if (model.is_empty()) throw ConfigError("the pipeline was given an empty Sequential: make it first");
  std::vector<PipelineStage> pieces;
  for (const auto& child : model->named_children()) {
    auto& any = *(model->begin() + static_cast<std::ptrdiff_t>(pieces.size()));
    pieces.emplace_back(
        child.value(),
        [any = any](const StageValues& values) mutable {
          if (values.size() != 1) detail::refuse_stage_values("one tensor", values.size(), 1);
          return StageValues{any.forward<at::Tensor>(values[0])};
        },
        child.key());
  }
  return pieces;
}

}  // namespace

AnySchedule::AnySchedule(ScheduleNamed given)
    : make_([given = std::move(given)](int ranks) {
        return make_schedule(given.name, {.ranks = ranks,
                                          .microbatches = given.num_microbatches,
                                          .stages_per_rank = given.stages_per_rank});
      }) {}
AnySchedule::AnySchedule(PipelineSchedule given) : make_([given = std::move(given)](int) { return given; }) {}

struct Pipeline::State {
  // A weight that ranks have in common, each in a stage of its own.
  struct Tie {
    at::Tensor weight;
    Group group;
  };

  explicit State(Group given) : group(std::move(given)) {}

  Group group;
  PipelineOptions options;
  PipelineSchedule schedule;  // with transfers
  std::vector<int> cut;
  PipelineRun::Stages stages;
  std::shared_ptr<torch::nn::Module> module = std::make_shared<torch::nn::Module>();
  std::vector<at::Tensor> parameters, own;
  std::vector<Tie> ties;
  at::Device device = at::kCPU;
  at::Tensor loss;  // of the last step, where the last stage is
  bool has_loss = false;
  std::vector<PipelineMoment> moments;

  int last_rank() const { return schedule.rank_of_stage.back(); }
  void keep(std::vector<PipelineStage> pieces);
  void tie(const std::vector<std::pair<at::Tensor, std::set<int>>>& holders);
  void add_up_ties();
  PipelineRun run(detail::PipelineJob job);
};

// What this rank's stages need; the rest goes.
void Pipeline::State::keep(std::vector<PipelineStage> pieces) {
  std::map<const void*, std::size_t> numbers;
  std::vector<std::pair<at::Tensor, std::set<int>>> holders;  // of each weight, in the model's order
  std::size_t piece = 0;
  std::set<const void*> seen;
  for (int s = 0; s < schedule.num_stages(); ++s) {
    const int rank = schedule.rank_of_stage[static_cast<std::size_t>(s)];
    std::vector<PipelineStage> mine;
    for (int k = 0; k < cut[static_cast<std::size_t>(s)]; ++k, ++piece) {
      auto& each = pieces[piece];
      for (const auto& weight : each.module()->parameters()) {
        if (!weight.defined()) continue;
        const auto [number, is_new] = numbers.emplace(weight.unsafeGetTensorImpl(), holders.size());
        if (is_new) holders.emplace_back(weight, std::set<int>());
        holders[number->second].second.insert(rank);
      }
      if (rank != group.rank()) continue;
      place(*module, each.name().value_or(std::to_string(piece)), each.module());
      add_parameters(*each.module(), seen, parameters);
      mine.push_back(std::move(each));
    }
    if (!mine.empty())
      stages[s] = [mine = std::move(mine)](StageValues values) {
        for (const auto& each : mine) values = each(values);
        return values;
      };
  }
  if (!parameters.empty()) device = parameters[0].device();
  tie(holders);
}

void Pipeline::State::tie(const std::vector<std::pair<at::Tensor, std::set<int>>>& holders) {
  std::map<std::set<int>, Group> groups;
  for (const auto& [weight, ranks] : holders) {
    if (!ranks.contains(group.rank())) continue;
    if (*ranks.begin() == group.rank()) own.push_back(weight);
    if (ranks.size() == 1 || !weight.requires_grad()) continue;
    auto found = groups.find(ranks);
    if (found == groups.end())
      found = groups.emplace(ranks, group.subgroup({ranks.begin(), ranks.end()})).first;
    ties.push_back({weight, found->second});
  }
}

void Pipeline::State::add_up_ties() {
  std::vector<Work> works;
  for (auto& [weight, holders] : ties) {
    auto& gradient = weight.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(weight, at::MemoryFormat::Preserve);
    works.push_back(holders.all_reduce(gradient, {.tag = "pipeline shared weight"}));
  }
  for (auto& work : works) work.wait();
}

PipelineRun Pipeline::State::run(detail::PipelineJob job) {
  PipelineRun pass(group, schedule, stages, device, std::move(job));
  loss.reset();
  has_loss = false;
  pass.run();
  moments = std::move(pass.moments());
  return pass;
}

Pipeline::Pipeline(std::vector<PipelineStage> pieces, Group group, const AnySchedule& schedule,
                   PipelineOptions options)
    : state_(std::make_unique<State>(std::move(group))) {
  auto planned = schedule.on(state_->group.size());
  check_everywhere(pieces, planned, options, state_->group);
  state_->cut = find_cut(pieces, planned.num_stages(), options, state_->group);
  state_->schedule = has_transfers(planned) ? std::move(planned) : with_transfers(planned);
  state_->options = std::move(options);
  state_->keep(std::move(pieces));
}

Pipeline::Pipeline(torch::nn::Sequential model, Group group, const AnySchedule& schedule,
                   PipelineOptions options)
    : Pipeline(pieces_of(model), std::move(group), schedule, std::move(options)) {}

Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;
Pipeline::~Pipeline() = default;

at::Tensor Pipeline::run(StageValues inputs, StageValues targets, LossOf loss, bool backward) {
  auto& state = *state_;
  const double scale = state.options.scale_gradients ? 1.0 / state.schedule.microbatches : 1.0;
  const auto pass = state.run({.inputs = std::move(inputs),
                               .targets = std::move(targets),
                               .loss = std::move(loss),
                               .backward = backward,
                               .scale = scale});
  if (backward) state.add_up_ties();
  state.has_loss = true;
  if (!is_last()) return {};
  std::vector<at::Tensor> losses;
  for (const auto& each : pass.losses()) losses.push_back(each.reshape({}));
  const auto all = at::stack(losses);
  state.loss = state.options.scale_gradients ? all.mean() : all.sum();
  return state.loss;
}

StageValues Pipeline::run_forward(StageValues inputs) {
  const auto pass = state_->run({.inputs = std::move(inputs)});
  if (!is_last()) return {};
  StageValues whole;
  const auto& parts = pass.outputs();
  for (std::size_t i = 0; i < parts[0].size(); ++i) {
    std::vector<at::Tensor> values;
    for (const auto& part : parts) values.push_back(part[i]);
    whole.push_back(values[0].defined() && values[0].dim() > 0 ? at::cat(values) : values[0]);
  }
  return whole;
}

at::Tensor Pipeline::loss() {
  auto& state = *state_;
  if (!state.has_loss)
    throw ConfigError("the pipeline has no loss: step() or evaluate() comes first, on every rank");
  // A double on the wire: any type of loss fits.
  double value = is_last() ? state.loss.item<double>() : 0;
  value = state.group.broadcast_value(value, {.root = state.last_rank(), .tag = "pipeline loss"});
  return at::scalar_tensor(value, at::kDouble);
}

const std::shared_ptr<torch::nn::Module>& Pipeline::module() const { return state_->module; }
std::vector<at::Tensor> Pipeline::parameters() const { return state_->parameters; }
std::vector<at::Tensor> Pipeline::own_parameters() const { return state_->own; }
const PipelineSchedule& Pipeline::schedule() const { return state_->schedule; }
const std::vector<int>& Pipeline::cut() const { return state_->cut; }
bool Pipeline::is_first() const { return state_->schedule.rank_of_stage.front() == state_->group.rank(); }
bool Pipeline::is_last() const { return state_->last_rank() == state_->group.rank(); }
const std::vector<PipelineMoment>& Pipeline::moments() const { return state_->moments; }

}  // namespace lockstep
