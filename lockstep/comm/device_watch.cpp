#include <lockstep/comm/device_watch.h>

#include <chrono>
#include <exception>

#include <fmt/format.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/pending.h>

namespace lockstep::detail {
namespace {

// Between two looks: a step's works are mostly done when it looks, so that it asks the driver little.
constexpr std::chrono::milliseconds kLook{50};

}  // namespace

DeviceWatch::~DeviceWatch() {
  {
    std::lock_guard lock(mutex_);
    over_ = true;
  }
  condition_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void DeviceWatch::add(c10::intrusive_ptr<c10d::Work> work, std::string what, Clock::time_point begun,
                      Clock::time_point deadline) {
  std::lock_guard lock(mutex_);
  if (over_) return;
  entries_.push_back({std::move(work), std::move(what), begun, deadline});
  if (!thread_.joinable()) thread_ = std::thread([this] { look(); });
}

std::string DeviceWatch::trouble(const Entry& entry, bool& complete) {
  try {
    complete = entry.work->isCompleted();
    if (complete) {
      if (const auto error = entry.work->exception()) std::rethrow_exception(error);
      return {};
    }
  } catch (const std::exception& error) {
    return fmt::format("{} failed on the device: {}", entry.what, plain_text(error));
  }
  if (Clock::now() < entry.deadline) return {};
  return fmt::format("{} was not complete on the device within {:.3f} s, its deadline", entry.what,
                     std::chrono::duration<double>(Clock::now() - entry.begun).count());
}

void DeviceWatch::look() {
  std::unique_lock lock(mutex_);
  while (!over_) {
    condition_.wait_for(lock, kLook, [this] { return over_; });
    while (!over_ && !entries_.empty()) {
      const auto entry = entries_.front();  // a copy: asking takes a lock of the engine's
      lock.unlock();
      bool complete = false;
      auto cause = trouble(entry, complete);
      lock.lock();
      if (!cause.empty()) {
        over_ = true;  // nothing more is added or looked at
        entries_.clear();
        lock.unlock();
        return fail_(std::move(cause));
      }
      if (!complete) break;
      entries_.pop_front();
    }
  }
}

}  // namespace lockstep::detail
