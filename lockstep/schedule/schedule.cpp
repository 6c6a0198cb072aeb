#include <lockstep/schedule/schedule.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace lockstep {
namespace {

using enum PipelineOp;

struct Place {
  int rank = 0;
  int number = 0;  // Index among that rank's actions.
};

// Locates every action and the actions that it depends on.
class Plan {
 public:
  explicit Plan(const PipelineSchedule& schedule) : schedule_(schedule) {
    for (int r = 0; r < schedule.num_ranks(); ++r)
      for (int n = 0; n < count(r); ++n) {
        const auto& action = at({r, n});
        check_range(action, r, n);
        if (const auto [found, is_new] = places_.emplace(action, Place{r, n}); !is_new)
          throw ConfigError(fmt::format("schedule '{}': {} appears twice, as {} and as {}", schedule.name,
                                        to_string(action), where(found->second), where({r, n})));
        transfers_ = transfers_ || is_transfer(action.op);
      }
  }

  int count(int rank) const {
    return static_cast<int>(schedule_.ranks[static_cast<std::size_t>(rank)].size());
  }
  const PipelineAction& at(Place place) const {
    return schedule_.ranks[static_cast<std::size_t>(place.rank)][static_cast<std::size_t>(place.number)];
  }
  std::optional<Place> find(PipelineAction action) const {
    const auto found = places_.find(action);
    if (found == places_.end()) return std::nullopt;
    return found->second;
  }
  std::string where(Place place) const {
    return fmt::format("action {} of rank {}", place.number + 1, place.rank);
  }

  // The action that produces the gradient for the previous stage.
  PipelineAction back(int stage, int microbatch) const {
    const PipelineAction whole{backward, stage, microbatch};
    return places_.contains(whole) ? whole : PipelineAction{input_backward, stage, microbatch};
  }

  std::vector<PipelineAction> needs(PipelineAction action) const {
    const auto [op, s, m] = action;
    const int last = schedule_.num_stages() - 1;
    switch (op) {
      case forward:
        if (s == 0) return {};
        if (crosses(s - 1)) return {{receive_forward, s, m}};
        return {{forward, s - 1, m}};
      case backward:
      case input_backward: {
        std::vector<PipelineAction> needed = {{forward, s, m}};
        if (s < last) needed.push_back(crosses(s) ? PipelineAction{receive_backward, s, m} : back(s + 1, m));
        return needed;
      }
      case weight_backward: return {{input_backward, s, m}};
      case send_forward: return {{forward, s, m}};
      case receive_forward: return {{send_forward, s - 1, m}};
      case send_backward: return {back(s, m)};
      case receive_backward: return {{send_backward, s + 1, m}};
    }
    return {};
  }

  // Throws ConfigError unless every required action is present.
  void check_complete() const {
    for (int s = 0; s < schedule_.num_stages(); ++s)
      for (int m = 0; m < schedule_.microbatches; ++m) {
        require({forward, s, m});
        const PipelineAction whole{backward, s, m};
        if (!places_.contains(whole) && !find({input_backward, s, m}) && !find({weight_backward, s, m}))
          require(whole);
        for (const auto part :
             {PipelineAction{input_backward, s, m}, PipelineAction{weight_backward, s, m}}) {
          if (!places_.contains(whole))
            require(part);
          else if (const auto both = find(part))
            throw ConfigError(fmt::format("schedule '{}': {}, {}, is part of {}, {}; use only one of them",
                                          schedule_.name, to_string(part), where(*both), to_string(whole),
                                          where(*find(whole))));
        }
        if (!transfers_ || s + 1 == schedule_.num_stages()) continue;
        for (const auto transfer :
             {PipelineAction{send_forward, s, m}, PipelineAction{receive_forward, s + 1, m},
              PipelineAction{send_backward, s + 1, m}, PipelineAction{receive_backward, s, m}}) {
          if (crosses(s))
            require(transfer);
          else if (const auto found = find(transfer))
            throw ConfigError(fmt::format("schedule '{}': {}, {}, is a transfer between stages of one rank",
                                          schedule_.name, to_string(transfer), where(*found)));
        }
      }
  }

  // True if the schedule has explicit transfers and the next stage is on another rank.
  bool crosses(int stage) const {
    return transfers_ && schedule_.rank_of_stage[static_cast<std::size_t>(stage)] !=
                             schedule_.rank_of_stage[static_cast<std::size_t>(stage + 1)];
  }
  bool has_transfers() const { return transfers_; }

