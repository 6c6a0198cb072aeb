#include "page.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace lockstep::bench {
namespace {

void check_others(const Page& page) {
  if (page.failed) throw std::runtime_error("another rank failed");
  if (::kill(page.conductor, 0) != 0 && errno == ESRCH) throw std::runtime_error("bench_collectives exited");
}

}  // namespace

Page* open_page(const std::string& path, bool make) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | (make ? O_CREAT | O_EXCL : 0), 0600);
  void* memory = MAP_FAILED;
  if (fd >= 0 && (!make || ::ftruncate(fd, sizeof(Page)) == 0))
    memory = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), path);
  ::close(fd);
  return static_cast<Page*>(memory);
}

void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  const timespec limit{0, 500'000'000};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wake_all(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

void meet(Page& page) {
  const auto generation = page.generation.load();
  if (page.arrived.fetch_add(1) + 1 == static_cast<std::uint32_t>(page.ranks)) {
    page.arrived = 0;
    page.generation.fetch_add(1);
    wake_all(page.generation);
    return;
  }
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::microseconds(page.spins ? 200 : 0);
  // Yields, because the missing rank may need this core.
  while (page.generation == generation && Clock::now() < end) ::sched_yield();
  while (page.generation == generation) {
    check_others(page);
    sleep_while(page.generation, generation);
  }
}

Order await_order(Page& page, std::uint32_t& turn) {
  while (page.turn == turn) {
    check_others(page);
    sleep_while(page.turn, turn);
  }
  turn = page.turn;
  return page.order;
}

void report_failure(Page& page, const std::string& what) {
  std::uint32_t nobody = 0;
  static_assert(sizeof page.error > 1);
  if (page.failed.compare_exchange_strong(nobody, 1)) {
    std::strncpy(page.error, what.c_str(), sizeof page.error - 1);
    page.failed = 2;  // The text is complete.
  }
  wake_all(page.generation);
  wake_all(page.turn);
  wake_all(page.ready);
}

}  // namespace lockstep::bench
