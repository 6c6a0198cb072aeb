#include <lockstep/comm/rendezvous.h>

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/pending.h>
#include <lockstep/comm/store.h>
#include <lockstep/version.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace lockstep::detail {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

namespace {

constexpr milliseconds kRefusalLimit(2000);
constexpr const char* kRefused = "refused";

[[noreturn]] void throw_join_error(const Identity& identity, const std::string& operation,
                                   const std::string& group, Clock::time_point start, std::string cause) {
  CommError::Details details;
  details.operation = operation;
  details.group = group;
  details.rank = identity.rank;
  details.size = identity.size;
  details.elapsed = Clock::now() - start;
  details.cause = std::move(cause);
  throw CommError(std::move(details));
}

// What a rank tells the others of itself; one line each.
struct Card {
  int size = 0, local_rank = -1, local_size = -1, pid = 0;
  std::string host, name, version;

  std::string text() const {
    return fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}\n", size, local_rank, local_size, pid, host, name,
                       version);
  }
  static Card parse(const std::string& text) {
    Card card;
    std::istringstream in(text);
    in >> card.size >> card.local_rank >> card.local_size >> card.pid >> std::ws;
    std::getline(in, card.host);
    std::getline(in, card.name);
    std::getline(in, card.version);
    if (!in) throw Error("a rank's card makes no sense: are all ranks of the same version?");
    return card;
  }
};

std::string card_key(int rank) { return fmt::format("card/{}", rank); }

// The local address from which the master is reached: what peers on other hosts can reach too.
std::string address_towards(const std::string& master, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (::getaddrinfo(master.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return {};
  std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, &::freeaddrinfo);
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    const int fd = ::socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    char text[NI_MAXHOST] = {};
    // Connecting a datagram socket sends nothing; it asks the routing table.
    const bool known = ::connect(fd, each->ai_addr, each->ai_addrlen) == 0 &&
                       ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
                       ::getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof text, nullptr, 0,
                                     NI_NUMERICHOST) == 0;
    ::close(fd);
    if (!known) continue;
    const std::string address = text;
    return address.starts_with("127.") || address == "::1" ? std::string() : address;
  }
  return {};
}

// Whether the descriptor is the launcher's listener still.
bool listens_at(int fd, int port) {
  sockaddr_in address{};
  socklen_t length = sizeof address, flag_length = sizeof(int);
  int listens = 0;
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
         address.sin_family == AF_INET && ntohs(address.sin_port) == port &&
         ::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &flag_length) == 0 && listens != 0;
}

[[noreturn]] void refuse(c10d::Store& store, const std::string& text) {
  put(store, kRefused, text);
  throw ConfigError(text);
}

// The ConfigError that some rank has found while meeting.
void throw_if_refused(c10d::Store& store) {
  if (store.check({kRefused})) throw ConfigError(take(store, kRefused));
}

bool serves_store(const Identity& identity) { return identity.rank == 0 && !identity.store_is_served; }

// The refusal is in the store: whoever serves it stays until those who came have read it.
void part_refused(c10d::Store& store, const Identity& identity) noexcept {
  try {
    auto told = store.add("told", 1);
    if (!serves_store(identity)) return;
    const auto limit = Clock::now() + kRefusalLimit;
    while (told < store.add("arrived", 0) && Clock::now() < limit) {
      std::this_thread::sleep_for(milliseconds(5));
      told = store.add("told", 0);
    }
  } catch (const std::exception&) {  // the store is gone, and with it whom to tell
  }
}

c10::intrusive_ptr<c10d::Store> open_store(const Identity& identity, milliseconds timeout) {
  const auto start = Clock::now();
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(identity.master_port);
  options.isServer = serves_store(identity);
  options.waitWorkers = false;
  options.timeout = timeout;
  // A wrapper around the program may have closed it: then the port is ours to open.
  if (options.isServer && identity.listen_fd && listens_at(*identity.listen_fd, identity.master_port))
    options.masterListenFd = *identity.listen_fd;
  // On a thread of its own: a port that accepts and never answers would hold the constructor for good.
  auto connect = std::make_shared<std::packaged_task<c10::intrusive_ptr<c10d::TCPStore>()>>(
      [address = identity.master_address, options] {
        return c10::make_intrusive<c10d::TCPStore>(address, options);
      });
  auto connected = connect->get_future();
  std::thread([connect] { (*connect)(); }).detach();
  try {
    if (connected.wait_for(timeout + std::chrono::seconds(1)) != std::future_status::ready)
      throw Error("somebody accepts connections there and does not answer: it is not the store of this job");
    return connected.get();
  } catch (const std::exception& error) {
    throw_join_error(identity, "join", "world", start,
                     fmt::format("the store at MASTER_ADDR={} MASTER_PORT={} could not be {}: {}",
                                 identity.master_address, identity.master_port,
                                 options.isServer ? "opened (is another job or rank 0 there?)" : "reached",
                                 plain_text(error)));
  }
}

// Made once and kept until the process ends: a rank that has left and joins again must not meet a server
// that is about to go.
c10::intrusive_ptr<c10d::Store> store_of_process(const Identity& identity, milliseconds timeout) {
  static std::mutex mutex;
  static auto* stores = new std::map<std::string, c10::intrusive_ptr<c10d::Store>>;
  std::lock_guard lock(mutex);
  auto& known = (*stores)[fmt::format("{}:{}", identity.master_address, identity.master_port)];
  if (!known) known = open_store(identity, timeout);
  return known;
}

