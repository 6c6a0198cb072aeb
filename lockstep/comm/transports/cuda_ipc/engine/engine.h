// The collectives of ranks that share a host's GPUs, one at a time. Does not use LibTorch and starts no
// threads.
//
// In each operation the ranks synchronise twice, on the host. A rank first makes its stream wait for its own
// tensors, records an event and publishes where its data is. When all ranks have arrived, it enqueues what it
// reads from its peers after their events, records a second event, and arrives again. Later work on its
// stream then waits for the peers that read from it. So no kernel ever waits for a kernel of another process,
// which on the same GPU might be unable to run: the device's scheduler waits for events, and only after they
// were recorded.
//
// Data is used in place (in an arena: no copy) or its owner copies it there. An all-reduce of p tensors of n
// bytes that all are in arenas is one pass of 2pn bytes. If all ranks have the same GPU, the first of them
// makes it for all, because processes take turns on a GPU; otherwise each sums a share and writes it to all.
// If not all are in arenas, each rank reads all inputs.
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

  // op.order is an Order.
  void begin(Op& op) override;
  void finish(Op& op, Clock::time_point deadline) override;
  void give_up() noexcept override;
  // A peer may have died in its kernels, so work on the stream may wait for it forever.
  void interrupt(const std::string& cause) override {
    track_.lose();
    host_->interrupt(cause);
  }
  std::string absent() const override { return host_->absent(); }

 private:
  struct Offer;
  // What peers read from this rank: a separate piece each, or the same for all.
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
  bool under_way_ = false;      // True while peers may use this rank's memory
  std::vector<char*> reached_;  // each rank's data, once it is known and may be used
  char* result_ = nullptr;      // of an all-reduce whose destination peers still read
};

}  // namespace lockstep::cuda_ipc
