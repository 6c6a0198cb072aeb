// The one thread of the process that initialises MPI, starts operations, polls them and finalises.
// Nobody else waits inside MPI, so that anybody can be woken without its help.
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
  // Never destroyed: MPI may write to what it still holds until the process is gone.
  static Progress& get();

  // Initialises MPI where the program has not. Throws ConfigError where MPI cannot serve us, Error where
  // it does not answer in time.
  void start(std::chrono::milliseconds timeout);

  bool submit(MpiWorkPtr work);          // false: the process is exiting
  void call(std::function<void()> job);  // on the progress thread, soon; dropped if the process exits
  void group_made() noexcept { ++groups_; }
  void group_gone();  // progress thread; the program's own MPI is not touched after the last
  // Something is left behind in MPI: requests, a thread. MPI_Finalize would wait for it, so is not called.
  void leave_mpi_alone() noexcept { left_alone_ = true; }
  void cancel(const MpiWorkPtr& work);             // a receive; progress thread
  void works_failed() noexcept { prune_ = true; }  // lets go of the requests of failed works

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
  std::future<void> met_ = met_promise_.get_future();  // the ranks need not be waited for any more
  std::future<void> ended_ = ended_promise_.get_future();
  std::thread thread_;
  std::chrono::milliseconds patience_{0};  // for the other ranks, at the end

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::function<void()>> queue_;
  bool stopping_ = false;

  std::atomic<bool> left_alone_ = false;
  std::atomic<bool> prune_ = false;
  std::atomic<int> groups_ = 0;

  // The thread's own. requests_[i] belongs to slots_[i]; Testsome wants the requests side by side.
  pid_t process_ = 0;                     // that started the thread
  bool ours_ = false;                     // we initialised MPI
  MPI_Request never_ = MPI_REQUEST_NULL;  // never completes: testing it lets MPI do what it has to
  std::vector<MPI_Request> requests_;
  std::vector<Slot> slots_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<std::pair<MPI_Request, MpiWorkPtr>> abandoned_;  // never freed: MPI may still write
};

}  // namespace lockstep::detail
