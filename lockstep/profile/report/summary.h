// What a step is made of, over all ranks of a profile; its text, and its JSON.
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

// Milliseconds of a rank's main thread; they add up to the step.
struct Parts {
  double compute = 0;        // in LibTorch's operators
  double communication = 0;  // starting operations and waiting for them
  double data = 0;           // waiting for data
  double optimizer = 0;
  double code = 0;   // the program's own, between operators
  double idle = 0;   // asleep there
  double other = 0;  // what was not measured

  Parts& operator+=(const Parts& more);
  Parts operator/(double count) const;
  double sum() const;
};

struct StepSummary {
  std::int64_t step = 0;
  int rank = 0;
  double begin_ms = 0, ms = 0;  // after the window's begin
  Parts parts;
  double transfer_ms = 0;  // with an operation under way
  double waiting_ms = 0;   // of parts.communication: for ranks that had not come yet
  double late_ms = 0;      // behind the middle of the ranks, where it was most
  double flops = 0;
};

// When a rank came to the collectives of a kind, after the first of its ranks.
struct ArrivalSummary {
  int rank = 0;
  double mean_ms = 0, most_ms = 0;
  std::size_t last_times = 0;
};

struct CollectiveSummary {
  Operation operation{};
  std::string group, tag;
  std::int64_t bytes = 0;
  std::size_t count = 0;                 // on all ranks together, once each
  double ms_median = 0;                  // from when the last rank had come to when the last was done
  double gb_per_s = 0;                   // bytes of a rank by that
  double exposed_ms = 0;                 // of a step, mean over ranks
  double doctor_gb_per_s = 0;            // what `lockstep doctor` measured for such a size; 0: not known
  std::vector<ArrivalSummary> arrivals;  // by rank; none of messages
};

struct KernelSummary {
  std::string name;
  std::size_t count = 0;
  double total_ms = 0;
};

// Of a rank's devices; milliseconds of a step, mean.
struct DeviceSummary {
  double busy_ms = 0;                           // something ran, on whichever stream
  double kernel_ms = 0, copy_ms = 0;            // each by itself, also where several ran at once
  double communication_ms = 0, exposed_ms = 0;  // NCCL's kernels; and with nothing else beside them
  std::vector<KernelSummary> top;               // over the whole window, by total time
};

struct RankSummary {
  int rank = 0;
  std::string host;
  double step_median = 0, step_p90 = 0, step_mean = 0;
  Parts parts;  // of a step, mean
  double transfer_ms = 0, waiting_ms = 0;
  int slowest_times = 0;
  std::map<std::string, std::int64_t> memory;  // bytes by kind, at the peak
  std::optional<DeviceSummary> device;
};

struct Summary {
  std::string program, backend;
  int ranks = 0;
  std::vector<std::string> hosts;
  std::vector<int> missing;        // ranks of the run without a profile here
  std::vector<StepSummary> steps;  // by step, then rank
  std::vector<RankSummary> each;
  RankSummary overall;  // mean over ranks; medians over steps of the slowest rank
  std::int64_t first_step = 0, last_step = 0;
  int slowest_rank = -1, slowest_times = 0, num_steps = 0;
  double overlap_percent = 0;
  double samples_per_s = 0, tokens_per_s = 0, flops_per_step = 0, mfu_percent = 0;  // 0: not known
  std::vector<CollectiveSummary> collectives;
  std::vector<std::string> hints;  // at most three
};

// Of profiles on one clock. Throws ConfigError where no step was recorded by all ranks.
Summary summarize(const std::vector<RankProfile>& profiles);
// Nothing where no device was recorded.
std::optional<DeviceSummary> device_summary(const RankProfile& profile, const std::vector<StepOf>& steps);
bool is_communication(const std::string& kernel);
void sum_up_devices(Summary& summary);
std::vector<std::string> hints_for(const Summary& summary);

// Adds what `lockstep doctor --json` said of the transport, where the file is there. Throws ConfigError where
// it is something else.
void add_doctor(Summary& summary, const std::filesystem::path& file);

std::string text_of(const Summary& summary);
nlohmann::json json_of(const Summary& summary);
// What report.html shows: the summary, and the events themselves.
nlohmann::json report_of(const Summary& summary, const std::vector<RankProfile>& profiles);
std::string page_of(const nlohmann::json& report);

}  // namespace lockstep::profile