  // Throws ConfigError that explains why ranks cannot proceed past these actions.
  [[noreturn]] void explain(const std::vector<int>& stuck_at) const {
    for (int r = 0; r < schedule_.num_ranks(); ++r) {
      if (stuck_at[static_cast<std::size_t>(r)] == count(r)) continue;
      const Place here{r, stuck_at[static_cast<std::size_t>(r)]};
      for (const auto& needed : needs(at(here))) {
        const auto place = find(needed);
        if (!place)
          throw ConfigError(fmt::format("schedule '{}': {}, {}, needs {}, which no rank performs",
                                        schedule_.name, to_string(at(here)), where(here), to_string(needed)));
        if (place->rank == r && place->number > here.number)
          throw ConfigError(fmt::format("schedule '{}': {}, {}, comes before {}, {}, which it needs",
                                        schedule_.name, to_string(at(here)), where(here), to_string(needed),
                                        where(*place)));
      }
    }
    // Every stuck rank waits for another: find the cycle.
    auto waits_for = [&](int r) -> std::optional<std::pair<PipelineAction, Place>> {
      const int number = stuck_at[static_cast<std::size_t>(r)];
      if (number == count(r)) return std::nullopt;
      for (const auto& needed : needs(at({r, number}))) {
        const auto place = *find(needed);
        if (place.number >= stuck_at[static_cast<std::size_t>(place.rank)]) return std::pair(needed, place);
      }
      return std::nullopt;
    };
    int r = 0;
    while (!waits_for(r)) ++r;
    std::set<int> seen;
    while (seen.insert(r).second) r = waits_for(r)->second.rank;
    const int first = r;
    std::string text;
    do {
      const auto [needed, place] = *waits_for(r);
      text += fmt::format("{}rank {} waits in {} for {}, {}", text.empty() ? "" : "; ", r,
                          to_string(at({r, stuck_at[static_cast<std::size_t>(r)]})), to_string(needed),
                          where(place));
      r = place.rank;
    } while (r != first);
    throw ConfigError(fmt::format("schedule '{}' deadlocks: {}", schedule_.name, text));
  }

 private:
  void check_range(PipelineAction action, int r, int n) const {
    const auto [op, s, m] = action;
    const int stages = schedule_.num_stages();
    if (s < 0 || s >= stages || m < 0 || m >= schedule_.microbatches)
      throw ConfigError(
          fmt::format("schedule '{}': {}, {}, is out of range: there are {} stages and {} micro-batches, "
                      "counted from 0",
                      schedule_.name, to_string(action), where({r, n}), stages, schedule_.microbatches));
    if (const int owner = schedule_.rank_of_stage[static_cast<std::size_t>(s)]; owner != r)
      throw ConfigError(fmt::format("schedule '{}': {}, {}: stage {} belongs to rank {}", schedule_.name,
                                    to_string(action), where({r, n}), s, owner));
    const bool to_before = op == receive_forward || op == send_backward;
    const bool to_next = op == send_forward || op == receive_backward;
    if ((to_before && s == 0) || (to_next && s == stages - 1))
      throw ConfigError(fmt::format("schedule '{}': {}, {}: there is no stage {} it", schedule_.name,
                                    to_string(action), where({r, n}), to_before ? "before" : "after"));
  }
  void require(PipelineAction action) const {
    if (places_.contains(action)) return;
    throw ConfigError(fmt::format("schedule '{}' lacks {} on rank {}", schedule_.name, to_string(action),
                                  schedule_.rank_of_stage[static_cast<std::size_t>(action.stage)]));
  }

  const PipelineSchedule& schedule_;
  std::map<PipelineAction, Place> places_;
  bool transfers_ = false;
};

double time_of(PipelineOp op, const ActionTimes& times) {
  switch (op) {
    case forward: return times.forward;
    case backward: return times.input_backward + times.weight_backward;
    case input_backward: return times.input_backward;
    case weight_backward: return times.weight_backward;
    default: return 0;
  }
}

void find_peaks(const PipelineSchedule& schedule, SimulatedSchedule& run) {
  run.stage_peaks.resize(schedule.rank_of_stage.size());
  std::vector<int> of_stage(schedule.rank_of_stage.size());
  for (const auto& actions : schedule.ranks) {
    int& most = run.peak_activations.emplace_back(0);
    int now = 0;
    for (const auto& action : actions) {
      const auto s = static_cast<std::size_t>(action.stage);
      const int change = action.op == forward                                    ? 1
                         : action.op == backward || action.op == weight_backward ? -1
                                                                                 : 0;
      most = std::max(most, now += change);
      run.stage_peaks[s] = std::max(run.stage_peaks[s], of_stage[s] += change);
    }
  }
}

// time_of(place): duration of the action at that place.
template <typename TimeOf>
SimulatedSchedule simulate(const PipelineSchedule& schedule, const Plan& plan, double transfer,
                           const TimeOf& time_of) {
  SimulatedSchedule run;
  const auto ranks = static_cast<std::size_t>(schedule.num_ranks());
  run.begins.resize(ranks);
  run.ends.resize(ranks);
  std::vector<int> at(ranks, 0);
  // Time at which its dependencies are satisfied; empty if they are not yet.
  auto ready = [&](Place place) -> std::optional<double> {
    const auto& action = plan.at(place);
    double time = place.number == 0 ? 0 : run.ends[static_cast<std::size_t>(place.rank)].back();
    for (const auto& needed : plan.needs(action)) {
      const auto found = plan.find(needed);
      if (!found) return std::nullopt;
      const auto other = static_cast<std::size_t>(found->rank);
      if (found->number >= at[other]) return std::nullopt;
      const double end = run.ends[other][static_cast<std::size_t>(found->number)];
      time = std::max(time, end + (found->rank != place.rank ? transfer : 0));
    }
    return time;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t r = 0; r < ranks; ++r)
      while (at[r] < plan.count(static_cast<int>(r))) {
        const Place here{static_cast<int>(r), at[r]};
        const auto begin = ready(here);
        if (!begin) break;
        run.begins[r].push_back(*begin);
        run.ends[r].push_back(*begin + time_of(here));
        ++at[r];
        moved = true;
      }
  }
  for (std::size_t r = 0; r < ranks; ++r)
    if (at[r] < plan.count(static_cast<int>(r))) plan.explain(at);

