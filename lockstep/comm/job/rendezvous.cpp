#include <lockstep/base/text.h>
#include <lockstep/comm/job/rendezvous.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/base/start_thread.h>
#include <lockstep/comm/c10d/store.h>
#include <lockstep/comm/group/error_text.h>
#include <lockstep/comm/group/group_state.h>
#include <lockstep/comm/group/work_state.h>
#include <lockstep/control/agent/agent.h>
#include <lockstep/control/link/key.h>
#include <lockstep/os/host.h>
#include <lockstep/os/socket.h>
#include <lockstep/version.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace lockstep::detail {

using control::Client;
using std::chrono::milliseconds;

namespace {

// How long the agent stays to notify ranks that were refused.
constexpr milliseconds kRefusalLimit(5000);
// How long the agent stays to notify ranks of a failure.
constexpr milliseconds kFailureLimit(300);

// A rank that has left and stays to host the agent logs a line after this time, then after twice as long, and
// so on.
constexpr std::chrono::seconds kFirstLine(60);

// The connection of this process, kept until it ends: later Worlds of the process use it too.
struct AgentConnection {
  const pid_t process = ::getpid();
  std::mutex mutex;
  std::string name;
  std::shared_ptr<Client> client;
  control::Agent* agent = nullptr;  // set if this process hosts it
  int worlds = 0;
};

AgentConnection& agent_connection() {
  // Never destroyed: other threads may still use it while the process exits. A child of fork() makes its own.
  static std::atomic<AgentConnection*> the = new AgentConnection;
  if (the.load()->process != ::getpid()) the = new AgentConnection;
  return *the;
}

[[noreturn]] void throw_join_error(const Identity& identity, const std::string& operation,
                                   const std::string& group, Clock::time_point start, std::string cause,
                                   CommError::Kind kind) {
  CommError::Details details;
  details.operation = operation;
  details.group = group;
  details.rank = identity.rank;
  details.size = identity.size;
  details.elapsed = Clock::now() - start;
  details.cause = std::move(cause);
  details.kind = kind;
  throw CommError(std::move(details));
}

ConfigError no_key(const Identity& identity) {
  return ConfigError(
      fmt::format("a job of {} ranks on several hosts (MASTER_ADDR={}) needs a shared key, and none is set: "
                  "make one with\n  lockstep key --output job.key\nand start every rank with\n  "
                  "LOCKSTEP_KEY_FILE=job.key",
                  identity.size, identity.master_address));
}

// torchrun listens on the master's port itself. The coordinator takes another port and publishes it in
// torchrun's store.
class TorchrunStore {
 public:
  TorchrunStore(const Identity& identity, milliseconds timeout)
      : key_(fmt::format("lockstep/{}", identity.job)) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(identity.master_port);
    options.waitWorkers = false;
    options.timeout = timeout;
    // On its own thread: a port that accepts and never answers would block the constructor forever.
    auto connect = std::make_shared<std::packaged_task<c10::intrusive_ptr<c10d::TCPStore>()>>(
        [address = identity.master_address, options] {
          return c10::make_intrusive<c10d::TCPStore>(address, options);
        });
    auto connected = connect->get_future();
    start_thread("torchrun's store", [connect] { (*connect)(); }).detach();
    if (connected.wait_for(timeout + std::chrono::seconds(1)) != std::future_status::ready)
      throw Error(fmt::format("torchrun's store at {}:{} does not respond (MASTER_ADDR, MASTER_PORT)",
                              identity.master_address, identity.master_port));
    store_ = connected.get();
  }
  void publish(const std::string& address) { put(*store_, key_, address); }
  std::string read() { return take(*store_, key_); }

 private:
  const std::string key_;
  c10::intrusive_ptr<c10d::Store> store_;
};

// Part of the proof of the key, so agents of another job or of an earlier attempt do not match even with the
// same key. MPICH's job id differs from host to host.
std::string job_of_all_hosts(const Identity& identity) {
  return fmt::format("{} {} {} {}", identity.launcher, identity.master_address, identity.restart_count,
                     identity.launcher == "MPICH" ? "" : identity.job);
}

