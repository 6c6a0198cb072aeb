#include <lockstep/comm/transports/mpi/module/progress.h>

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/base/start_thread.h>
#include <lockstep/comm/transports/mpi/module/datatypes.h>

namespace lockstep::detail {
namespace {

using SteadyClock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// Polling policy since the last progress: poll and yield, then poll between naps that double. There may be
// more ranks than cores, so a waiting rank must leave its core to the rank that it waits for.
constexpr microseconds kSpin{80};
constexpr microseconds kShortestNap{10};
constexpr microseconds kLongestNap{100};
// Polling interval when idle: a completed send may still have bytes in the library's buffers, which move only
// inside MPI calls.
constexpr microseconds kIdleNap{20'000};
constexpr milliseconds kPatienceAfterFailure{500};
constexpr milliseconds kPatienceForFinalize{15'000};  // once every rank is there

const char* thread_level_name(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE: return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED: return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED: return "MPI_THREAD_SERIALIZED";
    default: return "MPI_THREAD_MULTIPLE";
  }
}

}  // namespace

Progress& Progress::get() {
  static auto* progress = new Progress;
  return *progress;
}

void Progress::start(milliseconds timeout) {
  std::lock_guard lock(start_mutex_);
  patience_ = std::max(patience_, timeout);
  if (!ready_.valid()) {
    process_ = ::getpid();
    std::promise<void> ready;
    ready_ = ready.get_future().share();
    thread_ = start_thread("MPI", [this, ready = std::move(ready)]() mutable { run(std::move(ready)); });
  }
  if (ready_.wait_for(timeout) != std::future_status::ready)
    throw Error(fmt::format(
        "MPI_Init_thread has not returned within {:.3f} s: another rank of the job has not started",
        std::chrono::duration<double>(timeout).count()));
  ready_.get();
}

void Progress::run(std::promise<void> ready) {
  pthread_setname_np(pthread_self(), "lockstep-mpi");
  prctl(PR_SET_TIMERSLACK, 1000UL);  // naps end within a microsecond of their time instead of 50
  try {
    initialise();
    std::atexit([] { Progress::get().stop(); });
  } catch (...) {
    ready.set_exception(std::current_exception());
    return;
  }
  ready.set_value();
  loop();
  const bool finalise = ours_ && !left_alone_ && mpi_is_up() && all_ranks_end();
  met_promise_.set_value();
  if (finalise) {  // on this thread, because MPI requires the thread that initialised it
    end_idling();
    free_mpi_reductions();
    // MPICH before 4.2 over UCX may hang in MPI_Finalize (pmodels/mpich#6596), less often if the ranks enter
    // it together.
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
  }
  ended_promise_.set_value();
}

// Ranks end at different times. They wait for each other here, where a wait takes no core and can time out,
// and not inside MPI_Finalize.
bool Progress::all_ranks_end() {
  const auto deadline = SteadyClock::now() + patience_;
  auto nap = kShortestNap;
  int all = 0;
  MPI_Request everyone = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &everyone) != MPI_SUCCESS) return false;
  while (MPI_Test(&everyone, &all, MPI_STATUS_IGNORE) == MPI_SUCCESS && all == 0) {
    if (SteadyClock::now() > deadline) {
      log(LogLevel::error, "MPI was not finalised, because another rank did not end within {:.3f} s",
          std::chrono::duration<double>(patience_).count());
      break;
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, kIdleNap);
  }
  return all != 0;
}

void Progress::initialise() {
  int initialized = 0, provided = MPI_THREAD_SINGLE;
  if (!mpi_is_up())
    throw ConfigError("MPI has already been finalised in this process and cannot be initialised again");
  check_mpi(MPI_Initialized(&initialized), "MPI_Initialized");
  if (initialized != 0) {
    check_mpi(MPI_Query_thread(&provided), "MPI_Query_thread");
  } else {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    ours_ = true;
    // Errors without a communicator must not terminate the process.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  }
  if (provided < MPI_THREAD_MULTIPLE)
    throw ConfigError(fmt::format("the MPI transport requires MPI_THREAD_MULTIPLE, but {} provides {}",
                                  ours_ ? "this MPI library" : "the program's own initialisation of MPI",
                                  thread_level_name(provided)));
}

bool Progress::enqueue(std::function<void()> job) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return false;
    queue_.push_back(std::move(job));
  }
  wake_.notify_one();
  return true;
}

