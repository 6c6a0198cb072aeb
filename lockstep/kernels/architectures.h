// Tells which GPUs can run code compiled for a list of CMake's CUDA_ARCHITECTURES, such as
// "80,90a,100-virtual". It uses version numbers only: querying the device would create a context on it.
#pragma once

#include <string_view>

namespace lockstep::kernels {

constexpr bool runs_on(std::string_view architectures, int major, int minor) {
  while (!architectures.empty()) {
    const auto each = architectures.substr(0, architectures.find(','));
    architectures.remove_prefix(each.size() + (each.size() < architectures.size() ? 1 : 0));
    int number = 0;
    auto rest = each;
    for (; !rest.empty() && rest.front() >= '0' && rest.front() <= '9'; rest.remove_prefix(1))
      number = 10 * number + (rest.front() - '0');
    if (number == 0) return true;  // a name ("all") is unknown here: the first launch will show
    const bool exact = rest.starts_with('a'), family = rest.starts_with('f');
    const bool machine_code = !rest.ends_with("-virtual"), ptx = !rest.ends_with("-real");
    // Machine code runs on later GPUs of its generation; PTX is compiled at run time and runs on all later
    // ones.
    if (machine_code && major == number / 10 && (exact ? minor == number % 10 : minor >= number % 10))
      return true;
    if (ptx && !exact && !family && 10 * major + minor >= number) return true;
  }
  return false;
}

}  // namespace lockstep::kernels
