// Progress: the one thread of the process that initialises MPI, starts operations, polls them and finalises
// MPI. No other thread waits inside MPI, so any waiter can be woken without MPI's help.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include <lockstep/comm/transports/mpi/module/work.h>

namespace lockstep::detail {

class Progress {
 public:
  // Never destroyed: MPI may write to its memory until the process ends.
  static Progress& get();

  // Initialises MPI unless the program has. Throws ConfigError if MPI cannot be used, and Error if it does
  // not respond in time.
  void start(std::chrono::milliseconds timeout);

  bool submit(MpiWorkPtr work);          // false if the process is exiting
  void call(std::function<void()> job);  // runs soon on the progress thread; dropped if the process exits
  void group_made() noexcept { ++groups_; }
  void group_gone();  // progress thread; after the last one the program's own MPI is not touched
  // Notes that requests or a thread are left in MPI. MPI_Finalize would wait for them, so it is not called.
  void leave_mpi_alone() noexcept { left_alone_ = true; }
  void cancel(const MpiWorkPtr& work);             // cancels a receive; progress thread
  void works_failed() noexcept { prune_ = true; }  // releases the requests of failed works

 private:
  struct Slot {
    MpiWorkPtr work;
    std::int64_t expected;
  };

  Progress() = default;
  bool enqueue(std::function<void()> job);
  void run(std::promise<void> ready);
  void initialise();
  bool all_ranks_end();
  void loop();
  void begin(const MpiWorkPtr& work);
  void advance(const MpiWorkPtr& work);
  void fail(const MpiWorkPtr& work, std::exception_ptr error);
  void open_gate(MpiWork& work);
  bool may_idle_in_mpi() const;
  void idle_in_mpi();
  void end_idling();
  bool poll();
  void prune();
  void drop_empty_slots();
  void stop();

  std::mutex start_mutex_;
  std::shared_future<void> ready_;
  std::promise<void> met_promise_, ended_promise_;
  std::future<void> met_ = met_promise_.get_future();  // ready once there is no need to wait for other ranks
  std::future<void> ended_ = ended_promise_.get_future();
  std::thread thread_;
  std::chrono::milliseconds patience_{0};  // limit for the other ranks at the end

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::function<void()>> queue_;
  bool stopping_ = false;

  std::atomic<bool> left_alone_ = false;
  std::atomic<bool> prune_ = false;
  std::atomic<int> groups_ = 0;

  // Owned by the thread. requests_[i] belongs to slots_[i], because Testsome needs contiguous requests.
  pid_t process_ = 0;                     // process that started the thread
  bool ours_ = false;                     // True if Lockstep initialised MPI
  MPI_Request never_ = MPI_REQUEST_NULL;  // never completes; testing it lets MPI make progress
  std::vector<MPI_Request> requests_;
  std::vector<Slot> slots_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<std::pair<MPI_Request, MpiWorkPtr>> abandoned_;  // never freed: MPI may still write
};

}  // namespace lockstep::detail
