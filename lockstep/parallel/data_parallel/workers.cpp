#include <lockstep/parallel/data_parallel/workers.h>

#include <algorithm>
#include <cfenv>
#include <exception>
#include <latch>
#include <optional>
#include <system_error>
#include <utility>

#include <pthread.h>
#include <unistd.h>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <lockstep/base/quiet_threads.h>
#include <lockstep/base/span.h>
#include <lockstep/comm/group/error_text.h>
#include <lockstep/parallel/data_parallel.h>

namespace lockstep::detail {

// Settings of the calling thread that replicas must share.
class CallerState {
 public:
  explicit CallerState(const std::vector<at::Device>& devices) : devices_(devices) {
    std::fegetenv(&floating_point_);
    if (devices[0].is_cpu()) return;
    // Streams of every device, because an input may come from one without a replica.
    const c10::impl::VirtualGuardImpl all(devices[0].type());
    for (c10::DeviceIndex i = 0; i < all.deviceCount(); ++i)
      streams_.push_back(all.getStream(at::Device(devices[0].type(), i)));
  }
  void run(const ReplicaWorkers::Task& task, std::size_t index) const {
    at::ThreadLocalStateGuard guard(state_);
    at::autocast::set_autocast_cache_enabled(cache_casts_);
    std::fesetenv(&floating_point_);  // For example, flushing of denormals.
    const c10::MultiStreamGuard streams(streams_);
    const c10::OptionalDeviceGuard device(streams_.empty() ? std::nullopt : std::optional(devices_[index]));
    task(index);
  }

 private:
  const std::vector<at::Device>& devices_;
  at::ThreadLocalState state_;
  bool cache_casts_ = at::autocast::is_autocast_cache_enabled();
  std::fenv_t floating_point_;
  std::vector<c10::Stream> streams_;
};

namespace {

// at::set_num_threads sets the number of this thread and the default of new threads. Only the former is
// wanted, so a short-lived thread resets the latter.
void set_own_threads(int threads) {
  static std::mutex one_at_a_time;
  std::lock_guard lock(one_at_a_time);
  const int usual = at::get_num_threads();  // This thread is new, so it has the default.
  if (usual == threads) return;
  at::set_num_threads(threads);
  std::thread([usual] { at::set_num_threads(usual); }).join();
}

}  // namespace

struct ReplicaWorkers::Round {
  Round(std::size_t count, const std::vector<at::Device>& devices, const Task& the_task)
      : caller(devices), task(the_task), errors(count), unfinished(static_cast<std::ptrdiff_t>(count)) {}
  CallerState caller;
  const Task& task;
  std::vector<std::exception_ptr> errors;
  std::latch unfinished;
};

ReplicaWorkers::ReplicaWorkers(std::vector<at::Device> devices, int threads)
    : devices_(std::move(devices)), process_(::getpid()) {
  QuietThreads quiet;
  for (std::size_t i = 0; i < devices_.size(); ++i) workers_.push_back(std::make_unique<Worker>());
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    try {
      workers_[i]->thread = std::thread([this, i, threads] { serve(i, threads); });
    } catch (const std::system_error& e) {
      stop();
      throw Error(fmt::format("DataParallel: cannot start the thread of replica {} of {}: {}", i,
                              devices_.size(), e.what()));
    }
  }
}

ReplicaWorkers::~ReplicaWorkers() { stop(); }

void ReplicaWorkers::stop() {
  const bool forked = ::getpid() != process_;  // A forked child does not have the threads.
  for (auto& worker : workers_) {
    if (!worker->thread.joinable()) continue;
    if (!forked) {
      std::lock_guard lock(worker->mutex);
      worker->ending = true;
    }
    if (forked || worker->thread.get_id() == std::this_thread::get_id()) {
      worker->thread.detach();  // It cannot be joined: leak what it still uses.
      (void)worker.release();
      continue;
    }
    worker->posted.notify_one();
    worker->thread.join();
  }
  workers_.clear();
}

bool ReplicaWorkers::is_one_of_them() const {
  for (const auto& worker : workers_)
    if (worker->thread.get_id() == std::this_thread::get_id()) return true;
  return false;
}

void ReplicaWorkers::run(std::size_t count, std::string_view phase, const Task& task) {
  if (::getpid() != process_)
    throw Error("DataParallel: this process was forked after construction, so it lacks the worker threads");
  if (is_one_of_them())
    throw Error(fmt::format(
        "DataParallel: {} was called from inside one of its own replicas, which would deadlock", phase));
  const auto round = std::make_shared<Round>(count, devices_, task);
  std::size_t posted = 0;
  try {
    for (; posted < count; ++posted) {
      auto& worker = *workers_[posted];
      {
        std::lock_guard lock(worker.mutex);
        worker.rounds.push_back(round);
      }
      worker.posted.notify_one();
    }
  } catch (...) {  // Workers that have the task still use the caller's objects.
    round->unfinished.count_down(static_cast<std::ptrdiff_t>(count - posted));
    round->unfinished.wait();
    throw;
  }
  {
    // Attributes the workers' operators to this thread in profiles.
    const Span span(SpanKind::operation, "DataParallel");
    round->unfinished.wait();
  }
  for (std::size_t i = 0; i < count; ++i)
    if (round->errors[i]) fail(*round, i, phase);
}

void ReplicaWorkers::serve(std::size_t index, int threads) {
  ::pthread_setname_np(::pthread_self(), fmt::format("replica {}", index).c_str());
  set_own_threads(threads);
  auto& worker = *workers_[index];
  while (true) {
    std::shared_ptr<Round> round;
    {
      std::unique_lock lock(worker.mutex);
      worker.posted.wait(lock, [&] { return worker.ending || !worker.rounds.empty(); });
      if (worker.rounds.empty()) return;
      round = std::move(worker.rounds.front());
      worker.rounds.pop_front();
    }
    try {
      round->caller.run(round->task, index);
    } catch (...) {
      round->errors[index] = std::current_exception();
    }
    round->unfinished.count_down();
  }
}

void ReplicaWorkers::fail(const Round& round, std::size_t index, std::string_view phase) const {
  const auto& errors = round.errors;
  const auto failed =
      errors.size() - static_cast<std::size_t>(std::count(errors.begin(), errors.end(), nullptr));
  const auto text = fmt::format(
      "DataParallel: {} of replica {} of {}, on {}{}: {}", phase, index, errors.size(), devices_[index].str(),
      failed > 1 ? fmt::format(" (and {} more)", failed - 1) : "", plain_text(errors[index]));
  try {
    std::rethrow_exception(errors[index]);
  } catch (...) {
    std::throw_with_nested(ReplicaError(text, index, devices_[index]));
  }
}

}  // namespace lockstep::detail
