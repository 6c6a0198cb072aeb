// The collectives of one group in shared memory, one at a time. Does not use LibTorch and starts no threads.
//
// In every collective, each rank publishes where its data is, all ranks synchronise, and each takes
// what it needs from its peers. Data is in the slot itself (small), is used in place (in shared memory: no
// copy), or passes through staging buffers, chunk by chunk. Calls are compared before any data is taken.
//
// Bytes moved by all p ranks in an all-reduce of n bytes: in place 2pn, the minimum (each chunk is read from
// all p buffers and its sum written to all p); staged (p + 4) pn, or 7pn from four ranks on.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/comm/engine/op.h>
#include <lockstep/comm/transports/shm/engine/arena.h>
#include <lockstep/comm/transports/shm/engine/barrier.h>
#include <lockstep/comm/transports/shm/engine/stage_copy.h>

namespace lockstep::shm {

using detail::Op;

// How memory is reached: this rank's by its peers, and the peers' by this rank.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual Place find(const void* pointer, std::size_t bytes) = 0;
  // May wait for that rank the first time.
  virtual char* map(int rank, Place place, std::size_t bytes, const WaitLimit& limit) = 0;
  virtual char* allocate(std::size_t bytes) = 0;  // memory that peers can map
  virtual void free(char* memory) noexcept = 0;
};

// The ranks' calls differ: every rank gets the same text, and nothing has been written.
class Mismatch : public detail::KindedError {
 public:
  explicit Mismatch(const std::string& text) : KindedError(CommError::Kind::mismatch, text) {}
};

struct Source;  // where a rank's data is

class Engine final : public detail::CollectiveEngine {
 public:
  struct Tuning {
    std::chrono::nanoseconds spin{0};
    std::size_t chunk = std::size_t{256} << 10;  // bytes that each rank stages at a time
    std::size_t claim = std::size_t{128} << 10;  // bytes claimed at a time, in place
    // up to this many ranks each one sums everything for itself; with more, each sums a share for all
    int pull_up_to = 3;
    // up to this many bytes in all slots together each rank sums them for itself
    std::size_t slot_pull = 16384;
  };
  // names: of the ranks, in errors, if they differ from their numbers.
  Engine(Region region, int rank, Tuning tuning, Memory& memory, std::vector<int> names = {});
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void begin(Op& op) override;
  void finish(Op& op, Clock::time_point deadline) override;
  void give_up() noexcept override;
  void interrupt(const std::string& cause) override { barrier_.interrupt(cause); }
  std::string absent() const override { return barrier_.absent(); }
  bool is_awaited() const override { return barrier_.is_awaited(); }

  Barrier& barrier() { return barrier_; }

 private:
  struct CollectiveState;
  void begin_refused(Op& op);
  void come();
  void meet(Clock::time_point deadline);
  void check(const CollectiveState& state, Clock::time_point deadline);
  void tell_call(const Op& op);
  std::string refusals() const;
  void find_sources(CollectiveState& state, Clock::time_point deadline);
  void exchange(CollectiveState& state, Clock::time_point deadline);
  void take(CollectiveState& state, std::size_t from, std::size_t to);
  const char* piece(const CollectiveState& state, int rank, int number, std::size_t from) const;
  void reduce_in_place(CollectiveState& state, Clock::time_point deadline);
  void reduce_by_shares(CollectiveState& state, std::size_t from, Clock::time_point deadline);
  void reduce_slots(CollectiveState& state, Clock::time_point deadline);
  template <typename Work>
  void share_out(std::uint64_t chunks, Clock::time_point deadline, Work work);
  char* stage(std::size_t bytes);
  void fill_stage(const CollectiveState& state, std::size_t from);
  void stage_all(CollectiveState& state, Clock::time_point deadline);
  void tell_stage(Header& header) const;
  void find_stage(int rank, const Header& header, Source& source, Clock::time_point deadline);
  bool meet_new_stages(std::uint64_t step, Clock::time_point deadline);
  void reach(CollectiveState& state, Clock::time_point deadline);

  Barrier barrier_;
  const Tuning tuning_;
  Memory& memory_;
  char* stage_ = nullptr;  // two buffers, used alternately
  StageCopy to_stage_;
  std::size_t stage_size_ = 0;
  Place stage_place_;
  bool stage_is_new_ = false;
  std::vector<char*> old_stages_;
  std::uint64_t operations_ = 0;
  bool under_way_ = false;  // True while peers rely on this rank for the operation that it has begun
  const std::unique_ptr<CollectiveState> state_;
};

}  // namespace lockstep::shm