control::AgentOptions agent_options(const Identity& identity, const std::string& name, milliseconds timeout) {
  control::AgentOptions options;
  options.name = name;
  options.agent_rank = identity.rank;
  options.join_timeout = timeout;
  options.stop_grace = env::duration("LOCKSTEP_STOP_GRACE").value_or(options.stop_grace);
  options.say = [](const std::string& line) { log(LogLevel::warn, "{}", line); };
  const bool one_host = identity.local_size == identity.size || identity.master_address.empty();
  if (one_host) return options;

  options.coordinator = control::is_local_address(identity.master_address);
  auto key = control::job_key("");
  if (!key) {
    // Nothing indicates several hosts: missing ranks will be named.
    if (options.coordinator && !identity.local_size) return options;
    throw no_key(identity);
  }
  control::Link link{.address = identity.master_address,
                     .port = identity.master_port,
                     .last_port = std::max(identity.master_port, identity.last_master_port),
                     .key = *key,
                     .job = job_of_all_hosts(identity)};
  if (identity.store_is_served && !options.coordinator) {
    const auto address = TorchrunStore(identity, timeout).read();
    const auto colon = address.rfind(':');
    link.address = address.substr(0, colon);
    link.port = link.last_port = std::stoi(address.substr(colon + 1));
  } else if (identity.store_is_served) {
    link.port = link.last_port = 0;
  }
  options.link = std::move(link);
  return options;
}

// The agent's socket: `lockstep run` passes its name; otherwise it is the same on every rank of the job on a
// host.
std::string agent_name(const Identity& identity) {
  if (!identity.agent.empty()) return identity.agent;
  return fmt::format("lockstep/{}/{}", ::getuid(), identity.job).substr(0, 100);
}

control::Fd connect_to_agent(AgentConnection& agent_connection, const Identity& identity,
                             milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    if (auto socket = control::connect_local(agent_connection.name)) {
      if (!control::is_own(socket->get()))
        throw ConfigError(
            fmt::format("the agent's socket @{} belongs to another user (uid {}); run a job's processes as "
                        "one user",
                        agent_connection.name, control::peer_of(socket->get()).uid));
      return std::move(*socket);
    }
    if (!identity.agent.empty())
      throw ConfigError(fmt::format(
          "LOCKSTEP_AGENT={}: no agent listens there. The variable is left over from a job that has ended, "
          "or this process is in a different network namespace from `lockstep run`",
          identity.agent));
    try {
      auto options = agent_options(identity, agent_connection.name, timeout);
      const bool publishes = identity.store_is_served && options.coordinator && options.link;
      agent_connection.agent = new control::Agent(std::move(options));  // until the process ends
      if (publishes) TorchrunStore(identity, timeout).publish(agent_connection.agent->address());
    } catch (const control::NameInUse&) {
      // Another rank was faster. Its agent will listen in a moment.
      if (Clock::now() >= deadline) throw;
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
}

void tell_about_threads(const Identity& identity, const control::Welcome& welcome) {
  const std::set<int> different(welcome.threads.begin(), welcome.threads.end());
  if (different.size() < 2 || identity.rank != 0) return;
  log(LogLevel::warn,
      "ranks use different numbers of threads ({}), so sums inside operators may differ between ranks in the "
      "last bits; set the same number with `lockstep run --threads K` or OMP_NUM_THREADS=K",
      fmt::join(welcome.threads, ", "));
}

// A process that hosts the agent is needed until its peers have been notified.
void stay_for_others(int world, milliseconds limit) {
  control::Agent* agent = agent_connection().agent;
  const auto deadline = Clock::now() + limit;
  while (agent && !agent->deserted(world) && Clock::now() < deadline)
    std::this_thread::sleep_for(milliseconds(2));
}

// It is also needed while its peers work: they cannot continue without it.
void stay_while_others_work(int world, const Client& client) {
  control::Agent* agent = agent_connection().agent;
  const auto start = Clock::now();
  auto next_line = kFirstLine;
  while (agent && !agent->deserted(world) && client.usable()) {
    std::this_thread::sleep_for(milliseconds(2));
    if (Clock::now() - start < next_line) continue;
    log(LogLevel::warn,
        "this rank has left the job, but its process hosts the agent: waiting {} s for the others",
        next_line.count());
    next_line *= 2;
  }
}

constexpr std::size_t kShownList = 80;  // longest list of ranks shown, in characters
// number of keys asked about at once: that many answers fit into a message
constexpr std::size_t kAskedAtOnce = 2048;

// The first few ranks whose key is missing. Each lookup gets only a moment, because the store may be gone
// too.
template <typename Key>
std::vector<int> not_there(c10d::Store& store, const Key& key, const std::vector<int>& ranks) {
  std::vector<int> missing;
  for (int rank : ranks) {
    try {
      store.wait({key(rank)}, milliseconds(200));
    } catch (const std::exception&) {
      missing.push_back(rank);
      if (missing.size() == 4) break;
    }
  }
  return missing;
}

}  // namespace

