// Metric files of World::log_metric: lines of JSON or CSV, and TensorBoard event files.
//
//   DIR/metrics.jsonl, DIR/events.out.tfevents.*                  rank 0's
//   DIR/metrics.rank-3.jsonl, DIR/rank-3/events.out.tfevents.*    another rank's, created at its first metric
//
// Each rank writes only its own files. Lines are appended to existing files, so a restarted job continues
// them. Each metric is written at once with one system call, so it survives if the process is killed right
// afterwards.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::detail {

enum class MetricFormat { jsonl, csv };

// "jsonl" or "csv"; `what` names it in the ConfigError.
MetricFormat parse_metric_format(std::string_view what, std::string_view text);
// Throws ConfigError for a name that the files cannot hold: empty, too long, with control characters, not
// UTF-8.
void check_metric_name(std::string_view name);
// One line, without its newline. A missing step is null, or empty in CSV. NaN and infinities are null in
// JSON.
std::string metric_line(MetricFormat format, double time, int rank, std::optional<std::int64_t> step,
                        std::string_view name, double value);
// Creates the folder if needed. Throws a ConfigError that names `what` if that fails or it is not writable.
void check_metric_folder(std::string_view what, const std::string& folder);

class MetricLog {
 public:
  // Creates rank 0's files; throws ConfigError on failure.
  MetricLog(std::string folder, MetricFormat format, int rank);
  ~MetricLog();
  MetricLog(const MetricLog&) = delete;
  MetricLog& operator=(const MetricLog&) = delete;

  // Thread-safe. A metric that cannot be written is lost, with a warning for the first one.
  void add(std::string_view name, double value, std::optional<std::int64_t> step);

 private:
  struct File {
    int fd = -1;
    std::string name;
  };
  void open();
  void close();
  bool write(File& file, std::string_view bytes);
  void trouble(const std::string& why, int reason);

  const std::string folder_;
  const MetricFormat format_;
  const int rank_;

  std::mutex mutex_;
  bool opened_ = false;
  bool ready_ = false;  // True once construction has succeeded: errors are warnings from then on.
  File lines_, events_;
  int trouble_ = 0;        // errno of the first error.
  std::int64_t lost_ = 0;  // Number of metrics that lack a line or an event.
};

}  // namespace lockstep::detail
