// World: this process's membership in a job. It knows the rank and the size of the job and makes groups.
//
//   auto world = lockstep::World::from_environment();   // alone, or under a launcher: the same binary
//   world.group().all_reduce(t).wait();
//
// At most one World exists in a process at a time (one per rank when ranks are threads). Its destructor
// leaves the job. It first finishes all operations in flight, including those whose Work is still held or was
// dropped; a Work that outlives the World can still be waited for. If such an operation fails and no caller
// waits for it, the error is logged, and a process that would exit with status 0 exits with 1. During stack
// unwinding, or after a failure, the World leaves at once, and waiting for an operation that was in flight
// throws CommError.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/group.h>
#include <lockstep/comm/observer.h>

namespace lockstep {

namespace detail {
class WorldState;
}
class Profiler;

struct WorldOptions {
  // "auto", or a CPU backend: "shm", "gloo", "mpi", "shm+gloo", "shm+mpi"; or a CUDA backend: "nccl",
  // "cuda_ipc"; or one per device: "cpu:gloo,cuda:nccl". "shm+x" uses shared memory within a host and x
  // between hosts. Default: LOCKSTEP_BACKEND, else "auto". For CUDA, "auto" picks nccl if every rank has its
  // own GPU, and cuda_ipc if ranks of one host share GPUs. For the CPU it picks shm for groups within one
  // host and shm+gloo for other groups. Group::backend() returns the choice.
  std::string backend = {};
  // Deadline of each operation. Default: LOCKSTEP_TIMEOUT, else 30 minutes.
  Timeout timeout = {};
  // How long to wait for all ranks to join. Default: LOCKSTEP_JOIN_TIMEOUT, else 5 minutes.
  Timeout join_timeout = {};
  // True to allocate CPU tensors with Lockstep's allocator (cpu_memory.h). Default: LOCKSTEP_CPU_ALLOCATOR,
  // else true.
  std::optional<bool> cpu_allocator = {};
  // Folder to which log_metric writes. Default: LOCKSTEP_METRICS, else nothing is written.
  std::string metrics = {};
  // "jsonl" or "csv", written in addition to TensorBoard event files. Default: LOCKSTEP_METRICS_FORMAT, else
  // jsonl.
  std::string metrics_format = {};
};

class World {
 public:
  // Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and LOCAL_RANK and LOCAL_WORLD_SIZE if set. If none of
  // them is set, the world has one rank. Every rank calls it; it returns when all ranks have joined. Throws
  // ConfigError if the environment is incomplete, inconsistent, or contradicts another rank's; throws
  // CommError if ranks are missing.
  static World from_environment(WorldOptions options = {});

  explicit World(std::shared_ptr<detail::WorldState> state);
  World(World&&) noexcept = default;
  World& operator=(World&&) = delete;
  ~World();

  int rank() const;
  int size() const;
  int local_rank() const;  // rank among the ranks of this host
  int local_size() const;
  bool is_main() const { return rank() == 0; }
  bool in_threads() const;    // true under run_threads: ranks are threads of one process
  at::Device device() const;  // this rank's GPU if the job uses CUDA, else cpu

  Group group() const;  // the group of all ranks
  // Makes a group of these ranks of the world, in this order. Only the members call it, each with the same
  // list. Calling it again with the same list makes another group.
  Group group(std::vector<int> ranks, GroupOptions options = {});

  void add_observer(std::shared_ptr<Observer> observer);
  void remove_observer(const std::shared_ptr<Observer>& observer);

  // Call it once per step, at the end, after the optimizer: step n covers everything since the previous call.
  // Errors show the step that this rank and its peers have reached, and so does the status of `lockstep run`,
  // which also names a rank whose steps take far longer than those of its peers. Costs about 100 ns.
  void step(std::int64_t step);
  // Records a value for the latest step, or for the given one. It goes to the files in WorldOptions::metrics
  // and, from rank 0, to the status of `lockstep run`. "samples" is the number of samples in a step of the
  // whole job. Thread-safe. Throws ConfigError if the name is empty, longer than 256 bytes, contains control
  // characters or is not UTF-8.
  void log_metric(std::string_view name, double value);
  void log_metric(std::string_view name, double value, std::int64_t step);
  // Returns true once a stop was requested (SIGTERM or SIGINT to the launcher or to any rank). It turns true
  // on every rank at the same call, so all ranks can save and leave together. Every rank must call it equally
  // often, for example once per step. After the first call, such a signal no longer ends this process, unless
  // it arrives again a second or more later.
  bool stop_requested();

  // Marks the job as failed in this process: every wait and every later call, in every thread and group,
  // throws a CommError that carries the cause. Thread-safe; may be called at any time.
  void fail(const std::string& cause, std::optional<int> rank = std::nullopt);

 private:
  friend class Profiler;  // It outlives a World that is moved or destroyed.
  std::shared_ptr<detail::WorldState> state_;
  int exceptions_at_birth_;
};

// Equivalent of PyTorch's init_process_group. A negative rank or world_size is taken from the environment.
World init_process_group(const std::string& backend = "auto", int rank = -1, int world_size = -1,
                         WorldOptions options = {});

// Runs the ranks as threads of this process: calls body once per rank, each with its own World, and returns
// when all have ended. If one throws, the waits of its peers end with a CommError that names it, and this
// function rethrows its exception. It also throws the error of an operation whose Work was dropped, unless a
// call has already thrown that error.
void run_threads(int num_ranks, const std::function<void(World&)>& body, WorldOptions options = {});

}  // namespace lockstep
