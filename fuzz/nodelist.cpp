// SLURM's list of hosts, as found in the environment.
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/launch/identity/nodelist.h>

#include "input.h"

namespace lockstep::fuzz {

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const auto hosts = detail::expand_nodelist("LIST", text);
    require(!hosts.empty(), "the list is not empty");
    std::string plain;
    for (const auto& host : hosts) {
      require(!host.empty() && host.find_first_of("[], \n") == std::string::npos, "a host is a name");
      plain += (plain.empty() ? "" : ",") + host;
    }
    if (plain.size() < 60000)
      require(detail::expand_nodelist("LIST", plain) == hosts, "a list without brackets expands to itself");
  } catch (const ConfigError&) {
  }
  return 0;
}

}  // namespace lockstep::fuzz
