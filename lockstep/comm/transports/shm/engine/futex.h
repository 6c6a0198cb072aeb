// A word in shared memory on which processes sleep, and the points at which a test may pause a process.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

// Marks a point between two steps of the protocol. A test defines it to pause there at random.
#ifndef LOCKSTEP_SHM_PAUSE
#define LOCKSTEP_SHM_PAUSE() ((void)0)
#endif

namespace lockstep::shm {

// Until the word has changed, the waiter is woken, or the limit has passed.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value,
                       std::chrono::nanoseconds limit) {
  timespec time{};
  time.tv_sec = static_cast<std::time_t>(limit.count() / 1'000'000'000);
  time.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

inline void futex_wake_all(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace lockstep::shm
