// Checks network interfaces and the resolution of the host's name.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/environment.h>
#include <lockstep/os/host.h>

#include "doctor_rows.h"

namespace lockstep::cli {
namespace {

struct Interface {
  bool up = false;
  bool loopback = false;
  std::vector<std::string> addresses;  // Without link-local ones, which peers cannot use.
  std::optional<int> megabits;
};

std::string numeric(const sockaddr* address) {
  std::array<char, NI_MAXHOST> text{};
  const socklen_t size = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (::getnameinfo(address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return text.data();
}

std::optional<int> speed_of(const std::string& name) {
  std::istringstream text(first_line_of("/sys/class/net/" + name + "/speed"));
  int megabits = 0;
  if (!(text >> megabits) || megabits <= 0) return std::nullopt;  // virtual ones do not know
  return megabits;
}

std::map<std::string, Interface> interfaces() {
  std::map<std::string, Interface> found;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return found;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    auto& interface = found[each->ifa_name];
    interface.up = (each->ifa_flags & IFF_UP) != 0 && (each->ifa_flags & IFF_RUNNING) != 0;
    interface.loopback = (each->ifa_flags & IFF_LOOPBACK) != 0;
    if (each->ifa_addr == nullptr) continue;
    const auto family = each->ifa_addr->sa_family;
    if (family == AF_INET6 &&
        IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr))
      continue;
    if (family == AF_INET || family == AF_INET6) interface.addresses.push_back(numeric(each->ifa_addr));
  }
  ::freeifaddrs(list);
  for (auto& [name, interface] : found) interface.megabits = speed_of(name);
  return found;
}

// Interface of the default route; empty if there is none.
std::string outward_interface() {
  std::ifstream routes("/proc/net/route");
  std::string line, name, destination;
  while (std::getline(routes, line))
    if (std::istringstream(line) >> name >> destination && destination == "00000000") return name;
  return {};
}

std::string describe(const std::string& name, const Interface& interface) {
  std::string text = fmt::format("{} {}", name, fmt::join(interface.addresses, " "));
  if (interface.megabits)
    text += *interface.megabits < 1000 ? fmt::format(" at {} Mb/s", *interface.megabits)
                                       : fmt::format(" at {:g} Gb/s", *interface.megabits / 1000.0);
  return text;
}

Row network() {
  const auto all = interfaces();
  const auto wish = env::text("GLOO_SOCKET_IFNAME");
  const auto outward = wish.value_or(outward_interface());
  Row row{"network", {}};
  std::vector<std::string> texts, without;
  row.values["interfaces"] = nlohmann::ordered_json::array();
  for (const auto& [name, interface] : all) {
    row.values["interfaces"].push_back(
        {{"name", name}, {"up", interface.up}, {"addresses", interface.addresses}, {"megabits", nullptr}});
    if (interface.megabits) row.values["interfaces"].back()["megabits"] = *interface.megabits;
    if (interface.up && !interface.addresses.empty())
      texts.push_back(describe(name, interface));
    else
      without.push_back(name);
  }
  row.values["gloo_on_one_host"] = wish.value_or("lo");
  row.values["gloo_between_hosts"] = outward;
  row.finding = fmt::format("{}", fmt::join(texts, "; "));
  if (!without.empty()) row.finding += fmt::format("; down or without address: {}", fmt::join(without, " "));

  if (wish && !all.contains(*wish)) {
    row.verdict = Verdict::bad;
    row.finding += fmt::format("; GLOO_SOCKET_IFNAME='{}' is not one of them", *wish);
    row.hint = "unset GLOO_SOCKET_IFNAME, or set it to one of these interfaces";
  } else if (wish) {
    row.finding += fmt::format("; gloo uses {} (GLOO_SOCKET_IFNAME)", *wish);
  } else if (!outward.empty()) {
    row.finding += fmt::format("; gloo uses lo on one host, {} between hosts", outward);
  } else {
    row.verdict = Verdict::note;
    row.finding += "; gloo uses lo, because there is no default route to other hosts";
    row.hint = "with several hosts, set GLOO_SOCKET_IFNAME to the interface that reaches them";
  }
  return row;
}

// An unresponsive name server blocks the caller for a long time, so a detached thread asks it.
std::optional<std::set<std::string>> addresses_of(const std::string& name) {
  auto ask = std::make_shared<std::packaged_task<std::set<std::string>()>>([name] {
    std::set<std::string> found;
    addrinfo hints{}, *list = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (::getaddrinfo(name.c_str(), nullptr, &hints, &list) != 0) return found;
    for (const addrinfo* each = list; each != nullptr; each = each->ai_next)
      found.insert(numeric(each->ai_addr));
    ::freeaddrinfo(list);
    return found;
  });
  auto answer = ask->get_future();
  std::thread([ask] { (*ask)(); }).detach();
  if (answer.wait_for(std::chrono::seconds(2)) != std::future_status::ready) return std::nullopt;
  return answer.get();
}

Row host_name() {
  const std::string name = host::name();
  const auto addresses = addresses_of(name);
  Row row{"host name", {}};
  row.values["name"] = name;
  row.values["addresses"] = addresses.value_or(std::set<std::string>());
  row.hint = "for runs on several hosts, pass an IP address to --master, or fix /etc/hosts";
  row.verdict = Verdict::note;
  if (!addresses) {
    row.finding = fmt::format("'{}' was not resolved within 2 s", name);
  } else if (addresses->empty()) {
    row.finding = fmt::format("'{}' does not resolve", name);
  } else if (std::all_of(addresses->begin(), addresses->end(),
                         [](const std::string& each) { return each.starts_with("127.") || each == "::1"; })) {
    row.finding =
        fmt::format("'{}' is {}, which other hosts cannot reach", name, fmt::join(*addresses, ", "));
  } else {
    row.finding = fmt::format("'{}' is {}", name, fmt::join(*addresses, ", "));
    row.verdict = Verdict::ok;
    row.hint.clear();
  }
  return row;
}

}  // namespace

Rows network_rows() { return {network(), host_name()}; }

}  // namespace lockstep::cli
