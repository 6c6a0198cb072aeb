// Ranks of a group in shared memory that are processes, without LibTorch and without a control plane.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/comm/transports/shm/engine/group_segment.h>
#include <lockstep/comm/transports/shm/engine/messages.h>
#include <lockstep/comm/transports/shm/engine/op_queue.h>

#include "support/folder.h"

namespace lockstep::shm {

// Exit statuses of a process: it lost a peer, or it saw a wrong result.
constexpr int kLost = 7, kWrong = 8;

// One rank's end of the group.
struct Member {
  int rank = 0, ranks = 1;
  std::shared_ptr<GroupSegment> group_segment;
  std::shared_ptr<OpQueue> op_queue;
  std::shared_ptr<Messages> messages;

  // Runs it to its end; throws the error it failed with.
  void run(Op op);
  void all_reduce(float* data, std::size_t count);
  void send(const void* data, std::size_t bytes, int to, int tag);
  void receive(void* data, std::size_t bytes, int from, int tag);
};

class Processes {
 public:
  using Body = std::function<int(Member& member)>;  // returns the exit status of its process
  Processes(int ranks, Body body, Engine::Tuning tuning = {});
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  pid_t pid(int rank) const { return pids_[static_cast<std::size_t>(rank)]; }
  void kill(int rank, int signal);
  bool met();  // waits for all ranks; false if one ended before
  struct Ended {
    int status = -1, signal = 0;
    std::chrono::steady_clock::time_point at;  // not Clock, which starts a thread: the test must have none
  };
  std::vector<Ended> wait();

 private:
  bool has_ended(std::size_t rank);

  const testing::Folder folder_;
  std::vector<pid_t> pids_;
  std::vector<Ended> ended_;
};

// A KeyValue whose entries are files in the folder.
KeyValue words_in(const std::filesystem::path& folder, const std::string& name);

// Makes the group `name` in this process.
Member join(const std::filesystem::path& folder, const std::string& name, int rank, int ranks,
            Engine::Tuning tuning = {});

}  // namespace lockstep::shm
