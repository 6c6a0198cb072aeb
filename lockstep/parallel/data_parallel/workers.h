// Persistent threads, one per replica. Internal to DataParallel.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <sys/types.h>

#include <c10/core/Device.h>

namespace lockstep::detail {

class ReplicaWorkers {
 public:
  using Task = std::function<void(std::size_t)>;

  // threads: number of threads that an operation on one of them may use.
  ReplicaWorkers(std::vector<at::Device> devices, int threads);
  ~ReplicaWorkers();
  ReplicaWorkers(const ReplicaWorkers&) = delete;
  ReplicaWorkers& operator=(const ReplicaWorkers&) = delete;

  // Runs task(i) on worker i for every i below count, in parallel, each with this thread's grad mode,
  // autocast, dispatch keys, streams and floating-point settings, and waits for all. Thread-safe: each worker
  // runs the tasks of concurrent callers in turn. Throws the ReplicaError of the first replica that failed.
  // `phase` names the task in errors.
  void run(std::size_t count, std::string_view phase, const Task& task);

  bool is_one_of_them() const;  // True if the calling thread is one.

 private:
  struct Round;
  struct Worker {
    std::mutex mutex;
    std::condition_variable posted;
    std::deque<std::shared_ptr<Round>> rounds;
    bool ending = false;
    std::thread thread;
  };
  void serve(std::size_t index, int threads);
  void stop();
  [[noreturn]] void fail(const Round& round, std::size_t index, std::string_view phase) const;

  const std::vector<at::Device> devices_;
  const pid_t process_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace lockstep::detail
