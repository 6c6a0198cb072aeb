// Compares the collectives of Lockstep with those of Gloo and Open MPI, and with plain copying, in one run.
//
// Each peer has its own ranks, started by `lockstep run` or mpirun, all alive at the same time. For each
// operation, size and number of ranks the peers take turns of a few operations, so that other load on the
// machine affects all of them; the others sleep. Tensors are refilled before each timed batch, and results
// are checked after it. Gloo is called through LibTorch's ProcessGroupGloo and Open MPI through MPI, without
// Lockstep's Group, which would add some microseconds; shm is called through Group, as in programs.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <set>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "conductor.h"
#include "report.h"

namespace {

using namespace lockstep::bench;

constexpr std::int64_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr std::int64_t kAimElements = 6553600;  // Size used by the aim that compares bfloat16 with float32.

struct Request {
  std::vector<std::string> ops, backends, memories, types;
  std::vector<int> ranks;
  std::vector<std::int64_t> bytes;
  std::string json, svg, from, rank_of, page;
};

const std::vector<std::int64_t> kSizes{4,          64,   kKiB,     4 * kKiB,  64 * kKiB,
                                       256 * kKiB, kMiB, 4 * kMiB, 25 * kMiB, 100 * kMiB};

int cores() {
  cpu_set_t mask;
  return ::sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1;
}

template <typename T>
bool wanted(const std::vector<T>& list, const T& value) {
  return list.empty() || std::find(list.begin(), list.end(), value) != list.end();
}

std::vector<Cell> cells_of(const Request& request, int ranks) {
  std::vector<Cell> cells;
  const auto add = [&](Cell cell) {
    const auto whole = cell.op == Op::all_reduce || cell.op == Op::broadcast ? 1 : ranks;
    const std::int64_t unit = std::int64_t{whole} * bytes_of(cell.type);
    // Every rank has an equal part.
    cell.bytes = cell.op == Op::barrier ? 0 : (cell.bytes + unit - 1) / unit * unit;
    if (std::find(cells.begin(), cells.end(), cell) == cells.end()) cells.push_back(cell);
  };
  for (int op = 0; op < static_cast<int>(std::size(kOps)); ++op) {
    if (!wanted<std::string>(request.ops, kOps[op])) continue;
    for (const Type type : {Type::float32, Type::bfloat16}) {
      if (!wanted<std::string>(request.types, kTypes[static_cast<int>(type)])) continue;
      if (static_cast<Op>(op) == Op::barrier && type != Type::float32) continue;
      auto sizes = request.bytes.empty() ? kSizes : request.bytes;
      // Unless requested, bfloat16 is measured for its aim only.
      if (type == Type::bfloat16 && request.types.empty())
        sizes = static_cast<Op>(op) == Op::all_reduce && wanted(request.bytes, kAimElements * 2)
                    ? std::vector{kAimElements * 2}
                    : std::vector<std::int64_t>{};
      for (const auto bytes : sizes) add({static_cast<Op>(op), type, ranks, bytes});
    }
  }
  return cells;
}

std::vector<Peer> peers_of(const Request& request, const Settings& settings) {
  std::vector<Peer> peers;
  std::set<std::string> told;
  for (const auto& peer : known_peers()) {
    if (request.backends.empty() ? !by_default(peer) : !wanted(request.backends, peer.backend)) continue;
    if (!wanted(request.memories, peer.memory)) continue;
    if (const auto why = missing(peer, settings); why.empty())
      peers.push_back(peer);
    else if (told.insert(peer.backend).second)
      std::cerr << fmt::format("skipping {}: {}\n", peer.backend, why);
  }
  if (peers.empty()) throw std::runtime_error("no backend left to measure");
  return peers;
}

std::vector<Row> measure_all(const Request& request, const Settings& settings) {
  const auto peers = peers_of(request, settings);
  auto counts = request.ranks;
  if (counts.empty()) counts = {2, 4, 8};
  if (request.ranks.empty() && settings.cores >= 16) counts.push_back(16);
  std::vector<Row> rows;
  if (double load = 0; ::getloadavg(&load, 1) == 1 && load > 0.5 * settings.cores)
    std::cerr << fmt::format("warning: this machine is busy (load {:.1f} on {} cores), so times are longer\n",
                             load, settings.cores);
  std::cout << table_head() << std::flush;
  for (const int ranks : counts)
    measure(cells_of(request, ranks), peers, settings, [&](const std::vector<Row>& more) {
      rows.insert(rows.end(), more.begin(), more.end());
      std::cout << table_lines(more) << std::flush;
      if (!request.json.empty())
        write_json(request.json, rows);  // An interrupted run leaves the rows so far.
    });
  return rows;
}

void print_again(const std::vector<Row>& rows) {
  std::cout << table_head();
  for (auto begin = rows.begin(); begin != rows.end();) {
    const auto end =
        std::find_if(begin, rows.end(), [&](const Row& row) { return !(row.cell == begin->cell); });
    std::cout << table_lines({begin, end});
    begin = end;
  }
}

void draw(const std::string& json, const std::string& svg) {
  const std::string script = LOCKSTEP_CHART, python = LOCKSTEP_PYTHON;
  const pid_t child = ::fork();
  if (child == 0) {
    ::execlp(python.c_str(), python.c_str(), "-B", script.c_str(), json.c_str(), svg.c_str(), nullptr);
    ::_exit(127);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (status != 0) throw std::runtime_error(fmt::format("{} {} failed", python, script));
}

// Converts 12.5MiB to 13107200; returns an error text, or an empty string.
std::string read_size(std::string& text) {
  const std::map<std::string, std::int64_t> units{
      {"", 1}, {"B", 1}, {"KiB", kKiB}, {"MiB", kMiB}, {"GiB", 1024 * kMiB}};
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const auto unit = units.find(end);
  if (end == text.c_str() || unit == units.end() || !(number > 0))
    return fmt::format("'{}' is not a size; expected a number such as 4, 64KiB or 12.5MiB", text);
  text = std::to_string(static_cast<std::int64_t>(number * static_cast<double>(unit->second)));
  return {};
}

class Help : public CLI::Formatter {
 public:
  Help() { column_width(22); }
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    return CLI::detail::find_and_replace(CLI::Formatter::make_help(app, name, mode), "\n\n\n", "\n\n");
  }
};

void add_options(CLI::App& app, Request& request, Settings& settings) {
  const std::map<std::string, std::string> type_names{{"float", "float32"}, {"bf16", "bfloat16"}};
  std::set<std::string> backends;
  for (const auto& peer : known_peers()) backends.insert(peer.backend);
  const auto list = [&](const char* name, auto& target, const char* value, const std::string& text) {
    return app.add_option(name, target, text)
        ->delimiter(',')
        ->option_text(value)
        ->group("Selection; each option takes a comma-separated list");
  };
  list("--op", request.ops, "OPS", "all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, barrier")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kOps), std::end(kOps))).description(""));
  list("--backend", request.backends, "NAMES",
       "shm; gloo: LibTorch's, called directly; openmpi or mpi: Open MPI, called directly;\n"
       "memcpy: lower bound, every rank copies as many bytes. Only on request:\n"
       "lockstep-gloo, lockstep-mpi: through Lockstep's Group")
      ->transform(CLI::Transformer(std::map<std::string, std::string>{{"mpi", "openmpi"}}).description(""))
      ->check(CLI::IsMember(backends).description(""));
  list("--ranks", request.ranks, "COUNTS", "Numbers of ranks (default: 2,4,8, and 16 with 16 cores or more)")
      ->check(CLI::Range(2, kMaxRanks).description(""));
  list("--bytes", request.bytes, "SIZES",
       "Sizes such as 4,4KiB,25MiB (default: ten sizes from 4 B to 100 MiB),\n"
       "rounded up to a multiple that the ranks can share equally")
      ->transform(CLI::Validator(read_size, ""));
  list("--dtype", request.types, "TYPES",
       "float32 (float), bfloat16 (bf16); default: float32, and bfloat16 for an\n"
       "all_reduce of 12.5 MiB")
      ->transform(CLI::Transformer(type_names).description(""))
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kTypes), std::end(kTypes))).description(""));
  list("--memory", request.memories, "KINDS", "plain, allocated (by Group::allocate; shm only)")
      ->check(CLI::IsMember(std::vector<std::string>{"plain", "allocated"}).description(""));
  app.add_option("--seconds", settings.seconds, "Approximate time per row (default: 0.3), at least 7 samples")
      ->option_text("S")
      ->check(CLI::Range(0.0, 3600.0).description(""));
  app.add_option("--bind", settings.bind,
                 "auto: bind each rank to a core if there are enough, except Gloo's, which would be\n"
                 "slower; cores: also bind Gloo's; none")
      ->option_text("HOW")
      ->check(CLI::IsMember(std::vector<std::string>{"auto", "cores", "none"}).description(""));
  app.add_option("--json", request.json, "Write the rows to FILE")->option_text("FILE");
  app.add_option("--svg", request.svg, "Draw GB/s over bytes to FILE")->option_text("FILE");
  app.add_option("--from", request.from, "Do not measure: print and draw rows that --json wrote to FILE")
      ->option_text("FILE");
  app.add_option("--rank-of", request.rank_of)->group("");  // Internal.
  app.add_option("--page", request.page)->group("");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Compare the collectives of Lockstep with those of Gloo and Open MPI, and with copying, in turns.",
      "bench_collectives");
  app.footer(
      "Examples:\n"
      "  bench_collectives --json all.json --svg all.svg\n"
      "  bench_collectives --op all_reduce --ranks 2 --bytes 4KiB,25MiB\n");
  app.formatter(std::make_shared<Help>());
  app.set_help_flag("-h,--help", "Print this help");
  Request request;
  Settings settings;
  add_options(app, request, settings);
  CLI11_PARSE(app, argc, argv);
  try {
    if (!request.rank_of.empty()) {
      run_rank(request.rank_of, request.page);
      return 0;
    }
    settings.self = std::filesystem::read_symlink("/proc/self/exe");
    settings.lockstep = std::filesystem::path(settings.self).parent_path() / "lockstep";
    settings.openmpi = LOCKSTEP_COLLECTIVES_OPENMPI;
    settings.mpirun = LOCKSTEP_BENCH_MPIRUN;
    settings.cores = cores();
    const auto rows = request.from.empty() ? measure_all(request, settings) : read_json(request.from);
    if (!request.from.empty()) print_again(rows);
    std::cout << aims(rows, settings.cores);
    if (request.svg.empty()) return 0;
    const auto json = !request.json.empty()   ? request.json
                      : !request.from.empty() ? request.from
                                              : request.svg + ".json";
    if (request.json.empty() && request.from.empty()) write_json(json, rows);
    draw(json, request.svg);
  } catch (const std::exception& error) {
    std::cerr << "bench_collectives: " << error.what() << '\n';
    return 1;
  }
}
