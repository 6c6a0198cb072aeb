// The collectives of ranks that share a host's GPUs, one at a time. No LibTorch, no threads of its own.
//
// Each operation meets twice, on the host. A rank first has its stream wait for its own tensors, records an
// event and says where its data lies; when all have come it enqueues what it takes from the others behind
// their events, records another, and comes again; then whatever follows on its stream waits for those who
// took from it. So no kernel ever waits for a kernel of another process, which on the same GPU could not run:
// an event is waited for by the device's scheduler, and only after it has been recorded.
//
// Data lies where it is (in an arena: no copy) or is copied there by its owner. An all-reduce of p tensors of
// n bytes that all lie in arenas is one pass of 2pn bytes: where all ranks have one GPU the first of them
// makes it for all, because processes take turns on it; else each sums a share and writes it to all.
// Otherwise each takes all inputs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/comm/engine/op.h>
#include <lockstep/comm/transports/cuda_ipc/engine/peers.h>

namespace lockstep::cuda_ipc {

class Engine final : public detail::CollectiveEngine {
 public:
  Engine(std::unique_ptr<shm::Engine> host, std::shared_ptr<Peers> peers);
  ~Engine() override;

  // part.order is an Order.
  void begin(Op& op) override;
  void finish(Op& op, Clock::time_point deadline) override;
  void give_up() noexcept override;
  // A peer may have died in its kernels: what lies on the stream may wait for it for ever.
  void interrupt(const std::string& cause) override {
    track_.lose();
    host_->interrupt(cause);
  }
  std::string absent() const override { return host_->absent(); }

 private:
  struct Offer;
  // What others read of this rank: each of them its own piece, or all the same.
  struct Piece {
    int reader;  // -1: all
    const char* data;
    std::size_t bytes;
  };
  const Offer& offer(int rank) const;
  std::vector<Piece> pieces_of(const Op& op) const;
  void show(const std::vector<Piece>& pieces, Offer& own);
  void compare(const Op& op, Clock::time_point deadline);
  void wait_for(int rank);
  char* reach(int rank);
  const char* source(const Op& op, int rank);
  void take(Op& op);
  void copy(void* to, const void* from, std::size_t bytes);
  void fold(const Op& op, const std::vector<const void*>& inputs, const std::vector<void*>& outputs,
            std::int64_t count);
  void fold_from_all(const Op& op, void* output, std::int64_t count);
  void all_reduce(const Op& op);
  bool is_in_place(const Op& op) const;
  bool takes_from(const Op& op, int taker, int giver) const;

  const std::unique_ptr<shm::Engine> host_;
  const std::shared_ptr<Peers> peers_;
  Track& track_;
  Arena& arena_;
  Exchange exchange_;
  std::uint64_t operations_ = 0;
  char* stage_ = nullptr;
  std::size_t stage_size_ = 0;
  bool under_way_ = false;      // others may use this rank's memory
  std::vector<char*> reached_;  // each rank's data, where it is known and may be used
  char* result_ = nullptr;      // of an all-reduce, where its place is still read by others
};

}  // namespace lockstep::cuda_ipc
