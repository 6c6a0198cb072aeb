#include <lockstep/launch/network.h>

#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <memory>
#include <system_error>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/os/socket.h>

namespace lockstep::detail {

int free_port() {
  const control::Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);  // Free on every address; nothing listens.
  socklen_t length = sizeof address;
  if (!fd || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw std::system_error(errno, std::generic_category(), "cannot find a free port on this host");
  return ntohs(address.sin_port);
}

int port_beside(int port) { return port < 65535 ? port + 1 : port - 1; }

std::pair<std::string, int> parse_endpoint(const std::string& what, const std::string& text) {
  const auto colon = text.rfind(':');
  std::string host = text.substr(0, colon);
  int port = 0;
  bool good = colon != std::string::npos && !host.empty();
  if (good) {
    const char* end = text.data() + text.size();
    auto [stop, error] = std::from_chars(text.data() + colon + 1, end, port);
    good = error == std::errc{} && stop == end && port >= 1 && port <= 65535;
  }
  // An IPv6 address contains colons itself.
  if (good && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  else
    good = good && host.find(':') == std::string::npos;
  if (!good || host.empty())
    throw bad_value(what,
                    "HOST:PORT with a port from 1 to 65535, such as node1:29500, 10.0.0.1:29500 or "
                    "[fd00::1]:29500",
                    text);
  return {host, port};
}

std::vector<std::string> network_interfaces() {
  std::vector<std::string> names;
  const std::unique_ptr<struct if_nameindex, void (*)(struct if_nameindex*)> list(::if_nameindex(),
                                                                                  ::if_freenameindex);
  for (auto* entry = list.get(); entry != nullptr && entry->if_index != 0; ++entry)
    names.push_back(entry->if_name);
  return names;
}

}  // namespace lockstep::detail