bool Progress::submit(MpiWorkPtr work) {
  return enqueue([this, work = std::move(work)] { begin(work); });
}

void Progress::call(std::function<void()> job) { enqueue(std::move(job)); }

void Progress::loop() {
  std::vector<std::function<void()>> jobs;
  auto last = SteadyClock::now();
  auto nap = kShortestNap;
  const auto called = [this] { return !queue_.empty() || stopping_; };
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      jobs.swap(queue_);
      if (jobs.empty() && stopping_) break;
    }
    bool moved = !jobs.empty();
    for (const auto& job : jobs) job();
    jobs.clear();
    if (prune_.exchange(false)) prune();
    moved |= poll();
    if (moved) {
      last = SteadyClock::now();
      nap = kShortestNap;
      continue;
    }
    const bool idle = requests_.empty();
    if (!idle && SteadyClock::now() - last < kSpin) {
      sched_yield();
      continue;
    }
    std::unique_lock lock(mutex_);
    if (idle && !may_idle_in_mpi()) {
      wake_.wait(lock, called);
    } else {
      wake_.wait_for(lock, nap, called);
      nap = std::min(2 * nap, idle ? kIdleNap : kLongestNap);
    }
  }
  if (!requests_.empty()) leave_mpi_alone();
}

void Progress::begin(const MpiWorkPtr& work) {
  if (work->isCompleted()) return;  // interrupted while it was queued
  auto& gates = work->link().gates;
  if (work->receive_tag >= 0) {
    if (auto gate = gates.find(work->receive_tag); gate != gates.end()) {
      gate->second.push_back(work);
      return;
    }
    if (work->gated) gates[work->receive_tag];
  }
  advance(work);
}

void Progress::advance(const MpiWorkPtr& work) {
  std::exception_ptr error;
  while (!error && work->outstanding == 0 && !work->stages.empty()) {
    MpiPosts posts(work->link());
    try {
      auto stage = std::move(work->stages.front());
      work->stages.pop_front();
      stage(posts, *work);
    } catch (...) {
      error = std::current_exception();
    }
    for (const auto& item : posts.items) {
      if (item.request == MPI_REQUEST_NULL) continue;
      requests_.push_back(item.request);
      slots_.push_back({work, item.expected});
      ++work->outstanding;
    }
  }
  if (error) return fail(work, error);
  if (work->stages.empty()) open_gate(*work);
  if (work->outstanding > 0) return;
  work->settle(nullptr);
  work->link().completed(work);
}

void Progress::fail(const MpiWorkPtr& work, std::exception_ptr error) {
  leave_mpi_alone();
  works_failed();
  work->settle(std::move(error));
  work->link().completed(work);
  open_gate(*work);
}

void Progress::cancel(const MpiWorkPtr& work) {
  for (std::size_t i = 0; i < slots_.size(); ++i)
    if (slots_[i].work == work) MPI_Cancel(&requests_[i]);
}

void Progress::open_gate(MpiWork& work) {
  if (!std::exchange(work.gated, false)) return;
  auto held = work.link().gates.extract(work.receive_tag);
  if (held.empty()) return;
  for (const auto& next : held.mapped()) begin(next);
}

// A program that initialised MPI itself may finalise it at any time once its groups are gone. And after a
// request was abandoned its peer may be gone: UCX, below MPICH, terminates the process when it looks for that
// peer.
bool Progress::may_idle_in_mpi() const { return (ours_ || groups_ > 0) && !left_alone_ && mpi_is_up(); }

void Progress::idle_in_mpi() {
  if (never_ == MPI_REQUEST_NULL)
    MPI_Grequest_start([](void*, MPI_Status*) { return MPI_SUCCESS; }, [](void*) { return MPI_SUCCESS; },
                       [](void*, int) { return MPI_SUCCESS; }, nullptr, &never_);
  int done = 0;
  MPI_Test(&never_, &done, MPI_STATUS_IGNORE);
}

