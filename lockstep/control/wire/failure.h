// How a process ended, and what that means for the job.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <lockstep/base/error.h>

namespace lockstep::control {

// How a process ended, as far as it is known.
struct Ended {
  int pid = 0;
  std::optional<int> status = {};  // of exit
  std::optional<int> signal = {};
  bool core = false;
  std::string note = {};  // "out of memory: ...", where there is more to say

  bool clean() const { return status == 0; }
  std::string text() const;  // "was killed by signal 9 (SIGKILL)", "exited with status 3", "has ended"
};

// The first failure of a job: what every rank is told, and what the launcher shows.
struct Failure {
  int rank = -1;  // of the world; -1: not of one rank (a host was lost)
  int pid = 0;
  std::string cause = {};  // "was killed by signal 9 (SIGKILL)", "threw: ..."
  std::string where = {};  // "in all_reduce #1841 of group 'world' at train.cpp:42"; empty where not known
  std::int64_t step = -1;  // of World::step; -1: not used
  std::int64_t sequence = -1;                         // of its last collective
  int status = 1;                                     // the job's exit status
  CommError::Kind kind = CommError::Kind::peer_died;  // of the errors that ranks get

  // "rank 2 (pid 4711) was killed by signal 9 (SIGKILL) in all_reduce #1841 of ..., step 12"
  std::string text() const;
  // Whether another attempt came to the same end, at the same place; not where the place is not known.
  bool same_as(const Failure& other) const;
};

}  // namespace lockstep::control
