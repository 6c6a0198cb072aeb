#include <lockstep/memory/fork.h>

#include <pthread.h>

#include <vector>

namespace lockstep::memory {
namespace {

struct Held {
  std::mutex mutex;
  std::vector<std::mutex*> outer, inner;

  static Held& instance() {
    static auto* held = new Held;
    return *held;
  }
  static void lock() {
    auto& held = instance();
    held.mutex.lock();
    for (auto* all : {&held.outer, &held.inner})
      for (auto* each : *all) each->lock();
  }
  // In the child too: its only thread is the one that took them.
  static void unlock() {
    auto& held = instance();
    for (auto* all : {&held.inner, &held.outer})
      for (auto* each : *all) each->unlock();
    held.mutex.unlock();
  }
};

}  // namespace

void hold_in_fork(std::mutex& mutex, ForkOrder order) {
  static const int registered = ::pthread_atfork(Held::lock, Held::unlock, Held::unlock);
  (void)registered;
  auto& held = Held::instance();
  std::lock_guard lock(held.mutex);
  (order == ForkOrder::outer ? held.outer : held.inner).push_back(&mutex);
}

}  // namespace lockstep::memory
