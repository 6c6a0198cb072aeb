// Reads the ranks' output and shows it on its own thread. A terminal that is slow, or paused by Ctrl-S,
// blocks only the ranks that write to it.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <lockstep/launch/options.h>
#include <lockstep/launch/screen.h>
#include <lockstep/os/socket.h>

namespace lockstep::detail {

class Output {
 public:
  explicit Output(const LaunchOptions& options);
  ~Output();  // Waits until everything has been shown.
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // Thread-safe; calls take effect in call order.
  void begin_attempt(int attempt, int world_size);  // Forgets the ranks of the previous attempt.
  // Takes the read ends of a rank's pipes. Throws ConfigError if its log cannot be written.
  void add_rank(int rank, control::Fd out, control::Fd err);
  void say(std::string line);  // A line of the launcher itself: "lockstep: ...".
  // Shows the line, and below it the rank's last lines if it is on this host.
  void tell_failure(std::string line, int rank);
  // Shows the job's status below the output: continuously on a terminal; elsewhere, if enabled, as a line now
  // and then.
  void show_status(std::string text);
  void hold_status(bool hold);  // The ranks are stopped, and another job has the terminal.
  // Call when no writer is left: shows what is in the pipes and closes them.
  void ranks_are_gone();
  // No calls of the above may follow. done_fd() becomes readable once everything has been shown.
  void finish();
  int done_fd() const { return done_.get(); }
  bool has_lost() const { return lost_; }  // True if some output could not be written.

 private:
  struct Rank {
    std::deque<std::string> last_lines;
    control::Fd log;
    std::string log_name;
  };
  struct Stream;

  void post(std::function<void()> task);
  void run();
  void run_tasks();
  void read(Stream& stream);       // Reads what is available now.
  bool read_some(Stream& stream);  // Returns false if nothing is available now, or the stream has ended.
  void take(Stream& stream, std::string_view bytes);
  void end_line(Stream& stream);
  void overwrite_line(Stream& stream);
  void end_stream(Stream& stream);
  void show_prompts();
  void show_last_lines(int rank);
  void end_those_left_over();
  void draw_status();
  int milliseconds_to_wait() const;

  const LaunchOptions& options_;
  int attempt_ = 0;  // Used by the thread that adds ranks.
  control::Fd wake_, done_, poll_;
  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;
  std::optional<std::string> told_status_;  // The latest status, while a task to show it is queued.
  std::atomic<bool> lost_ = false;

  // Used only by the output thread.
  Screen screen_;
  std::map<int, std::shared_ptr<Rank>> ranks_;
  std::vector<std::unique_ptr<Stream>> streams_;
  bool finishing_ = false;
  std::string status_;
  bool status_held_ = false;
  std::chrono::steady_clock::time_point status_at_{},
      status_due_{};  // When the status was set; when it may be drawn again.

  std::thread thread_;
};

}  // namespace lockstep::detail
