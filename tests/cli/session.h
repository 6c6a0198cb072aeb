// A program that a test talks to while it runs: on pipes, or on a terminal of its own.
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
    bool terminal = false;  // the program is the leader of a session that has this terminal
    std::map<std::string, std::string> environment = {};
  };
  explicit Session(const std::vector<std::string>& command) : Session(command, Options()) {}
  Session(const std::vector<std::string>& command, Options options);
  ~Session();  // kills what is left of its process group
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  pid_t pid() const { return pid_; }  // -1 once it has been waited for, which kill(2) takes for everybody
  void send(int signal);              // to it alone; nothing where it has ended
  void type(const std::string& text);
  void close_input();
  // Whether the output, from the last found text on, has come to hold this one.
  bool wait_for(const std::string& text, std::chrono::seconds limit = std::chrono::seconds(60));
  // Its exit status, 128 + the signal's number; -1 where it runs on.
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

// The name of a file as a word of a shell command, which may stand between single quotes.
inline std::string word(const std::filesystem::path& file) { return '"' + file.string() + '"'; }

// A file by which one process tells another to go on.
class Sign {
 public:
  // Shell commands that give the sign and that wait for it.
  std::string give() const { return "touch " + word(file_); }
  std::string await() const { return "until [ -e " + word(file_) + " ]; do sleep 0.02; done"; }
  void show() const { std::ofstream(file_).close(); }

 private:
  const Folder folder_;
  const std::filesystem::path file_ = folder_ / "sign";
};

// A text that no other process has among its arguments.
std::string unique_marker();
// Those that have it among their arguments.
std::vector<pid_t> processes_with(const std::string& marker);
// The child of a process that has this name; -1 where there is none.
pid_t child_named(pid_t parent, const std::string& name);

}  // namespace lockstep::testing
