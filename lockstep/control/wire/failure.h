// How a process ended, and the resulting failure of the job.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <lockstep/base/error.h>

namespace lockstep::control {

// How a process ended, as far as known.
struct Ended {
  int pid = 0;
  std::optional<int> status = {};  // Exit status.
  std::optional<int> signal = {};
  bool core = false;
  std::string note = {};  // "out of memory: ...", if there is more to report.

  bool clean() const { return status == 0; }
  std::string text() const;  // "was killed by signal 9 (SIGKILL)", "exited with status 3", "has ended"
};

// The first failure of a job, as sent to every rank and shown by the launcher.
struct Failure {
  int rank = -1;  // World rank; -1: not of one rank (a host was lost).
  int pid = 0;
  std::string cause = {};      // "was killed by signal 9 (SIGKILL)", "threw: ..."
  std::string where = {};      // "in all_reduce #1841 of group 'world' at train.cpp:42"; empty if not known.
  std::int64_t step = -1;      // Step from World::step; -1: not used.
  std::int64_t sequence = -1;  // Of its last collective.
  int status = 1;              // The job's exit status.
  CommError::Kind kind = CommError::Kind::peer_died;  // Kind of the errors that ranks get.

  // "rank 2 (pid 4711) was killed by signal 9 (SIGKILL) in all_reduce #1841 of ..., step 12"
  std::string text() const;
  // True if another attempt failed in the same way at the same point; false if the point is not known.
  bool same_as(const Failure& other) const;
};

}  // namespace lockstep::control
