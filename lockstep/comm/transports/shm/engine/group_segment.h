// GroupSegment: one rank's view of a group's shared memory: the control region, mappings of the peers'
// memory, and this process's liveness lock.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/comm/transports/shm/engine/engine.h>
#include <lockstep/comm/transports/shm/engine/fork.h>
#include <lockstep/comm/transports/shm/engine/segment_server.h>

namespace lockstep::shm {

// Key-value store used for rendezvous. get() blocks until the key exists. Each rank deletes its own keys once
// every peer has read them, because a later group may reuse the same prefix.
struct KeyValue {
  std::function<void(const std::string& key, const std::string& value)> set;
  std::function<std::string(const std::string& key)> get;
  std::function<void(const std::string& key)> forget;
};

// The job's processes on this host.
struct HostInfo {
  int local_ranks = 0;          // 0: unknown
  int threads = 1;              // number of threads that each process computes with
  std::vector<int> names = {};  // names of the group's ranks in errors; empty: their numbers

  int name(int rank) const { return names.empty() ? rank : names.at(static_cast<std::size_t>(rank)); }
};

class GroupSegment final : public Memory {
 public:
  // Waits for the peers. Calls check() now and then while it waits; check throws to end the wait.
  GroupSegment(int rank, int ranks, const HostInfo& host_info, const KeyValue& key_value,
               Clock::time_point deadline, const std::function<void()>& check);
  ~GroupSegment() override;

  // True if the host has a processor for every thread of every rank, so that waiters may spin briefly. Rank 0
  // decides, so all ranks agree.
  bool roomy() const { return region().shared().roomy.load(std::memory_order_relaxed) != 0; }
  Region region() const { return {segment_->data(), ranks_}; }

  Place find(const void* pointer, std::size_t bytes) override {
    return Arena::instance().find(pointer, bytes);
  }
  char* map(int rank, Place place, std::size_t bytes, const WaitLimit& limit) override;
  char* allocate(std::size_t bytes) override { return static_cast<char*>(Arena::instance().allocate(bytes)); }
  void free(char* memory) noexcept override { Arena::instance().free(memory); }

 private:
  bool has_room(const HostInfo& host_info) const;
  void meet(std::uint32_t stage, const HostInfo& host_info, Clock::time_point deadline,
            const std::function<void()>& check);

  const int rank_, ranks_;
  const std::uint64_t generation_ = fork_generation();
  std::shared_ptr<Segment> segment_;
  std::vector<std::shared_ptr<Peer>> peers_;
  std::vector<std::string> processors_;  // processors that each rank may run on
};

}  // namespace lockstep::shm
