#include <sched.h>
#include <time.h>

#include <random>

#include "comm/transports/shm/engine/pause.h"

namespace lockstep::shm {

void pause_sometimes() {
  thread_local std::minstd_rand random(std::random_device{}());
  switch (random() % 16) {
    case 0: ::sched_yield(); break;
    case 1: {
      const timespec a_moment{0, static_cast<long>(random() % 50'000)};
      ::nanosleep(&a_moment, nullptr);
      break;
    }
    default: break;
  }
}

}  // namespace lockstep::shm
