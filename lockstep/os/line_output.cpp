// Under `lockstep run` the standard output of a rank is a pipe, which stdio buffers in blocks: what a program
// prints would appear a few KiB late, and what is still buffered is lost when the rank is killed. This switches
// stdio to lines. It runs when the library is loaded, before the program's own constructors, so that it covers
// all that the program prints; a program that calls setvbuf itself has the last word.
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
  // A rank whose output its script sends to a file or a terminal is left alone.
  if (!S_ISFIFO(output.st_mode)) return;
  constexpr std::size_t kUnbuffered = 1;  // that somebody asked for already
  if (::__fbufsize(stdout) != kUnbuffered) std::setvbuf(stdout, nullptr, _IOLBF, 0);
}

}  // namespace
}  // namespace lockstep::detail
