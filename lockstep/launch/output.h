// Reads what the ranks write and shows it, on a thread of its own: a terminal that is slow, or held by
// Ctrl-S, holds up the ranks that write to it and nobody else.
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
  ~Output();  // waits until everything has been shown
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // Any thread may call these; they take effect in the order of the calls.
  void begin_attempt(int attempt, int world_size);  // forgets the ranks of the one before
  // The ends of a rank's pipes that are read. ConfigError where its log cannot be written.
  void add_rank(int rank, control::Fd out, control::Fd err);
  void say(std::string line);  // the launcher's own line: "lockstep: ..."
  // The line, and below it the last lines of a rank, if it is one of this host.
  void tell_failure(std::string line, int rank);
  // The job in one line, below everything: on a terminal as it is now, elsewhere (if it is wanted there) now
  // and then.
  void show_status(std::string text);
  void hold_status(bool hold);  // the ranks are stopped: the terminal is somebody else's
  // Nobody is left who could write: what is in the pipes is shown, and they are closed.
  void ranks_are_gone();
  // No more of the above; done_fd() is readable when everything has been shown.
  void finish();
  int done_fd() const { return done_.get(); }
  bool has_lost() const { return lost_; }  // something could not be written

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
  void read(Stream& stream);       // what there is for now
  bool read_some(Stream& stream);  // false where there is nothing for now, or nothing any more
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
  int attempt_ = 0;  // of whoever adds ranks
  control::Fd wake_, done_, poll_;
  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;
  std::optional<std::string> told_status_;  // the last one, while a task for it is among them
  std::atomic<bool> lost_ = false;

  // The thread's own.
  Screen screen_;
  std::map<int, std::shared_ptr<Rank>> ranks_;
  std::vector<std::unique_ptr<Stream>> streams_;
  bool finishing_ = false;
  std::string status_;
  bool status_held_ = false;
  std::chrono::steady_clock::time_point status_at_{},
      status_due_{};  // when it was told; when it may be drawn again

  std::thread thread_;
};

}  // namespace lockstep::detail
