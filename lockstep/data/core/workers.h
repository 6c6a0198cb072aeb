// A thread pool that runs the tasks of numbered slots. Results are collected in the order in which the caller
// asks for them.
//
//   Workers workers({.threads = 2, .slots = 4, .work = fetch_into_slot});
//   workers.put(0);
//   workers.wait(0);  // throws what the task of slot 0 threw
//
// put() and wait() must be called by one thread. What it wrote before put(slot) is visible to work(_, _,
// slot), and what work wrote is visible after wait(slot).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::detail {

class Workers {
 public:
  struct Options {
    int threads = 1;
    std::size_t slots = 1;
    std::function<void(Workers& self, int worker, std::size_t slot)> work;
    std::function<void(int worker)> begin = {};  // runs first on each thread; what it throws, its tasks throw
  };

  explicit Workers(Options options);
  // Discards queued tasks and waits for running ones. Logs what it waits for if that takes more than 10
  // seconds.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  void put(std::size_t slot);
  // Returns false at the deadline; the slot can be waited for again.
  bool wait(std::size_t slot, std::optional<std::chrono::milliseconds> timeout = {});

  // For `work`: true once no result is needed any more, so that it may return early.
  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }
  // For `work`: records the index that this worker is processing, for timeout messages.
  void at(int worker, std::int64_t index) { at_[worker].store(index, std::memory_order_relaxed); }
  std::string whereabouts() const;  // "worker 0 is at index 17, worker 1 is idle"

 private:
  void run(int worker);
  void stop();

  Options options_;
  std::vector<std::atomic<std::int64_t>> at_;  // index that each worker is processing; -1: idle
  std::atomic<bool> stopping_ = false;
  std::mutex mutex_;
  std::condition_variable changed_for_workers_, changed_for_waiter_;
  std::deque<std::size_t> queue_;
  std::vector<char> done_;
  std::vector<std::exception_ptr> errors_;
  int running_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace lockstep::detail
