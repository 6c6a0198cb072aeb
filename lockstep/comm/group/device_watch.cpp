#include <lockstep/comm/group/device_watch.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>

#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/group/error_text.h>
#include <lockstep/comm/group/work_state.h>

namespace lockstep::detail {
namespace {

using Clock = DeviceWatch::Clock;

// Interval between two checks. Most works of a step are done by then, so the driver is queried little.
constexpr std::chrono::milliseconds kDeviceLook{50};
// How long the destructor waits for the thread, which ends at once unless the driver blocks it.
constexpr std::chrono::milliseconds kThreadWait{2000};

}  // namespace

// DeviceWatch::State, which has linkage, contains it: it is not in the unnamed namespace.
struct DeviceWatch::Entry {
  c10::intrusive_ptr<c10d::Work> work;
  std::string what;
  Clock::time_point begun, deadline;
};

DeviceWatch::Answer DeviceWatch::ask(const Entry& entry) {
  try {
    if (entry.work->isCompleted()) {
      if (const auto error = entry.work->exception()) std::rethrow_exception(error);
      return {.complete = true, .cause = {}};
    }
  } catch (const std::exception& error) {
    return {true, fmt::format("{} failed on the device: {}", entry.what, plain_text(error)),
            CommError::Kind::device};
  }
  if (Clock::now() < entry.deadline) return {.complete = false, .cause = {}};
  return {false,
          fmt::format("{} did not complete on the device within {:.3f} s (its deadline)", entry.what,
                      std::chrono::duration<double>(Clock::now() - entry.begun).count()),
          CommError::Kind::deadline};
}

// Shared with the thread: the driver may block the thread as long as another one waits in it for the device.
struct DeviceWatch::State {
  State(c10::Device its_device, Fail its_fail) : device(its_device), fail(std::move(its_fail)) {}

  const c10::Device device;
  const Fail fail;
  std::mutex mutex;
  std::condition_variable condition;
  std::deque<Entry> entries;
  bool over = false, started = false;

  // The first entry whose deadline has passed, else the oldest. Call under the mutex.
  std::optional<Entry> next() const {
    if (over || entries.empty()) return std::nullopt;
    const auto now = Clock::now();
    for (const auto& entry : entries)
      if (now >= entry.deadline) return entry;
    return entries.front();
  }
  void look() {
    const c10::OptionalDeviceGuard here(device);  // the query must not create a context on another device
    std::unique_lock lock(mutex);
    while (!over) {
      condition.wait_for(lock, kDeviceLook, [this] { return over; });
      while (auto entry = next()) {
        lock.unlock();
        auto [complete, cause, kind] = ask(*entry);
        lock.lock();
        if (!cause.empty() && !over) {
          over = true;  // no entry is added or checked from here on
          entries.clear();
          lock.unlock();
          return fail(std::move(cause), kind);
        }
        if (!complete) break;
        std::erase_if(entries, [&](const Entry& each) { return each.work == entry->work; });
      }
    }
  }
};

DeviceWatch::DeviceWatch(c10::Device device, Fail fail)
    : state_(std::make_shared<State>(device, std::move(fail))) {}

// After this the process may exit, and what the thread uses is destroyed with it.
DeviceWatch::~DeviceWatch() {
  {
    std::lock_guard lock(state_->mutex);
    state_->over = true;
    state_->entries.clear();
    state_->condition.notify_all();
  }
  crew_.wait(kThreadWait);
}

bool DeviceWatch::idle() const {
  std::deque<Entry> entries;
  {
    std::lock_guard lock(state_->mutex);
    entries = state_->entries;
  }
  const c10::OptionalDeviceGuard here(state_->device);
  return std::all_of(entries.begin(), entries.end(), [](const Entry& entry) { return ask(entry).complete; });
}

void DeviceWatch::add(c10::intrusive_ptr<c10d::Work> work, std::string what, Clock::time_point begun,
                      Clock::time_point deadline) {
  std::lock_guard lock(state_->mutex);
  if (state_->over) return;
  state_->entries.push_back({std::move(work), std::move(what), begun, deadline});
  if (!state_->started) state_->started = crew_.start([state = state_] { state->look(); });
  if (!state_->started)
    throw Error("cannot start the thread that watches the deadlines of device operations");
}

}  // namespace lockstep::detail
