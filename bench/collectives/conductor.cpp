#include "conductor.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <stdexcept>
#include <thread>

#include <fmt/format.h>

#include "rank.h"
#include "torch_engines.h"

namespace lockstep::bench {
namespace {

// Enabled while there are a transport "shm" and a Group::allocate that returns its memory.
constexpr bool kHasShm = true, kHasAllocate = true;

// Minimum number of turns of each peer, and the maximum length of one: drift of the machine affects all peers
// equally.
constexpr int kRounds = 7;
constexpr double kTurnSeconds = 0.05;
constexpr int kMostSamplesInTurn = 16;
constexpr int kLongestBatch = 256;
constexpr std::int64_t kBatchBytes = 1 << 20;  // Keeps a batch of small operations in the caches.
constexpr double kBatchSeconds = 500e-6;       // Makes the clock and late starts of ranks negligible.

// Prefix of backends called through Group, before the name of the transport.
constexpr const char* kThroughGroup = "lockstep-";

bool is_openmpi(const std::string& backend) { return backend == "openmpi"; }
bool under_mpirun(const std::string& backend) { return is_openmpi(backend) || backend == "lockstep-mpi"; }

// By default the kernel may put two spinning ranks on one core, which would be unfair to Open MPI; both
// launchers bind by default. Gloo uses threads of its own, which would compete for one core.
bool binds(const std::string& backend, const Settings& settings) {
  if (settings.bind == "auto") return !backend.ends_with("gloo");
  return settings.bind == "cores";
}

std::vector<std::string> command(const std::string& backend, int ranks, const Settings& settings,
                                 const std::string& page) {
  const auto count = std::to_string(ranks);
  const bool bind = ranks <= settings.cores && binds(backend, settings);
  std::vector<std::string> words;
  if (under_mpirun(backend)) {
    words = {settings.mpirun, "-n", count, "--oversubscribe", "--bind-to", bind ? "core" : "none"};
    if (::geteuid() == 0) words.push_back("--allow-run-as-root");
    // Open MPI spins; without this, a waiting rank would keep the core from the rank that it waits for.
    if (ranks > settings.cores) words.insert(words.end(), {"--mca", "mpi_yield_when_idle", "1"});
  } else {
    words = {settings.lockstep,     "run", "-n", count, "--quiet", "--threads", "1", "--bind",
             bind ? "auto" : "none"};
  }
  if (is_openmpi(backend))
    words.insert(words.end(), {settings.openmpi, page});
  else
    words.insert(words.end(), {settings.self, "--rank-of", backend, "--page", page});
  return words;
}

pid_t start(std::vector<std::string> words) {
  std::vector<char*> arguments;
  for (auto& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t parent = ::getpid(), child = ::fork();
  if (child != 0) return child;
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(1);
  ::setenv("OMP_NUM_THREADS", "1", 1);
  ::setenv("LOCKSTEP_MPI", "openmpi", 1);
  ::dup2(2, 1);
  ::execvp(arguments[0], arguments.data());
  ::perror(arguments[0]);
  ::_exit(127);
}

// The ranks of one peer. They live for all cells and sleep between their turns.
class Ranks {
 public:
  Ranks(std::string backend, int ranks, const Settings& settings) : backend_(std::move(backend)) {
    static int count = 0;
    path_ = fmt::format("/dev/shm/bench_collectives.{}.{}", ::getpid(), count++);
    page_ = open_page(path_, true);
    page_->conductor = ::getpid();
    page_->ranks = ranks;
    page_->spins = ranks <= settings.cores;
    launcher_ = start(command(backend_, ranks, settings, path_));
    try {
      await();
    } catch (...) {
      end();
      throw;
    }
    remove_files();
  }
  ~Ranks() {
    Order order;
    order.kind = Order::Kind::leave;
    if (launcher_ > 0 && page_->failed == 0) give(order);
    end();
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  void carry_out(const Order& order) {
    give(order);
    await();
  }

  // Microseconds of each operation, from the first rank's start to the last rank's end, because a training
  // step continues when the last rank has its result. This can exceed the longest time of any rank: if ranks
  // share cores, one may finish copying before another begins.
  std::vector<double> measure(Order order) {
    order.kind = Order::Kind::measure;
    carry_out(order);
    std::vector<double> times;
    for (int s = 0; s < order.samples; ++s) {
      const auto begin = *std::min_element(page_->begin[s], page_->begin[s] + page_->ranks);
      const auto end = *std::max_element(page_->end[s], page_->end[s] + page_->ranks);
      times.push_back(static_cast<double>(end - begin) / 1e3 / order.batch);
    }
    return times;
  }

 private:
  void give(const Order& order) {
    page_->order = order;
    page_->ready = 0;
    page_->turn.fetch_add(1);
    wake_all(page_->turn);
  }

  void await() {
    for (;;) {
      const auto ready = page_->ready.load();
      if (page_->failed == 2) throw std::runtime_error(fmt::format("{}: {}", backend_, page_->error));
      if (ready == static_cast<std::uint32_t>(page_->ranks)) return;
      if (::waitpid(launcher_, nullptr, WNOHANG) == launcher_) {
        launcher_ = -1;
        if (page_->failed == 2) continue;
        throw std::runtime_error(fmt::format("{}: its ranks exited", backend_));
      }
      sleep_while(page_->ready, ready);
    }
  }

  void end() noexcept {
    remove_files();
    // Wait for a normal exit, then send SIGTERM, then SIGKILL.
    for (const int signal : {0, SIGTERM, SIGKILL}) {
      if (launcher_ > 0) ::kill(launcher_, signal);
      for (int i = 0; launcher_ > 0 && i < 1000; ++i) {
        if (::waitpid(launcher_, nullptr, WNOHANG) != 0) launcher_ = -1;
        if (launcher_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    }
    remove_files();  // Gloo's store may have recreated its file on exit.
  }

  void remove_files() noexcept {
    ::unlink(path_.c_str());
    ::unlink((path_ + ".store").c_str());
  }

  const std::string backend_;
  std::string path_;
  Page* page_ = nullptr;  // Mapped until this process exits: a few kilobytes.
  pid_t launcher_ = -1;
};

int batch_for(const Cell& cell, double us) {
  const auto fits = cell.bytes == 0 ? kLongestBatch : kBatchBytes / cell.bytes;
  const auto wanted = std::ceil(kBatchSeconds * 1e6 / std::max(us, 0.1));
  return static_cast<int>(
      std::clamp<double>(std::min<double>(wanted, static_cast<double>(fits)), 1, kLongestBatch));
}

// One row while it is measured.
struct Contestant {
  Peer peer;
  Ranks* ranks;
  Order order = {};
  std::vector<double> times = {};

  // Chooses batch and sample sizes such that a turn takes about that many seconds.
  void prepare(const Cell& cell, double seconds) {
    order.op = cell.op;
    order.type = cell.type;
    order.bytes = cell.bytes;
    order.allocated = peer.memory == "allocated";
    ranks->carry_out(order);
    order.samples = 3;
    const auto first = ranks->measure(order);
    order.batch = batch_for(cell, *std::min_element(first.begin(), first.end()));
    order.kind = Order::Kind::prepare;
    ranks->carry_out(order);
    order.samples = 2;
    const auto warm = ranks->measure(order);
    const double sample = std::max(*std::min_element(warm.begin(), warm.end()) * order.batch / 1e6, 1e-6);
    order.samples = static_cast<int>(std::clamp(seconds / sample, 1.0, double{kMostSamplesInTurn}));
  }

  void take_turn() {
    const auto more = ranks->measure(order);
    times.insert(times.end(), more.begin(), more.end());
  }

  void release() {
    order.kind = Order::Kind::release;
    ranks->carry_out(order);
  }

  Row row(const Cell& cell) {
    std::sort(times.begin(), times.end());
    auto at = [&](double part) {
      const double place = part * static_cast<double>(times.size() - 1);
      const auto below = static_cast<std::size_t>(place);
      const auto above = std::min(below + 1, times.size() - 1);
      return times[below] + (times[above] - times[below]) * (place - static_cast<double>(below));
    };
    return {cell, peer, at(0.5), at(0.1), at(0.9)};
  }
};

// Open MPI has no bfloat16, and memcpy has no barrier.
bool takes_part(const Peer& peer, const Cell& cell) {
  if (is_openmpi(peer.backend)) return cell.type == Type::float32;
  if (cell.op == Op::barrier) return peer.backend != "memcpy" && peer.memory == "plain";
  return true;
}

}  // namespace

std::vector<Peer> known_peers() {
  return {{"shm", "plain"},    {"shm", "allocated"},       {"gloo", "plain"},        {"openmpi", "plain"},
          {"memcpy", "plain"}, {"lockstep-gloo", "plain"}, {"lockstep-mpi", "plain"}};
}

bool by_default(const Peer& peer) { return !peer.backend.starts_with(kThroughGroup); }

std::string missing(const Peer& peer, const Settings& settings) {
  if (peer.backend == "shm" && !kHasShm) return "this version has no such transport";
  if (peer.memory == "allocated" && !kHasAllocate) return "this version has no such memory";
  if (under_mpirun(peer.backend) && (settings.openmpi.empty() || settings.mpirun.empty()))
    return "Open MPI was not found when this was built";
  return {};
}

void measure(const std::vector<Cell>& cells, const std::vector<Peer>& peers, const Settings& settings,
             const std::function<void(const std::vector<Row>&)>& done) {
  if (cells.empty()) return;
  std::map<std::string, std::unique_ptr<Ranks>> ranks;
  for (const auto& peer : peers)
    ranks[peer.backend + peer.memory] = std::make_unique<Ranks>(peer.backend, cells.front().ranks, settings);
  const int rounds = std::max(kRounds, static_cast<int>(settings.seconds / kTurnSeconds));
  for (const auto& cell : cells) {
    std::vector<Contestant> contestants;
    for (const auto& peer : peers)
      if (takes_part(peer, cell)) contestants.push_back({peer, ranks[peer.backend + peer.memory].get()});
    for (auto& each : contestants) each.prepare(cell, settings.seconds / rounds);
    for (int round = 0; round < rounds; ++round)
      for (auto& each : contestants) each.take_turn();
    std::vector<Row> rows;
    for (auto& each : contestants) {
      each.release();
      rows.push_back(each.row(cell));
    }
    done(rows);
  }
}

void run_rank(const std::string& backend, const std::string& page_path) {
  Page* page = open_page(page_path, false);
  try {
    auto number = [](const char* name) {
      const char* text = std::getenv(name);
      return text != nullptr ? std::atoi(text) : 0;
    };
    std::unique_ptr<Engine> engine;
    if (backend == "memcpy")
      engine = make_memcpy_engine(number("RANK"));
    else if (backend == "gloo")
      engine = make_gloo_engine(number("RANK"), page->ranks, page_path + ".store");
    else
      engine = make_group_engine(backend.starts_with(kThroughGroup) ? backend.substr(9) : backend);
    serve(*page, *engine);
  } catch (const std::exception& error) {
    report_failure(*page, error.what());
    throw;
  }
}

}  // namespace lockstep::bench
