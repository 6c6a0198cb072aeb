#include <lockstep/os/exit_status.h>

#include <unistd.h>

#include <atomic>
#include <cstdlib>

namespace lockstep::detail {
namespace {

std::atomic<int> exit_failures = 0;
std::atomic<pid_t> failing_process = 0;  // A child of fork() has not failed.

// A handler may call exit() again with another status: it runs the remaining handlers, and then writes the
// program's buffered output. (fflush(nullptr) would wait for a thread that reads.) Handlers run in reverse
// order: this one is registered when the library is loaded, so it runs after all of the program's.
void change_exit_status(int status, void*) {
  if (status != 0 || exit_failures <= 0 || failing_process != ::getpid()) return;
  std::exit(1);
}

[[maybe_unused]] const int exit_handler = ::on_exit(change_exit_status, nullptr);

}  // namespace

void fail_at_exit(bool fails) noexcept {
  failing_process = ::getpid();
  exit_failures += fails ? 1 : -1;
}

}  // namespace lockstep::detail
