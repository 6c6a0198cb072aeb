// ShmBackend: shared memory as a c10d::Backend, used by Group's transport and by PyTorch.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include <lockstep/comm/c10d/op_backend.h>
#include <lockstep/comm/transports/shm/engine/fork.h>
#include <lockstep/comm/transports/shm/engine/group_segment.h>
#include <lockstep/comm/transports/shm/engine/messages.h>
#include <lockstep/comm/transports/shm/engine/op_queue.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::detail {

struct ShmOptions {
  std::chrono::milliseconds timeout{};
  int local_ranks = 0;  // number of processes of the job on this host
  int threads = 1;      // number of threads that each of them computes with
  std::function<bool()> failed = [] { return false; };
  std::vector<std::string> store_keys{};  // this rank's keys in the store, deleted when all have met
  std::vector<int> names = {};            // names of the ranks in errors; empty: their numbers
};

struct TransportContext;
ShmOptions shm_options(const TransportContext& context);

// What the ranks of a group on one host share.
struct ShmPlace {
  ShmPlace(c10d::Store& store, int rank, int size, const ShmOptions& options);
  std::shared_ptr<shm::GroupSegment> group_segment;  // must outlive the engine
  shm::Engine::Tuning tuning;
  std::unique_ptr<shm::Engine> engine;
};

// A tensor in memory that every process of this host can map.
at::Tensor shared_tensor(std::int64_t size, const at::TensorOptions& options);

class ShmBackend : public OpBackend {
 public:
  ShmBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const ShmOptions& options);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return shared_tensor(size, options);
  }

  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout.count(); }

  // False in a forked child, which has the memory but none of the threads: what it does must not affect this
  // rank.
  bool is_own() const { return shm::fork_generation() == generation_; }

  const std::shared_ptr<shm::OpQueue>& op_queue() const { return op_queue_; }
  void interrupt(const std::string& cause);
  void leave();
  std::string absent() const { return op_queue_->absent(); }
  bool is_awaited() const { return op_queue_->is_awaited(); }

 protected:
  WorkPtr post(Request request) override;
  // Name of an operation's row in PyTorch's profiler, a static string; null for no row.
  virtual const char* title(const Op&) const { return nullptr; }
  void drain() { op_queue_->drain(); }
  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_); }
  const std::shared_ptr<shm::Messages>& messages() const { return messages_; }

 private:
  const std::uint64_t generation_ = shm::fork_generation();
  std::atomic<std::chrono::milliseconds::rep> timeout_;
  std::shared_ptr<shm::OpQueue> op_queue_;
  std::shared_ptr<shm::Messages> messages_;
};

}  // namespace lockstep::detail