  double busy_of_all = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    if (run.ends[r].empty()) continue;
    double busy = 0;
    for (std::size_t n = 0; n < run.ends[r].size(); ++n) busy += run.ends[r][n] - run.begins[r][n];
    busy_of_all += busy;
    run.makespan = std::max(run.makespan, run.ends[r].back());
    if (const double span = run.ends[r].back() - run.begins[r].front(); span > 0)
      run.bubble_inside = std::max(run.bubble_inside, 1 - busy / span);
  }
  if (run.makespan > 0) run.bubble = 1 - busy_of_all / (run.makespan * static_cast<double>(ranks));
  find_peaks(schedule, run);
  return run;
}

}  // namespace

void check_schedule(const PipelineSchedule& schedule) {
  if (schedule.num_stages() < 1 || schedule.microbatches < 1)
    throw ConfigError(
        fmt::format("schedule '{}': expected at least 1 stage and 1 micro-batch, got {} stages and {} "
                    "micro-batches",
                    schedule.name, schedule.num_stages(), schedule.microbatches));
  const Plan plan(schedule);
  plan.check_complete();
  simulate(schedule, plan, 0, [](Place) { return 1; });
}

SimulatedSchedule simulate_schedule(const PipelineSchedule& schedule, ActionTimes times) {
  for (const double time : {times.forward, times.input_backward, times.weight_backward, times.transfer})
    if (!(time >= 0)) throw ConfigError(fmt::format("ActionTimes: times must not be negative, got {}", time));
  const Plan plan(schedule);
  return simulate(schedule, plan, times.transfer,
                  [&](Place place) { return time_of(plan.at(place).op, times); });
}

SimulatedSchedule replay_schedule(const PipelineSchedule& schedule,
                                  const std::vector<std::vector<double>>& durations) {
  const Plan plan(schedule);
  if (durations.size() != schedule.ranks.size())
    throw ConfigError(fmt::format("replay_schedule: got durations of {} ranks, but schedule '{}' has {}",
                                  durations.size(), schedule.name, schedule.num_ranks()));
  for (std::size_t r = 0; r < durations.size(); ++r) {
    if (durations[r].size() != schedule.ranks[r].size())
      throw ConfigError(
          fmt::format("replay_schedule: got {} durations for rank {}, which has {} actions in schedule '{}'",
                      durations[r].size(), r, schedule.ranks[r].size(), schedule.name));
    for (const double time : durations[r])
      if (!(time >= 0))
        throw ConfigError(fmt::format("replay_schedule: durations must not be negative, got {}", time));
  }
  return simulate(schedule, plan, 0, [&](Place place) {
    return durations[static_cast<std::size_t>(place.rank)][static_cast<std::size_t>(place.number)];
  });
}

bool has_transfers(const PipelineSchedule& schedule) {
  return std::any_of(schedule.ranks.begin(), schedule.ranks.end(), [](const auto& actions) {
    return std::any_of(actions.begin(), actions.end(),
                       [](const auto& action) { return is_transfer(action.op); });
  });
}

PipelineSchedule with_transfers(const PipelineSchedule& schedule) {
  if (Plan(schedule).has_transfers())
    throw ConfigError(
        fmt::format("with_transfers: schedule '{}' already has sends and receives", schedule.name));
  auto result = schedule;
  const int last = schedule.num_stages() - 1;
  auto apart = [&](int stage) {
    return schedule.rank_of_stage[static_cast<std::size_t>(stage)] !=
           schedule.rank_of_stage[static_cast<std::size_t>(stage + 1)];
  };
  for (auto& actions : result.ranks) {
    std::vector<PipelineAction> with;
    for (const auto& action : actions) {
      const auto [op, s, m] = action;
      const bool back = op == backward || op == input_backward;
      if (op == forward && s > 0 && apart(s - 1)) with.push_back({receive_forward, s, m});
      if (back && s < last && apart(s)) with.push_back({receive_backward, s, m});
      with.push_back(action);
      if (op == forward && s < last && apart(s)) with.push_back({send_forward, s, m});
      if (back && s > 0 && apart(s - 1)) with.push_back({send_backward, s, m});
    }
    actions = std::move(with);
  }
  return result;
}

}  // namespace lockstep
