// What Group needs of an engine. Any c10d::Backend is an engine as it stands; a Transport is the
// backend and what c10d has no word for: what the engine lacks, and how to wake those who wait in it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/comm/engine/op.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::detail {

class ConnectBarrier;

class Transport {
 public:
  // Group supplies what is false here, in one place.
  struct Traits {
    bool avg = false;             // reduces with AVG itself
    bool unequal = false;         // all_gather, gather, scatter, reduce_scatter of unequal sizes, and
                                  // all_to_all by splits, without padding
    bool reduce_scatter = true;   // has one whose completion can be seen
    bool any_dtype = false;       // moves every dtype and reduces all that reduce.h does
    bool compares_calls = false;  // finds mismatches itself, before data moves
    bool tags = true;             // pairs messages by tags, and receives from any rank; else by order alone
    bool completes_unwatched = true;  // isCompleted() of sends and receives turns true without wait()
    bool keeps_inputs = false;        // reduce leaves the tensors of ranks other than the root alone
    bool wakes_waiters = true;        // interrupt() ends every wait() of its works; else Group's own waits do
    bool blocks_host = true;          // wait() returns when the data is there (not: when a stream will wait)
    bool captures = false;            // what it does can be recorded in a CUDA graph
    bool on_device = false;           // a work that was waited for may still run there: isCompleted() tells
    bool meets_first =
        false;  // a first operation would wait for the others inside a call, without a deadline
  };

  virtual ~Transport() = default;
  virtual Traits traits() const = 0;
  virtual c10d::Backend& backend() = 0;
  // Reductions that the engine cannot do on this dtype, beyond avg; Group refuses them by name.
  virtual bool reduces(Dtype dtype, ReduceOp op) const = 0;
  // Ends every wait inside the engine, now and later, with an error. Any thread, any number of times.
  // The engine is of no use afterwards, and destroying it does not wait for peers.
  virtual void interrupt(const std::string& cause, CommError::Kind kind) noexcept = 0;
  // Where ranks meet before a first operation, for which the engine would wait inside a call, without a
  // deadline; null where it would not. Asked before each: of all ranks, or a message.
  virtual ConnectBarrier* connect_barrier(bool /*of_all*/) { return nullptr; }
  // When all have met: makes what later calls need of all of them.
  virtual void open() {}
  // What tells whether a work is done, and keeps no tensors.
  virtual c10::intrusive_ptr<c10d::Work> watched(c10d::Work& work) {
    return c10::intrusive_ptr<c10d::Work>::reclaim_copy(&work);
  }
  // The current stream is being recorded for a CUDA graph: what is issued runs later, any number of times.
  virtual bool capturing() const { return false; }
  // Where collectives may be given as parts, without c10d; null elsewhere.
  virtual OpSink* parts() { return nullptr; }
  // Of a part that failed: peers may still read or write them.
  virtual void abandon(std::vector<at::Tensor> /*tensors*/) noexcept {}
  // This rank will start nothing more, though works of its own may still hold the engine.
  virtual void leave() noexcept {}
  // A peer waits for this rank in a collective that it has not begun, where the engine can tell.
  virtual bool is_awaited() { return false; }
  // Ranks whose connection has ended, where the engine cannot tell by itself and we can. Asked some times a
  // second while somebody waits.
  virtual std::vector<int> lost_peers() { return {}; }
  // Which ranks have not come to the collective, where the engine can tell: "rank 1 is in ...".
  virtual std::string absent(std::uint64_t /*sequence*/) { return {}; }
};

// Above 0, and no longer than a clock can count: 30 days. ConfigError otherwise for the former.
std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout);

// What a transport is made from; the same on every rank but for `rank`.
struct TransportContext {
  std::string group;       // unique within the job
  std::vector<int> ranks;  // the members' ranks in the world
  std::vector<int> nodes;  // the members': those with the same number share a host
  int rank = 0;            // our place in `ranks`
  int world_size = 1;
  c10::intrusive_ptr<c10d::Store> store;  // prefixed: keys of this group alone
  std::chrono::milliseconds timeout{};
  std::string address;  // of this host, as its peers reach it; empty: loopback
  int device_index = 0;
  int local_ranks = 0;           // processes of the job on this host; 0: not known
  std::function<bool()> failed;  // the job has: who waits for peers while a transport is made, stops

  int size() const { return static_cast<int>(ranks.size()); }
};

// Each throws ConfigError where the engine is not there, saying what would bring it.
std::unique_ptr<Transport> make_shm_transport(const TransportContext& context);
std::unique_ptr<Transport> make_gloo_transport(const TransportContext& context);
std::unique_ptr<Transport> make_mpi_transport(const TransportContext& context);
std::unique_ptr<Transport> make_nccl_transport(const TransportContext& context);
std::unique_ptr<Transport> make_cuda_ipc_transport(const TransportContext& context);
std::unique_ptr<Transport> make_local_transport(const TransportContext& context);
// Shared memory inside each host, and between hosts what make_between makes, a transport of the same ranks.
using MakeTransport = std::unique_ptr<Transport>(const TransportContext&);
std::unique_ptr<Transport> make_hierarchy_transport(const TransportContext& context, const std::string& name,
                                                    MakeTransport* make_between);
bool nccl_available();
bool cuda_ipc_available();

}  // namespace lockstep::detail
