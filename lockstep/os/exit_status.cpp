#include <lockstep/os/exit_status.h>

#include <unistd.h>

#include <atomic>
#include <cstdlib>

namespace lockstep::detail {
namespace {

std::atomic<int> exit_failures = 0;
std::atomic<pid_t> failing_process = 0;  // A child of fork() has not failed.

// exit() cannot be given another status here, so this ends the process after writing the program's buffered
// output. Handlers run in reverse order: this one is registered when the library is loaded, so it runs after
// all of the program's.
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
