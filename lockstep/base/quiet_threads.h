// While an object exists, threads started by the current thread receive no signals: those are the program's.
#pragma once

#include <signal.h>

namespace lockstep::detail {

class QuietThreads {
 public:
  QuietThreads() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~QuietThreads() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  QuietThreads(const QuietThreads&) = delete;
  QuietThreads& operator=(const QuietThreads&) = delete;

 private:
  sigset_t before_;
};

}  // namespace lockstep::detail
