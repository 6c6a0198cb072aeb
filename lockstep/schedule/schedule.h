// Pipeline schedules as data: the actions of each rank, in order. Provides generators, a text form, a check
// that finds errors before anything runs, and a simulator. No LibTorch.
//
//   auto schedule = lockstep::make_schedule("1f1b", {.ranks = 4, .microbatches = 8});
//   lockstep::check_schedule(schedule);                   // ConfigError names the two conflicting actions
//   auto run = lockstep::simulate_schedule(schedule);     // run.bubble, run.peak_activations
//
// A model is cut into stages. Micro-batches pass through them forward, and their gradients come back.
// Backward is either one action (B) or two: its input part (I), which the previous stage waits for, and its
// weight part (W), which no stage waits for.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class PipelineOp : std::uint8_t {
  forward,           // F
  backward,          // B: both parts
  input_backward,    // I
  weight_backward,   // W
  send_forward,      // SEND_F: the stage's output, to the next stage
  receive_forward,   // RECV_F: the stage's input, from the previous stage
  send_backward,     // SEND_B: the gradient of its input, to the previous stage
  receive_backward,  // RECV_B: the gradient of its output, from the next stage
};

constexpr bool is_transfer(PipelineOp op) { return op >= PipelineOp::send_forward; }

struct PipelineAction {
  PipelineOp op = PipelineOp::forward;
  int stage = 0;
  int microbatch = 0;
  auto operator<=>(const PipelineAction&) const = default;
};

struct PipelineSchedule {
  std::string name;
  int microbatches = 0;
  std::vector<int> rank_of_stage;
  std::vector<std::vector<PipelineAction>> ranks;  // Actions of each rank, in order.

  int num_stages() const { return static_cast<int>(rank_of_stage.size()); }
  int num_ranks() const { return static_cast<int>(ranks.size()); }
  bool operator==(const PipelineSchedule&) const = default;
};

struct ScheduleOptions {
  int ranks = 1;
  int microbatches = 1;
  // For interleaved1f1b and loopedbfs. zbv and dualpipev always have two, the remaining schedules one. 0: the
  // default, two or one.
  int stages_per_rank = 0;
};

// gpipe, 1f1b, interleaved1f1b, loopedbfs, zbh1, zbv, dualpipev.
const std::vector<std::string>& schedule_names();
// Makes a schedule without sends and receives. Throws ConfigError for an unknown name and for unsupported
// numbers.
PipelineSchedule make_schedule(std::string_view name, ScheduleOptions options);

bool has_transfers(const PipelineSchedule& schedule);  // True if it has sends or receives.
// Adds sends and receives between stages on different ranks: each send right after the action that produces
// the value, each receive right before the action that needs it.
PipelineSchedule with_transfers(const PipelineSchedule& schedule);

// Checks that every action appears once, on the rank of its stage and after its dependencies, and that there
// is no deadlock. Throws ConfigError, which names the actions.
void check_schedule(const PipelineSchedule& schedule);

struct ActionTimes {
  // Per stage; a whole backward is the sum of its parts.
  double forward = 1, input_backward = 1, weight_backward = 1;
  double transfer = 0;  // From rank to rank.
};

struct SimulatedSchedule {
  double makespan = 0;
  double bubble = 0;  // Idle fraction of all ranks' time between the first start and the last end.
  // Idle fraction between a rank's own first and last action, for the rank that idles most.
  double bubble_inside = 0;
  // Largest number of micro-batches between their F and the end of their backward, for each rank (over all
  // its stages) and for each stage.
  std::vector<int> peak_activations, stage_peaks;
  std::vector<std::vector<double>> begins, ends;  // Times of each action, by rank.
};
// Throws ConfigError like check_schedule if actions wait for one another.
SimulatedSchedule simulate_schedule(const PipelineSchedule& schedule, ActionTimes times = {});
// Takes the duration of each action, by rank, for example as measured.
SimulatedSchedule replay_schedule(const PipelineSchedule& schedule,
                                  const std::vector<std::vector<double>>& durations);

// "0F3": stage 0, forward, micro-batch 3.
std::string to_string(PipelineAction action);
// PyTorch's form: one line per rank, actions separated by commas. Empty cells are skipped in reading. A rank
// has the stages that its actions name. Throws ConfigError, with line and cell, for text that cannot be
// parsed.
std::string to_csv(const PipelineSchedule& schedule);
PipelineSchedule schedule_from_csv(std::string_view text, std::string name = "custom");

}  // namespace lockstep
