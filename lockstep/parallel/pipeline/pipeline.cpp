#include <lockstep/parallel/pipeline.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/base/span.h>
#include <lockstep/modules/detail/unready_gradient.h>
#include <lockstep/modules/replicas.h>
#include <lockstep/parallel/pipeline/plan.h>
#include <lockstep/parallel/pipeline/run.h>

namespace lockstep {

using detail::PipelineRun;

AnySchedule::AnySchedule(ScheduleNamed given)
    : make_([given = std::move(given)](int ranks) {
        return make_schedule(given.name, {.ranks = ranks,
                                          .microbatches = given.num_microbatches,
                                          .stages_per_rank = given.stages_per_rank});
      }) {}
AnySchedule::AnySchedule(PipelineSchedule given) : make_([given = std::move(given)](int) { return given; }) {}

struct Pipeline::State {
  // A weight shared by several ranks, each of which uses it in a stage of its own.
  struct Tie {
    at::Tensor weight;
    at::Tensor before = {};  // Its gradient before the step.
  };
  struct Ties {
    Group group;
    std::vector<Tie> weights = {};
  };

  explicit State(Group given) : group(std::move(given)) {}

  Group group;
  PipelineOptions options;
  PipelineSchedule schedule;  // Including transfers.
  std::vector<int> cut;
  PipelineRun::Stages stages;
  std::shared_ptr<torch::nn::Module> module;
  std::vector<at::Tensor> parameters, own;
  std::vector<Ties> ties;
  std::optional<detail::PipelineRoutes> routes;
  at::Tensor loss;  // Loss of the last step, on the rank with the last stage.
  bool has_loss = false;
  bool out_of_step = false;  // True if a pass ended with messages in flight.
  std::vector<ActionTiming> moments;

  int last_rank() const { return schedule.rank_of_stage.back(); }
  void keep(std::vector<PipelineStage> pieces);
  void tie(const std::vector<std::pair<at::Tensor, std::set<int>>>& holders);
  void tell_profiler() const;
  void set_ties_aside();
  void add_up_ties();
  PipelineRun run(detail::PipelineJob job);
};

// Keeps the pieces of this rank's stages and drops the rest.
void Pipeline::State::keep(std::vector<PipelineStage> pieces) {
  const auto placed = std::make_shared<detail::PlacedPieces>();
  module = placed;
  std::map<const void*, std::size_t> numbers;
  // Ranks that hold each weight, in the model's order.
  std::vector<std::pair<at::Tensor, std::set<int>>> holders;
  std::size_t piece = 0;
  std::set<const void*> seen;
  at::Device model_device = at::kCPU;
  for (int s = 0; s < schedule.num_stages(); ++s) {
    const int rank = schedule.rank_of_stage[static_cast<std::size_t>(s)];
    std::vector<PipelineStage> mine;
    for (int k = 0; k < cut[static_cast<std::size_t>(s)]; ++k, ++piece) {
      auto& each = pieces[piece];
      for (const auto& weight : each.module()->parameters()) {
        if (!weight.defined()) continue;
        if (model_device.is_cpu() && !weight.is_meta()) model_device = weight.device();
        const auto [number, is_new] = numbers.emplace(weight.unsafeGetTensorImpl(), holders.size());
        if (is_new) holders.emplace_back(weight, std::set<int>());
        holders[number->second].second.insert(rank);
      }
      if (rank != group.rank()) continue;
      placed->place(detail::name_of(pieces, piece), each.module());
      detail::add_parameters(*each.module(), seen, parameters);
      mine.push_back(std::move(each));
    }
    if (!mine.empty())
      stages[s] = [mine = std::move(mine)](StageValues values) {
        for (const auto& each : mine) values = each(values);
        return values;
      };
  }
  routes.emplace(group, parameters.empty() ? std::nullopt : std::optional(parameters[0].device()),
                 model_device, schedule);
  tie(holders);
}

void Pipeline::State::tie(const std::vector<std::pair<at::Tensor, std::set<int>>>& holders) {
  std::map<std::set<int>, std::size_t> known;
  for (const auto& [weight, ranks] : holders) {
    if (!ranks.contains(group.rank())) continue;
    if (*ranks.begin() == group.rank()) own.push_back(weight);
    if (ranks.size() == 1) continue;
    const auto [place, is_new] = known.emplace(ranks, ties.size());
    if (is_new) ties.push_back({group.subgroup({ranks.begin(), ranks.end()})});
    ties[place->second].weights.push_back({weight});
  }
  for (auto& [sharers, weights] : ties) {
    std::vector<at::Tensor> tensors;
    for (const auto& each : weights) tensors.push_back(each.weight);
    detail::broadcast_tensors(sharers, tensors, 0);
  }
}

// Ranks must sum this step's gradients only.
void Pipeline::State::set_ties_aside() {
  for (auto& [sharers, weights] : ties)
    for (auto& each : weights) each.before = detail::take_gradient(each.weight);
}

void Pipeline::State::add_up_ties() {
  at::NoGradGuard no_grad;
  for (auto& [sharers, weights] : ties) {
    // A weight that no stage used has no gradient, as on a single rank.
    std::string used;
    for (const auto& each : weights) used += each.weight.grad().defined() ? '1' : '0';
    const auto all = sharers.all_gather_values(std::string_view(used), {.tag = "pipeline shared weights"});
    std::vector<Work> works;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      auto& gradient = weights[i].weight.mutable_grad();
      if (std::none_of(all.begin(), all.end(), [&](const auto& each) { return each[i] == '1'; })) continue;
      if (!gradient.defined())
        gradient = at::zeros_like(weights[i].weight, at::MemoryFormat::Preserve);
      else if (gradient.layout() != at::kStrided)
        gradient = gradient.to_dense();
      works.push_back(sharers.all_reduce(gradient, {.tag = "pipeline shared weight"}));
    }
    for (auto& work : works) work.wait();
    for (auto& each : weights) {
      auto& gradient = each.weight.mutable_grad();
      const auto before = std::exchange(each.before, {});
      if (before.defined()) gradient = gradient.defined() ? before + gradient : before;
    }
  }
}