void compare_cards(c10d::Store& store, Identity& identity, milliseconds timeout) {
  const auto start = Clock::now();
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  const Card mine{identity.size,
                  identity.local_rank.value_or(-1),
                  identity.local_size.value_or(-1),
                  ::getpid(),
                  host_identity(),
                  name,
                  kVersion};
  store.add("arrived", 1);
  if (store.add(fmt::format("arrived/{}", identity.rank), 1) > 1) {
    const auto other = Card::parse(take(store, card_key(identity.rank)));
    refuse(store, fmt::format("two processes have RANK={}: process {} on {} and process {} on {}; each needs "
                              "its own, from 0 to {}",
                              identity.rank, other.pid, other.name, mine.pid, mine.name, identity.size - 1));
  }
  put(store, card_key(identity.rank), mine.text());

  std::vector<std::string> keys;
  for (int r = 0; r < identity.size; ++r) keys.push_back(card_key(r));
  try {
    // Those who find a contradiction leave word of it.
    const auto deadline = start + timeout;
    for (milliseconds pause(1); !store.check(keys); pause = std::min(2 * pause, milliseconds(50))) {
      throw_if_refused(store);
      if (Clock::now() >= deadline) throw Error("the time to join is over");
      std::this_thread::sleep_for(pause);
    }
  } catch (const ConfigError&) {
    throw;
  } catch (const std::exception& error) {
    std::vector<int> here, missing;
    try {
      for (int r = 0; r < identity.size; ++r) (store.check({card_key(r)}) ? here : missing).push_back(r);
    } catch (const std::exception&) {  // the store itself is gone
      throw_join_error(identity, "join", "world", start, plain_text(error));
    }
    throw_join_error(identity, "join", "world", start,
                     fmt::format("of {} ranks (WORLD_SIZE) these did not come: {}; these did: {}",
                                 identity.size, fmt::join(missing, ", "), fmt::join(here, ", ")));
  }

  int local_rank = 0, local_size = 0;
  for (int r = 0; r < identity.size; ++r) {
    const auto card = r == identity.rank ? mine : Card::parse(take(store, card_key(r)));
    if (card.size != mine.size)
      refuse(store, fmt::format("ranks disagree on WORLD_SIZE: it is {} on rank {} and {} on rank {}",
                                mine.size, identity.rank, card.size, r));
    if (card.version != mine.version)
      refuse(store, fmt::format("ranks run different versions of lockstep: {} on rank {} and {} on rank {}",
                                mine.version, identity.rank, card.version, r));
    if (card.host != mine.host) continue;
    if (r != identity.rank && card.local_rank >= 0 && card.local_rank == mine.local_rank)
      refuse(store,
             fmt::format("ranks {} and {} are on one host ({}) and both have LOCAL_RANK={}",
                         std::min(r, identity.rank), std::max(r, identity.rank), mine.name, mine.local_rank));
    if (r < identity.rank) ++local_rank;
    ++local_size;
  }
  if (!identity.local_rank) identity.local_rank = local_rank;
  if (!identity.local_size) identity.local_size = local_size;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_store(const Identity& identity, milliseconds timeout) {
  if (identity.size == 1) return c10::make_intrusive<c10d::HashStore>();
  // Each World of a process has keys of its own in the one store: the job's ranks make the same Worlds in
  // the same order.
  static std::atomic<int> worlds = 0;
  return c10::make_intrusive<c10d::PrefixStore>(
      fmt::format("lockstep/{}/{}", identity.restart_count, worlds++), store_of_process(identity, timeout));
}

std::string meet(c10d::Store& store, Identity& identity, milliseconds timeout) {
  if (identity.size == 1) return {};
  try {
    compare_cards(store, identity, timeout);
  } catch (const ConfigError&) {
    part_refused(store, identity);
    throw;
  }
  return address_towards(identity.master_address, identity.master_port);
}

void agree_on_order(const TransportContext& context, milliseconds timeout) {
  const auto start = Clock::now();
  auto key = [](int rank) { return fmt::format("order/{}", rank); };
  auto& store = *context.store;
  const auto mine = fmt::format("[{}]", fmt::join(context.ranks, ", "));
  const int self = context.ranks[static_cast<std::size_t>(context.rank)];
  put(store, key(self), mine);
  for (int rank : context.ranks) {
    if (rank == self) continue;
    try {
      store.wait({key(rank)}, timeout);
    } catch (const ConfigError&) {
      throw;
    } catch (const std::exception& error) {
      Identity identity;
      identity.rank = self;
      identity.size = context.world_size;
      throw_join_error(identity, "making a group", mine, start,
                       fmt::format("we waited for rank {}: {}", rank, plain_text(error)));
    }
    const auto theirs = take(store, key(rank));
    if (theirs != mine)
      throw ConfigError(
          fmt::format("ranks make one group in different orders: rank {} gives {}, rank {} gives {}", self,
                      mine, rank, theirs));
  }
}

void leave(c10d::Store& store, const Identity& identity, milliseconds limit) {
  const auto left = store.add("left", 1);
  if (!serves_store(identity)) return;
  const auto deadline = Clock::now() + limit;
  for (auto count = left; count < identity.size; count = store.add("left", 0)) {
    if (Clock::now() >= deadline) {
      log(LogLevel::warn, "{} of {} ranks have left the job in {} s; not waiting for the others", count,
          identity.size, std::chrono::duration_cast<std::chrono::seconds>(limit).count());
      return;
    }
    std::this_thread::sleep_for(milliseconds(2));
  }
}

}  // namespace lockstep::detail
