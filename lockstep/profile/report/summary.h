// Breakdown of a step over all ranks of a profile, with text and JSON output.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/profile/record/rank_profile.h>
#include <nlohmann/json_fwd.hpp>

namespace lockstep::profile {

// Milliseconds of a rank's main thread. The parts add up to the step.
struct Parts {
  double compute = 0;        // in LibTorch operators
  double communication = 0;  // starting operations and waiting for them
  double data = 0;           // waiting for data
  double optimizer = 0;
  double code = 0;   // the program's own code, between operators
  double idle = 0;   // asleep between operators
  double other = 0;  // not measured

  Parts& operator+=(const Parts& more);
  Parts operator/(double count) const;
  double sum() const;
};

struct StepSummary {
  std::int64_t step = 0;
  int rank = 0;
  double begin_ms = 0, ms = 0;  // begin_ms: relative to the beginning of the window
  Parts parts;
  double transfer_ms = 0;  // time with at least one operation in flight
  double waiting_ms = 0;   // part of parts.communication spent waiting for late ranks
  double late_ms = 0;      // largest lateness in a collective, relative to the ranks' median
  double flops = 0;
};

// Arrivals of one rank at collectives of one kind, relative to the first rank.
struct ArrivalSummary {
  int rank = 0;
  double mean_ms = 0, most_ms = 0;
  std::size_t last_times = 0;
};

struct CollectiveSummary {
  Operation operation{};
  std::string group, tag;
  std::int64_t bytes = 0;
  std::size_t count = 0;                 // number of operations, each counted once for all ranks
  double ms_median = 0;                  // from the arrival of the last rank to the end on the last rank
  double gb_per_s = 0;                   // a rank's bytes divided by that time
  double exposed_ms = 0;                 // per step, mean over ranks
  double doctor_gb_per_s = 0;            // `lockstep doctor`'s result for a similar size; 0: unknown
  std::vector<ArrivalSummary> arrivals;  // by rank; empty for messages
};

struct KernelSummary {
  std::string name;
  std::size_t count = 0;
  double total_ms = 0;
};

// A rank's devices; milliseconds per step, mean.
struct DeviceSummary {
  double busy_ms = 0;                           // time with any activity on any stream
  double kernel_ms = 0, copy_ms = 0;            // summed individually, even if several ran at once
  double communication_ms = 0, exposed_ms = 0;  // NCCL's kernels, and the part with nothing else running
  std::vector<KernelSummary> top;               // over the whole window, by total time
};

struct RankSummary {
  int rank = 0;
  std::string host;
  double step_median = 0, step_p90 = 0, step_mean = 0;
  Parts parts;  // mean per step
  double transfer_ms = 0, waiting_ms = 0;
  int slowest_times = 0;
  std::map<std::string, std::int64_t> memory;  // peak bytes by kind
  std::optional<DeviceSummary> device;
};

struct Summary {
  std::string program, backend;
  int ranks = 0;
  std::vector<std::string> hosts;
  std::vector<int> missing;        // ranks of the run without a profile here
  std::vector<StepSummary> steps;  // ordered by step, then rank
  std::vector<RankSummary> each;
  RankSummary overall;  // mean over ranks; step times are medians of the slowest rank of each step
  std::int64_t first_step = 0, last_step = 0;
  int slowest_rank = -1, slowest_times = 0, num_steps = 0;
  double overlap_percent = 0;
  double samples_per_s = 0, tokens_per_s = 0, flops_per_step = 0, mfu_percent = 0;  // 0: unknown
  std::vector<CollectiveSummary> collectives;
  std::vector<std::string> hints;  // at most three
};

// Summarises profiles on a common clock. Throws ConfigError if no step was recorded by all ranks.
Summary summarize(const std::vector<RankProfile>& profiles);
// nullopt if no device was recorded.
std::optional<DeviceSummary> device_summary(const RankProfile& profile, const std::vector<StepOf>& steps);
bool is_communication(const std::string& kernel);
void sum_up_devices(Summary& summary);
std::vector<std::string> hints_for(const Summary& summary);

// Adds the transport's results from `lockstep doctor --json`, if the file exists. Throws ConfigError if it is
// not valid.
void add_doctor(Summary& summary, const std::filesystem::path& file);

std::string text_of(const Summary& summary);
nlohmann::json json_of(const Summary& summary);
// Data of report.html: the summary and the events.
nlohmann::json report_of(const Summary& summary, const std::vector<RankProfile>& profiles);
std::string page_of(const nlohmann::json& report);

}  // namespace lockstep::profile