Membership join_job(Identity& identity, milliseconds timeout,
                    std::function<void(const control::Failure&)> on_failure) {
  const auto start = Clock::now();
  AgentConnection& meet = agent_connection();
  std::lock_guard lock(meet.mutex);
  const auto name = agent_name(identity);
  if (identity.threads && *identity.threads != at::get_num_threads()) at::set_num_threads(*identity.threads);
  const control::Hello hello{.rank = identity.rank,
                             .size = identity.size,
                             .local_rank = identity.local_rank.value_or(-1),
                             .local_size = identity.local_size.value_or(-1),
                             .pid = ::getpid(),
                             .world = meet.worlds++,
                             .attempt = identity.restart_count,
                             .threads = at::get_num_threads(),
                             .version = kVersion,
                             .host = host::name()};
  auto join = [&] {
    for (;;) {
      if (!meet.client || !meet.client->usable() || meet.name != name) {
        meet.name = name;
        meet.client = Client::make(connect_to_agent(meet, identity, timeout));
      }
      try {
        return meet.client->join(hello, timeout, on_failure);
      } catch (const control::AgentGone&) {
        if (Clock::now() - start >= timeout || !identity.agent.empty()) throw;
      }
    }
  };
  auto part = [&] {
    if (!meet.client) return;  // no agent was reached
    meet.client->leave();
    stay_for_others(hello.world, kRefusalLimit);
  };
  try {
    const auto welcome = join();
    identity.local_rank = welcome.local_rank;
    identity.local_size = welcome.local_size;
    tell_about_threads(identity, welcome);
    return {meet.client, fmt::format("world {}/", hello.world), welcome.address, welcome.nodes};
  } catch (const ConfigError&) {
    part();
    throw;
  } catch (const control::AgentGone& error) {
    throw_join_error(identity, "join", "world", start, error.what(), CommError::Kind::stopped);
  } catch (const control::JoinError& error) {
    part();
    throw_join_error(
        identity, "join", "world", start, error.what(),
        Clock::now() - start >= timeout ? CommError::Kind::deadline : CommError::Kind::peer_died);
  }
}

void leave_job(Client& client, bool in_order) noexcept {
  const int world = agent_connection().worlds - 1;
  client.leave();
  if (in_order) stay_while_others_work(world, client);
  stay_for_others(world, kFailureLimit);
}

// The exchanged text is short however many ranks there are: the start of the list, and a hash of all of it.
void agree_on_order(const TransportContext& context, milliseconds timeout) {
  const auto start = Clock::now();
  auto key = [](int rank) { return fmt::format("order/{}", rank); };
  auto& store = *context.store;
  const auto list = fmt::format("[{}]", fmt::join(context.ranks, ", "));
  const auto shown = list.size() <= kShownList ? list : list.substr(0, kShownList) + "...";
  const auto mine = fmt::format("{:016x} {}", static_cast<std::uint64_t>(hash_of(list)), shown);
  const int self = context.ranks[static_cast<std::size_t>(context.rank)];
  std::vector<int> awaited;
  try {
    put(store, key(self), mine);
    for (std::size_t next = 0; next < context.ranks.size();) {
      awaited.clear();
      std::vector<std::string> keys;
      for (; next < context.ranks.size() && keys.size() < kAskedAtOnce; ++next) {
        awaited.push_back(context.ranks[next]);
        keys.push_back(key(context.ranks[next]));
      }
      store.wait(keys, timeout);
      const auto all = store.multiGet(keys);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const std::string theirs(all[i].begin(), all[i].end());
        if (theirs == mine) continue;
        throw ConfigError(
            fmt::format("the members of a group pass its ranks in different orders: rank {} passes {}, "
                        "rank {} passes {}",
                        self, shown, awaited[i], theirs.substr(std::min<std::size_t>(17, theirs.size()))));
      }
    }
  } catch (const ConfigError&) {
    throw;
  } catch (const std::exception& error) {
    Identity identity;
    identity.rank = self;
    identity.size = context.world_size;
    const auto missing = context.failed() ? std::vector<int>{} : not_there(store, key, awaited);
    const auto whom = missing.empty() ? "" : fmt::format("waited for {}: ", ranks_text(missing));
    throw_join_error(identity, "making a group", shown, start, whom + plain_text(error),
                     context.failed() || Clock::now() - start < timeout ? CommError::Kind::peer_died
                                                                        : CommError::Kind::deadline);
  }
}

}  // namespace lockstep::detail