void Progress::end_idling() {
  if (never_ == MPI_REQUEST_NULL) return;
  MPI_Grequest_complete(never_);
  MPI_Wait(&never_, MPI_STATUS_IGNORE);
}

void Progress::group_gone() {
  if (--groups_ > 0 || ours_ || !mpi_is_up()) return;
  end_idling();
  free_mpi_reductions();  // the program may finalise MPI next
}

bool Progress::poll() {
  if (requests_.empty()) {
    if (may_idle_in_mpi()) idle_in_mpi();
    return false;
  }
  const std::size_t n = requests_.size();
  indices_.resize(n);
  statuses_.resize(n);
  // Set only for a request that failed, and not by every library.
  for (auto& status : statuses_) status.MPI_ERROR = MPI_SUCCESS;
  int count = 0;
  const int code =
      MPI_Testsome(static_cast<int>(n), requests_.data(), &count, indices_.data(), statuses_.data());
  if ((code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) || count == MPI_UNDEFINED) {
    const auto text = fmt::format("MPI_Testsome failed: {}", mpi_error_text(code));
    const auto slots = slots_;
    for (const auto& slot : slots) fail(slot.work, std::make_exception_ptr(std::runtime_error(text)));
    return true;
  }
  if (count == 0) return false;

  std::vector<MpiWorkPtr> ready;
  std::vector<std::pair<MpiWorkPtr, std::string>> failed;
  for (int i = 0; i < count; ++i) {
    const auto& status = statuses_[static_cast<std::size_t>(i)];
    Slot& slot = slots_[static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)])];
    MpiWorkPtr work = std::move(slot.work);  // an empty slot is a finished one
    int bytes = 0, cancelled = 0;
    if (slot.expected >= 0) MPI_Test_cancelled(&status, &cancelled);
    if (cancelled != 0) {
      // No request is left in MPI, so it stays usable.
      work->settle(std::make_exception_ptr(std::runtime_error("the receive was cancelled")));
      work->link().completed(work);
      open_gate(*work);
    } else if (status.MPI_ERROR != MPI_SUCCESS) {
      failed.emplace_back(work, mpi_error_text(status.MPI_ERROR));
    } else if (slot.expected >= 0) {
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      if (bytes != slot.expected)
        failed.emplace_back(
            work, fmt::format("received a message of {} bytes, expected {} bytes", bytes, slot.expected));
      work->landed(status);
    }
    if (--work->outstanding == 0) ready.push_back(std::move(work));
  }
  drop_empty_slots();
  for (const auto& [work, text] : failed) fail(work, std::make_exception_ptr(std::runtime_error(text)));
  for (const auto& work : ready)
    if (!work->isCompleted()) advance(work);
  return true;
}

void Progress::prune() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].work->isCompleted()) continue;
    leave_mpi_alone();
    abandoned_.emplace_back(requests_[i], std::move(slots_[i].work));
  }
  drop_empty_slots();
}

void Progress::drop_empty_slots() {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].work) continue;
    if (kept != i) {
      slots_[kept] = std::move(slots_[i]);
      requests_[kept] = requests_[i];
    }
    ++kept;
  }
  slots_.resize(kept);
  requests_.resize(kept);
}

void Progress::stop() {
  if (std::this_thread::get_id() == thread_.get_id()) return;  // exit() was called from one of our callbacks
  if (::getpid() != process_) return;  // in a child of fork() the thread is the parent's
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  // If MPI was left alone, the thread may hang in it for good; otherwise all_ranks_end() has its own limit.
  auto patience = kPatienceAfterFailure;
  if (!left_alone_) {
    met_.wait_for(patience_ + kPatienceAfterFailure);
    patience = kPatienceForFinalize;
  }
  if (ended_.wait_for(patience) == std::future_status::ready)
    thread_.join();
  else if (!left_alone_)
    log(LogLevel::warn,
        "MPI_Finalize has not returned within {:.3f} s, although every rank has reached it; this process "
        "ends without it",
        std::chrono::duration<double>(patience).count());
}

}  // namespace lockstep::detail
