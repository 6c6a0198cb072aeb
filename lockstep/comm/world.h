// This process's place in the job, and what it needs to talk to the others.
//
//   auto world = lockstep::World::from_environment();   // alone, or under a launcher: the same binary
//   world.group().all_reduce(t).wait();
//
// One World at a time in a process (one per rank where ranks are threads). Leaving the scope leaves the
// job. Operations under way are finished first, also those whose Work is still held or was dropped; that Work
// can be waited for afterwards. One that fails then and that nobody waits for is logged, and a process that
// would exit with status 0 exits with 1. During unwinding, or after a failure, the World leaves at once:
// waiting for an operation that was under way throws CommError.
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
  // "auto", or one for the CPU: "shm", "gloo", "mpi", "shm+gloo", "shm+mpi"; "nccl" or "cuda_ipc" for CUDA;
  // or by device: "cpu:gloo,cuda:nccl". Those with a plus are shared memory inside a host and the other
  // between hosts. Unset: LOCKSTEP_BACKEND, else auto: for CUDA nccl where each rank has a GPU, cuda_ipc
  // where ranks of one host share them; for the CPU shm in groups whose ranks are all on one host, shm+gloo
  // in the others. Group::backend() tells which it is.
  std::string backend = {};
  // The deadline of each operation. Unset: LOCKSTEP_TIMEOUT, else 30 minutes.
  Timeout timeout = {};
  // How long to wait for all ranks to come. Unset: LOCKSTEP_JOIN_TIMEOUT, else 5 minutes.
  Timeout join_timeout = {};
  // Whether CPU tensors have their memory from Lockstep (cpu_memory.h). Unset: LOCKSTEP_CPU_ALLOCATOR, else
  // true.
  std::optional<bool> cpu_allocator = {};
  // The folder for what log_metric is given. Unset: LOCKSTEP_METRICS, else nothing is written.
  std::string metrics = {};
  // "jsonl" or "csv", besides TensorBoard's event files. Unset: LOCKSTEP_METRICS_FORMAT, else jsonl.
  std::string metrics_format = {};
};

class World {
 public:
  // RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and LOCAL_RANK, LOCAL_WORLD_SIZE where given; a world of
  // one where none of them is. Every rank calls it; returns when all have come. Throws ConfigError when
  // the environment is incomplete or contradicts itself or another rank's, CommError when ranks are missing.
  static World from_environment(WorldOptions options = {});

  explicit World(std::shared_ptr<detail::WorldState> state);
  World(World&&) noexcept = default;
  World& operator=(World&&) = delete;
  ~World();

  int rank() const;
  int size() const;
  int local_rank() const;  // among the ranks of this host
  int local_size() const;
  bool is_main() const { return rank() == 0; }
  bool in_threads() const;    // run_threads: ranks are threads of one process
  at::Device device() const;  // where the job uses CUDA a GPU, by local rank; else cpu

  Group group() const;  // of all ranks
  // Of these ranks of the world, in this order; called by them alone, each with the same list. The same
  // list again makes another group.
  Group group(std::vector<int> ranks, GroupOptions options = {});

  void add_observer(std::shared_ptr<Observer> observer);
  void remove_observer(const std::shared_ptr<Observer>& observer);

  // Once a step, at its end, after the optimizer: step n is what lies between the call before and step(n).
  // Shown in errors as where this rank is, by who waits for it, and in the status of `lockstep run`; a rank
  // whose steps take far longer than the others' is named. Costs some 100 ns.
  void step(std::int64_t step);
  // A value of the step that was told last, or of the one that is given, for the files of
  // WorldOptions::metrics and, from rank 0, for the status of `lockstep run`. "samples" is how many samples
  // the whole job has in a step. Any thread. ConfigError for a name that is empty, longer than 256 bytes, has
  // control characters or is not UTF-8.
  void log_metric(std::string_view name, double value);
  void log_metric(std::string_view name, double value, std::int64_t step);
  // Whether somebody wants the job to stop (SIGTERM or SIGINT, to the launcher or to any rank): turns true on
  // every rank at the same call, so that all can save and leave together. Every rank calls it equally often,
  // once per step, say. From the first call on such a signal no longer ends this process, unless it
  // comes again a second later.
  bool stop_requested();

  // Tells this process that the job has failed: every wait ends at once with a CommError that carries
  // the cause, in every thread and group, and so does every later call. Any thread, any time.
  void fail(const std::string& cause, std::optional<int> rank = std::nullopt);

 private:
  friend class Profiler;  // which outlives a World that is moved or gone
  std::shared_ptr<detail::WorldState> state_;
  int exceptions_at_birth_;
};

// For those who come from PyTorch. rank and world_size below 0 are taken from the environment.
World init_process_group(const std::string& backend = "auto", int rank = -1, int world_size = -1,
                         WorldOptions options = {});

// Ranks as threads of this process: runs body once per rank, each with a World of its own, and returns
// when all have ended. When one throws, the others' waits end with a CommError that names it, and its
// exception is thrown here. So is the error of an operation whose Work was dropped, unless a call has thrown
// it before.
void run_threads(int num_ranks, const std::function<void(World&)>& body, WorldOptions options = {});

}  // namespace lockstep
