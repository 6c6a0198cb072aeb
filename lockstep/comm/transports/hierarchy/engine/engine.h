// The collectives of a group that spans hosts, one at a time: shared memory within each host, links between
// hosts. Does not use LibTorch and starts no threads.
//
// Every operation begins with a greeting: the ranks of a host compare their calls in shared memory, and their
// leader exchanges the outcome with those of the other hosts and distributes it. Small sums are sent with the
// greeting. So no data moves before all calls are known to match, and none is sent in a size that its
// receiver does not expect.
//
// Sums: each host sums its ranks' data by the tree over them, and these sums are added by the tree over
// hosts, in the accumulator's type. If Hosts::follow_tree(), that is the tree over all ranks. Each rank is
// responsible for a piece of the data (n bytes, p ranks on h hosts: each sends n (h - 1) / p bytes to other
// hosts); an all-reduce then gathers the sums in the same way, which sends as much again. Windows of the data
// pass through both steps in a pipeline, so that memory and links are busy at the same time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <lockstep/comm/engine/op.h>
#include <lockstep/comm/transports/hierarchy/engine/hosts.h>
#include <lockstep/comm/transports/hierarchy/engine/inside.h>
#include <lockstep/comm/transports/hierarchy/engine/links.h>

namespace lockstep::hierarchy {

using detail::Op;

// Tags of the engine's messages.
enum Tag : int { kGreetingTag, kCallTag, kSumTag, kShareTag, kDataTag };

class Engine final : public detail::CollectiveEngine {
 public:
  struct Tuning {
    std::size_t window = std::size_t{4} << 20;  // bytes of all ranks' pieces together per window
  };
  // inside: null if this rank is alone on its host. memory: where scratch memory comes from that neighbours
  // can reach; null if this rank is alone.
  Engine(Hosts hosts, std::unique_ptr<shm::Engine> inside, std::shared_ptr<Links> links, shm::Memory* memory,
         Tuning tuning);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void begin(Op&) override {}
  void finish(Op& op, Clock::time_point deadline) override;
  void give_up() noexcept override;
  void interrupt(const std::string& cause) override;
  std::string absent() const override;
  bool is_awaited() const override { return inside_.is_awaited(); }  // by a rank of this host

 private:
  struct Greeting;
  struct Sums;
  struct Blocks;
  struct Window;
  using Transfers = std::vector<std::pair<int, Links::TransferPtr>>;  // with their peers

  // engine.cpp
  bool agree(Op& op);
  void meet_leaders(const Call* sums);
  void merge(Greeting& greeting, const Greeting& other, bool is_left, const Call* sums, bool is_last) const;
  std::vector<Call> everybodys(const Call& call);
  void compare(const Call& call, bool fits);
  void send(Transfers& transfers, int to, const void* data, std::size_t bytes, int tag);
  void receive(Transfers& transfers, int from, void* data, std::size_t bytes, int tag);
  void wait(Transfers& transfers);
  char* scratch(std::size_t bytes);
  std::size_t window_items(std::size_t item_size) const;  // of each rank's piece in a window

  // engine_reduce.cpp
  void all_reduce(Op& op);
  void reduce(Op& op);
  void reduce_scatter(Op& op);
  void cut(Op& op, Sums& sums, Blocks& blocks) const;
  void prepare(Sums& sums, std::span<Window> windows);
  void start_sums(const Sums& sums, Window& window);
  void finish_sums(const Sums& sums, Window& window);

  // engine_move.cpp
  void broadcast(Op& op);
  void all_gather(Op& op);
  void gather(Op& op);
  void scatter(Op& op);
  void all_to_all(Op& op);
  void start_share(const Blocks& blocks, Window& window);
  void finish_share(const Blocks& blocks, Window& window);
  void start_gather(const Blocks& blocks, int root, Window& window);
  void finish_gather(const Blocks& blocks, int root, Window& window);

  const Hosts hosts_;
  Inside inside_;
  const std::shared_ptr<Links> links_;
  shm::Memory* const memory_;
  const Tuning tuning_;
  std::uint64_t operations_ = 0;
  Clock::time_point deadline_;  // of the operation in progress
  // What links may write to. Not on the stack, because after a failure they may still write later.
  std::unique_ptr<Greeting[]> greetings_;  // this host's, and another's
  std::vector<std::uint8_t> calls_;
  char* scratch_ = nullptr;
  std::size_t scratch_size_ = 0;
  std::atomic<int> awaited_ = -1;  // a rank of another host
};

}  // namespace lockstep::hierarchy
