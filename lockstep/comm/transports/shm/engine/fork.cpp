#include <lockstep/comm/transports/shm/engine/fork.h>

#include <pthread.h>

#include <atomic>

namespace lockstep::shm {
namespace {

std::atomic<std::uint64_t> generation = 0;

}  // namespace

std::uint64_t fork_generation() {
  [[maybe_unused]] static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  return generation.load(std::memory_order_relaxed);
}

}  // namespace lockstep::shm
