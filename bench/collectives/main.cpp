// The collectives of Lockstep beside those of Gloo and Open MPI, and beside plain copying, in one run.
//
// Each peer has ranks of its own, started by `lockstep run` or mpirun and alive together. For each operation,
// size and number of ranks they take turns, some operations each, so that whatever else the machine does
// meets all of them. Who has no turn sleeps. Tensors are filled anew before each look at the clock, and
// results are checked after it. Gloo is called through LibTorch's ProcessGroupGloo and Open MPI through MPI,
// without Lockstep's Group, which would cost them some microseconds; shm is called through Group, as programs
// call it.
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
constexpr std::int64_t kAimElements = 6553600;  // of the aim that compares bfloat16 with float32

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
    cell.bytes = cell.op == Op::barrier ? 0 : (cell.bytes + unit - 1) / unit * unit;  // every rank has a part
    if (std::find(cells.begin(), cells.end(), cell) == cells.end()) cells.push_back(cell);
  };
  for (int op = 0; op < static_cast<int>(std::size(kOps)); ++op) {
    if (!wanted<std::string>(request.ops, kOps[op])) continue;
    for (const Type type : {Type::float32, Type::bfloat16}) {
      if (!wanted<std::string>(request.types, kTypes[static_cast<int>(type)])) continue;
      if (static_cast<Op>(op) == Op::barrier && type != Type::float32) continue;
      auto sizes = request.bytes.empty() ? kSizes : request.bytes;
      // Where nobody asked for bfloat16 it is measured for its aim alone.
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
      std::cerr << fmt::format("{} is left out: {}\n", peer.backend, why);
  }
  if (peers.empty()) throw std::runtime_error("nothing is left to measure");
  return peers;
}

std::vector<Row> measure_all(const Request& request, const Settings& settings) {
  const auto peers = peers_of(request, settings);
  auto counts = request.ranks;
  if (counts.empty()) counts = {2, 4, 8};
  if (request.ranks.empty() && settings.cores >= 16) counts.push_back(16);
  std::vector<Row> rows;
  if (double load = 0; ::getloadavg(&load, 1) == 1 && load > 0.5 * settings.cores)
    std::cerr << fmt::format(
        "others use this machine, too (a load of {:.1f} on {} cores): times are longer\n", load,
        settings.cores);
  std::cout << table_head() << std::flush;
  for (const int ranks : counts)
    measure(cells_of(request, ranks), peers, settings, [&](const std::vector<Row>& more) {
      rows.insert(rows.end(), more.begin(), more.end());
      std::cout << table_lines(more) << std::flush;
      if (!request.json.empty())
        write_json(request.json, rows);  // a run that is cut short leaves what it has
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

// 12.5MiB becomes 13107200; the answer is what is wrong.
std::string read_size(std::string& text) {
  const std::map<std::string, std::int64_t> units{
      {"", 1}, {"B", 1}, {"KiB", kKiB}, {"MiB", kMiB}, {"GiB", 1024 * kMiB}};
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const auto unit = units.find(end);
  if (end == text.c_str() || unit == units.end() || !(number > 0))
    return fmt::format("'{}' is not a size: 4, 64KiB, 12.5MiB are", text);
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
        ->group("What is measured; each takes a list: a,b,c");
  };
  list("--op", request.ops, "OPS", "all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, barrier")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kOps), std::end(kOps))).description(""));
  list("--backend", request.backends, "NAMES",
       "shm; gloo: LibTorch's, called directly; openmpi or mpi: Open MPI's own calls;\n"
       "memcpy: the floor, all ranks copy as many bytes. Only when named:\n"
       "lockstep-gloo, lockstep-mpi: through Lockstep's Group")
      ->transform(CLI::Transformer(std::map<std::string, std::string>{{"mpi", "openmpi"}}).description(""))
      ->check(CLI::IsMember(backends).description(""));
  list("--ranks", request.ranks, "COUNTS", "2,4,8 by default; 16 too where there are 16 cores")
      ->check(CLI::Range(2, kMaxRanks).description(""));
  list("--bytes", request.bytes, "SIZES",
       "Such as 4,4KiB,25MiB; by default ten sizes from 4 B to 100 MiB.\n"
       "One that the ranks cannot share equally is rounded up")
      ->transform(CLI::Validator(read_size, ""));
  list("--dtype", request.types, "TYPES",
       "float32 (float), bfloat16 (bf16); by default float32, and bfloat16 for an\n"
       "all_reduce of 12.5 MiB")
      ->transform(CLI::Transformer(type_names).description(""))
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kTypes), std::end(kTypes))).description(""));
  list("--memory", request.memories, "KINDS", "plain, allocated (by Group::allocate; shm alone has it)")
      ->check(CLI::IsMember(std::vector<std::string>{"plain", "allocated"}).description(""));
  app.add_option("--seconds", settings.seconds,
                 "How long to measure each row, about; 0.3 by default, at least 7 times")
      ->option_text("S")
      ->check(CLI::Range(0.0, 3600.0).description(""));
  app.add_option("--bind", settings.bind,
                 "auto: each rank to a core of its own where there are enough, but for Gloo's, which are\n"
                 "slower then; cores: Gloo's, too; none")
      ->option_text("HOW")
      ->check(CLI::IsMember(std::vector<std::string>{"auto", "cores", "none"}).description(""));
  app.add_option("--json", request.json, "Write the rows there")->option_text("FILE");
  app.add_option("--svg", request.svg, "Draw GB/s over bytes there")->option_text("FILE");
  app.add_option("--from", request.from, "Measure nothing: print, and draw, what --json wrote there")
      ->option_text("FILE");
  app.add_option("--rank-of", request.rank_of)->group("");  // for ourselves
  app.add_option("--page", request.page)->group("");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("The collectives of Lockstep beside those of Gloo and Open MPI, and beside copying, in turns.",
               "bench_collectives");
  app.footer(
      "Examples:\n"
      "  bench_collectives --json all.json --svg all.svg\n"
      "  bench_collectives --op all_reduce --ranks 2 --bytes 4KiB,25MiB\n");
  app.formatter(std::make_shared<Help>());
  app.set_help_flag("-h,--help", "This text");
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
