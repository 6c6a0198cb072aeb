// Only for programs under ThreadSanitizer. GCC 12's does not know pthread_mutex_clocklock, which
// std::timed_mutex and Board use: it would consider the guarded data unguarded, and the unlock one of an
// unlocked mutex.
#include <dlfcn.h>
#include <pthread.h>
#include <sanitizer/tsan_interface.h>

#include <cerrno>

extern "C" int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock,
                                       const timespec* until) noexcept {
  static const auto lock = reinterpret_cast<int (*)(pthread_mutex_t*, clockid_t, const timespec*)>(
      ::dlsym(RTLD_NEXT, "pthread_mutex_clocklock"));
  __tsan_mutex_pre_lock(mutex, __tsan_mutex_try_lock);
  const int result = lock(mutex, clock, until);
  const bool locked = result == 0 || result == EOWNERDEAD;
  __tsan_mutex_post_lock(
      mutex, locked ? __tsan_mutex_try_lock : __tsan_mutex_try_lock | __tsan_mutex_try_lock_failed, 0);
  return result;
}

// The reference counts of exception_ptr are in libstdc++, which ThreadSanitizer does not instrument:
// releasing the last reference seems to race with earlier readers of the exception.
extern "C" const char* __tsan_default_suppressions() {
  return "race:lockstep::Error::~Error\nrace:std::runtime_error::~runtime_error\n";
}
