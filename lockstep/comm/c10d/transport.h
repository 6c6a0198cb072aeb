// Transport: what Group needs from an engine. Any c10d::Backend is an engine; a Transport adds what c10d
// cannot express: which features the engine lacks, and how to wake threads that wait in it.
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
  // Features of the engine. Group supplies what is false here.
  struct Traits {
    bool avg = false;  // supports AVG
    // all_gather, gather, scatter, reduce_scatter of unequal sizes, and all_to_all by splits, without padding
    bool unequal = false;
    bool reduce_scatter = true;   // has reduce_scatter, with visible completion
    bool any_dtype = false;       // moves every dtype and supports all reductions of reduce.h
    bool compares_calls = false;  // detects mismatched calls itself, before data moves
    // pairs messages by tag, and receives from any rank; false: pairs by order only
    bool tags = true;
    bool completes_unwatched = true;  // isCompleted() of sends and receives turns true without wait()
    bool keeps_inputs = false;        // reduce does not change the tensors of ranks other than the root
    // interrupt() ends every wait() of its works; false: Group's own waits do
    bool wakes_waiters = true;
    // wait() returns when the data is there; false: it makes the stream wait
    bool blocks_host = true;
    bool captures = false;  // its operations can be captured in a CUDA graph
    // a work may still run on the device after its wait(); isCompleted() reports it
    bool on_device = false;
  };

  virtual ~Transport() = default;
  virtual Traits traits() const = 0;
  virtual c10d::Backend& backend() = 0;
  // False for reductions, other than avg, that the engine does not support on this dtype. Group rejects them
  // by name.
  virtual bool reduces(Dtype dtype, ReduceOp op) const = 0;
  // Ends every wait inside the engine, now and later, with an error. Thread-safe; may be called any number of
  // times. The engine cannot be used afterwards, and destroying it does not wait for peers.
  virtual void interrupt(const std::string& cause, CommError::Kind kind) noexcept = 0;
  // Barrier for ranks before a first operation in which the engine would wait inside a call, without a
  // deadline. Null if there is none. Queried before each operation: of all ranks, or a message.
  virtual ConnectBarrier* connect_barrier(bool /*of_all*/) { return nullptr; }
  // Called when all ranks have met: creates what later calls of all ranks need.
  virtual void open() {}
  // A work that reports the same completion but keeps no tensors alive.
  virtual c10::intrusive_ptr<c10d::Work> watched(c10d::Work& work) {
    return c10::intrusive_ptr<c10d::Work>::reclaim_copy(&work);
  }
  // True while the current stream is captured for a CUDA graph: what is issued runs later, any number of
  // times.
  virtual bool capturing() const { return false; }
  // The interface for collectives as Ops, without c10d; null if there is none.
  virtual OpSink* parts() { return nullptr; }
  // Keeps the tensors of a failed operation alive while peers may still read or write them.
  virtual void abandon(std::vector<at::Tensor> /*tensors*/) noexcept {}
  // This rank starts nothing more, although its works may still hold the engine.
  virtual void leave() noexcept {}
  // True if a peer waits for this rank in a collective that it has not begun, as far as the engine can see.
  virtual bool is_awaited() { return false; }
  // Ranks whose connection has ended, for engines that do not report it. Called several times a second during
  // a wait.
  virtual std::vector<int> lost_peers() { return {}; }
  // Which ranks have not reached the collective, as far as the engine can see: "rank 1 is in ...".
  virtual std::string absent(std::uint64_t /*sequence*/) { return {}; }
};

// Limits the timeout to 30 days, which every clock can represent. Throws ConfigError unless it is above 0.
std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout);

// Arguments of a transport's construction; the same on every rank except `rank`.
struct TransportContext {
  std::string group;       // unique within the job
  std::vector<int> ranks;  // the members' ranks in the world
  std::vector<int> nodes;  // host number of each member: members with the same number share a host
  int rank = 0;            // this process's index in `ranks`
  int world_size = 1;
  c10::intrusive_ptr<c10d::Store> store;  // prefixed: contains only keys of this group
  std::chrono::milliseconds timeout{};
  std::string address;  // this host's address as its peers reach it; empty: loopback
  int device_index = 0;
  int local_ranks = 0;  // number of processes of the job on this host; 0: unknown
  // returns true once the job has failed, which ends waits for peers during construction
  std::function<bool()> failed;

  int size() const { return static_cast<int>(ranks.size()); }
};

// Each throws ConfigError if the engine is not available, with what is needed to get it. backends.cpp chooses
// among them by name. make_threads_transport is in transports/threads/threads.h.
std::unique_ptr<Transport> make_shm_transport(const TransportContext& context);
std::unique_ptr<Transport> make_gloo_transport(const TransportContext& context);
std::unique_ptr<Transport> make_mpi_transport(const TransportContext& context);
std::unique_ptr<Transport> make_nccl_transport(const TransportContext& context);
std::unique_ptr<Transport> make_cuda_ipc_transport(const TransportContext& context);
std::unique_ptr<Transport> make_local_transport(const TransportContext& context);
// Shared memory within each host, and between hosts a transport of the same ranks that make_between makes.
using MakeTransport = std::unique_ptr<Transport>(const TransportContext&);
std::unique_ptr<Transport> make_hierarchy_transport(const TransportContext& context, const std::string& name,
                                                    MakeTransport* make_between);
bool nccl_available();
bool cuda_ipc_available();

}  // namespace lockstep::detail
