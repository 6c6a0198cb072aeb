#include <lockstep/os/exit_status.h>

#include <unistd.h>

#include <atomic>
#include <cstdlib>

namespace lockstep::detail {
namespace {

std::atomic<int> exit_failures = 0;
std::atomic<pid_t> failing_process = 0;  // a child of fork() has not failed

// exit() takes another status where a handler calls it again: it goes on with the handlers that are left, and then
// writes what the program has printed. (fflush(nullptr) would wait for a thread that reads.) Handlers run in reverse
// order: this one, registered when the library is loaded, after all of the program's.
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
