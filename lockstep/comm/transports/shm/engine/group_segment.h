// A group's place in shared memory, as one of its ranks has it: the region, the other ranks' memory, and the
// sign that this process lives.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/comm/transports/shm/engine/engine.h>
#include <lockstep/comm/transports/shm/engine/fork.h>
#include <lockstep/comm/transports/shm/engine/segment_server.h>

namespace lockstep::shm {

// Where the ranks leave word for one another before they have met: get waits until it is there. What a rank
// has set it forgets when all have read it: a later group may have the same place for its words.
struct KeyValue {
  std::function<void(const std::string& key, const std::string& value)> set;
  std::function<std::string(const std::string& key)> get;
  std::function<void(const std::string& key)> forget;
};

// Of the job on this host.
struct HostInfo {
  int local_ranks = 0;          // 0: not known
  int threads = 1;              // that each computes with
  std::vector<int> names = {};  // of the group's ranks, in errors; none: their numbers

  int name(int rank) const { return names.empty() ? rank : names.at(static_cast<std::size_t>(rank)); }
};

class GroupSegment final : public Memory {
 public:
  // Meets the others. check is called now and then while it waits, and throws to end that.
  GroupSegment(int rank, int ranks, const HostInfo& host_info, const KeyValue& key_value,
               Clock::time_point deadline, const std::function<void()>& check);
  ~GroupSegment() override;

  // Whether every rank has a processor for each of its threads, so that waiting may keep one for a moment. As
  // rank 0 sees it, and so the same on every rank.
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
  std::vector<std::string> processors_;  // that each rank may run on
};

}  // namespace lockstep::shm
