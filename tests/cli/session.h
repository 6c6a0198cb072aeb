// A program that a test interacts with while it runs: on pipes, or on a terminal of its own.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "support/eventually.h"
#include "support/folder.h"

namespace lockstep::testing {

class Session {
 public:
  struct Options {
    bool terminal = false;  // The program leads a session with this terminal.
    std::map<std::string, std::string> environment = {};
  };
  explicit Session(const std::vector<std::string>& command) : Session(command, Options()) {}
  Session(const std::vector<std::string>& command, Options options);
  ~Session();  // Kills the rest of its process group.
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // -1 once it has been reaped, which kill(2) would interpret as all processes.
  pid_t pid() const { return pid_; }
  void send(int signal);  // To this process only; no-op if it has ended.
  void type(const std::string& text);
  void close_input();
  // Waits until the output after the last match contains this text. False at the limit.
  bool wait_for(const std::string& text, std::chrono::seconds limit = std::chrono::seconds(60));
  // Its exit status, 128 + the signal's number; -1 if it is still running.
  int wait(std::chrono::seconds limit = std::chrono::seconds(60));
  const std::string& output() const { return output_; }

 private:
  bool read_some(int milliseconds);

  pid_t pid_ = -1;
  int in_ = -1, out_ = -1;
  bool terminal_ = false;
  std::string output_;
  std::size_t found_ = 0;
};

// Quotes a file name for a shell command, in single quotes.
inline std::string word(const std::filesystem::path& file) { return '"' + file.string() + '"'; }

// A file by which one process signals another to continue.
class Sign {
 public:
  // Shell commands that give the signal and that wait for it.
  std::string give() const { return "touch " + word(file_); }
  std::string await() const { return "until [ -e " + word(file_) + " ]; do sleep 0.02; done"; }
  void show() const { std::ofstream(file_).close(); }

 private:
  const Folder folder_;
  const std::filesystem::path file_ = folder_ / "sign";
};

// A text that no other process has among its arguments.
std::string unique_marker();
// The processes with that text among their arguments.
std::vector<pid_t> processes_with(const std::string& marker);
// The child of a process with this name; -1 if there is none.
pid_t child_named(pid_t parent, const std::string& name);

}  // namespace lockstep::testing