// Sends the plan to a profiler, for comparison with the measured actions.
void Pipeline::State::tell_profiler() const {
  const auto sink = detail::span_sink();
  if (!sink) return;
  sink->note("pipeline", to_csv(schedule));
  sink->note("pipeline.name", schedule.name);
  sink->note("pipeline.ranks", fmt::format("{}", fmt::join(group.ranks(), " ")));
}

PipelineRun Pipeline::State::run(detail::PipelineJob job) {
  if (out_of_step)
    throw Error(
        "Pipeline: an earlier step was interrupted, so the ranks are out of step. Construct a new Pipeline "
        "on every rank, or end the job");
  tell_profiler();
  if (job.backward) set_ties_aside();
  PipelineRun pass(*routes, schedule, stages, std::move(job));
  loss.reset();
  has_loss = false;
  out_of_step = true;
  try {
    pass.run();
  } catch (...) {
    out_of_step = !pass.settled();
    for (auto& [sharers, weights] : ties)
      for (auto& each : weights)
        if (each.before.defined()) each.weight.mutable_grad() = std::exchange(each.before, {});
    throw;
  }
  out_of_step = false;
  moments = std::move(pass.moments());
  return pass;
}

Pipeline::Pipeline(std::vector<PipelineStage> pieces, Group group, const AnySchedule& schedule,
                   PipelineOptions options)
    : state_(std::make_unique<State>(std::move(group))) {
  auto planned = detail::planned_schedule(pieces, schedule, options, state_->group);
  state_->cut = detail::find_cut(pieces, planned.num_stages(), options, state_->group);
  state_->schedule = has_transfers(planned) ? std::move(planned) : with_transfers(planned);
  state_->options = std::move(options);
  state_->keep(std::move(pieces));
}

Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;
Pipeline::~Pipeline() = default;

at::Tensor Pipeline::run(StageValues inputs, StageValues targets, LossOf loss, bool backward, Site site) {
  auto& state = *state_;
  const double scale = state.options.scale_gradients ? 1.0 / state.schedule.microbatches : 1.0;
  const auto pass = state.run({.inputs = std::move(inputs),
                               .targets = std::move(targets),
                               .loss = std::move(loss),
                               .backward = backward,
                               .scale = scale,
                               .site = site});
  if (backward) state.add_up_ties();
  state.has_loss = true;
  if (!is_last()) return {};
  std::vector<at::Tensor> losses;
  for (const auto& each : pass.losses()) losses.push_back(each.reshape({}));
  const auto all = at::stack(losses);
  state.loss = state.options.scale_gradients ? all.mean() : all.sum();
  return state.loss;
}

StageValues Pipeline::run_forward(StageValues inputs, Site site) {
  const auto pass = state_->run({.inputs = std::move(inputs), .site = site});
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
    throw ConfigError("Pipeline::loss: no step has run yet; call step() or evaluate() on every rank first");
  // Sent as a double, which can represent a loss of any type.
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
const std::vector<ActionTiming>& Pipeline::moments() const { return state_->moments; }

}  // namespace lockstep
