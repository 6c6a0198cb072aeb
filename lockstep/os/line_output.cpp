// Under `lockstep run` a rank's standard output is a pipe, which stdio buffers in blocks: output would appear
// a few KiB late, and buffered output is lost when the rank is killed. This switches stdio to line buffering.
// It runs when the library is loaded, before the program's constructors, so that it covers all output; a
// later setvbuf of the program overrides it.
#include <stdio_ext.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace lockstep::detail {
namespace {

[[gnu::constructor]] void print_whole_lines_at_once() {
  const char* agent = std::getenv("LOCKSTEP_AGENT");
  struct stat output {};
  if (agent == nullptr || *agent == '\0' || ::fstat(STDOUT_FILENO, &output) != 0) return;
  // Output that the rank's script redirects to a file or a terminal is not changed.
  if (!S_ISFIFO(output.st_mode)) return;
  constexpr std::size_t kUnbuffered = 1;  // The program has asked for it already.
  if (::__fbufsize(stdout) != kUnbuffered) std::setvbuf(stdout, nullptr, _IOLBF, 0);
}

}  // namespace
}  // namespace lockstep::detail
