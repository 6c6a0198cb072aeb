// Pipeline schedules as data: which rank does what, in which order. Generators, a text form, a check that
// finds what is wrong before anything runs, and a simulator. No LibTorch.
//
//   auto schedule = lockstep::make_schedule("1f1b", {.ranks = 4, .microbatches = 8});
//   lockstep::check_schedule(schedule);                   // ConfigError with the two actions that disagree
//   auto run = lockstep::simulate_schedule(schedule);     // run.bubble, run.peak_activations
//
// A model is cut into stages; micro-batches go through them forward and come back. Backward may be one action
// (B) or two: its input part (I), which the stage before waits for, and its weight part (W), which nobody
// waits for.
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
  send_forward,      // SEND_F: its output to the next stage
  receive_forward,   // RECV_F: its input from the stage before
  send_backward,     // SEND_B: the gradient of its input to the stage before
  receive_backward,  // RECV_B: the gradient of its output from the next stage
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
  std::vector<std::vector<PipelineAction>> ranks;  // what each does, in this order

  int num_stages() const { return static_cast<int>(rank_of_stage.size()); }
  int num_ranks() const { return static_cast<int>(ranks.size()); }
  bool operator==(const PipelineSchedule&) const = default;
};

struct ScheduleOptions {
  int ranks = 1;
  int microbatches = 1;
  // Of interleaved1f1b and loopedbfs; zbv and dualpipev have two, the others one. 0: two, or one.
  int stages_per_rank = 0;
};

// gpipe, 1f1b, interleaved1f1b, loopedbfs, zbh1, zbv, dualpipev.
const std::vector<std::string>& schedule_names();
// Without sends and receives. ConfigError for a name that is none of these, and for numbers that it cannot
// have.
PipelineSchedule make_schedule(std::string_view name, ScheduleOptions options);

bool has_transfers(const PipelineSchedule& schedule);  // sends or receives
// Sends and receives between stages of different ranks: each right after what it sends, right before what
// needs it.
PipelineSchedule with_transfers(const PipelineSchedule& schedule);

// Everything once, on the rank that has the stage, nothing before what it needs, nothing that waits for ever.
// ConfigError that names the actions.
void check_schedule(const PipelineSchedule& schedule);

struct ActionTimes {
  double forward = 1, input_backward = 1,
         weight_backward = 1;  // of a stage; backward is the sum of its parts
  double transfer = 0;         // from rank to rank
};

struct SimulatedSchedule {
  double makespan = 0;
  double bubble = 0;  // the part of all ranks' time, from the first start to the last end, in which they idle
  double bubble_inside =
      0;  // the same between a rank's own first and last action, of the rank that idles most
  // The most micro-batches between their F and the end of their backward: of each rank, all its stages
  // together, and of each stage.
  std::vector<int> peak_activations, stage_peaks;
  std::vector<std::vector<double>> begins, ends;  // of each action, by rank
};
// Throws as check_schedule where actions wait for one another.
SimulatedSchedule simulate_schedule(const PipelineSchedule& schedule, ActionTimes times = {});
// With the time that each action takes, by rank: measured ones, say.
SimulatedSchedule replay_schedule(const PipelineSchedule& schedule,
                                  const std::vector<std::vector<double>>& durations);

// "0F3": stage 0, forward, micro-batch 3.
std::string to_string(PipelineAction action);
// A line for each rank, actions separated by commas: PyTorch's form. Empty cells are passed over in reading.
// Ranks have the stages that their actions name. ConfigError with line and cell for what cannot be read.
std::string to_csv(const PipelineSchedule& schedule);
PipelineSchedule schedule_from_csv(std::string_view text, std::string name = "custom");

}  // namespace lockstep
