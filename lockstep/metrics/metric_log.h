// Where World::log_metric writes: lines of JSON or CSV, and TensorBoard's event files. No LibTorch.
//
//   DIR/metrics.jsonl, DIR/events.out.tfevents.*                  rank 0's
//   DIR/metrics.rank-3.jsonl, DIR/rank-3/events.out.tfevents.*    another rank's, made when it logs something
//
// Each rank has files of its own, so that nobody writes into another's. Lines are added to files that are
// there: a job that was started again goes on with them. What is logged is written at once, in one call of
// the system: it is there when the process is killed a moment later.
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
// ConfigError for a name that files cannot hold: empty, long, with control characters, not UTF-8.
void check_metric_name(std::string_view name);
// One line, without its end. No step: null, or nothing in CSV. Numbers that are none: null in JSON.
std::string metric_line(MetricFormat format, double time, int rank, std::optional<std::int64_t> step,
                        std::string_view name, double value);
// ConfigError, which says what `what` was, where the folder is not there and cannot be made, or not be
// written.
void check_metric_folder(std::string_view what, const std::string& folder);

class MetricLog {
 public:
  // Rank 0's files are made here: ConfigError where that cannot be done.
  MetricLog(std::string folder, MetricFormat format, int rank);
  ~MetricLog();
  MetricLog(const MetricLog&) = delete;
  MetricLog& operator=(const MetricLog&) = delete;

  // Any thread. What cannot be written is lost, with a warning the first time.
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
  bool ready_ = false;  // from here on what goes wrong is a warning
  File lines_, events_;
  int trouble_ = 0;        // errno of the first one
  std::int64_t lost_ = 0;  // metrics of which a line or an event is missing
};

}  // namespace lockstep::detail
