#include "report.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <stdexcept>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace lockstep::bench {
namespace {

constexpr std::int64_t kKiB = 1024, kMiB = 1024 * kKiB;

template <typename Rows>
const Row* find(const Rows& rows, const Cell& cell, const Peer& peer) {
  for (const Row& row : rows)
    if (row.cell == cell && row.peer.backend == peer.backend && row.peer.memory == peer.memory) return &row;
  return nullptr;
}

// Speed relative to that peer.
std::string times_as_fast(const Row& row, const Row* other) {
  return other == nullptr || other == &row ? "-" : fmt::format("{:.3g}x", other->us_median / row.us_median);
}

// An aim: shm with this memory, compared with another row. Either `at_least` times as fast, or `at_most` of
// its time.
struct Aim {
  Cell cell;
  std::string memory;
  Peer other;
  double at_least = 0, at_most = 0;
  Cell other_cell = cell;
};

std::vector<Aim> aims_on_two_cores() {
  const auto cell = [](int ranks, std::int64_t bytes, Type type = Type::float32) {
    return Cell{Op::all_reduce, type, ranks, bytes};
  };
  const Peer gloo{"gloo", "plain"}, openmpi{"openmpi", "plain"}, floor{"memcpy", "plain"};
  std::vector<Aim> all;
  const auto faster = [&](const Cell& of, const std::string& memory, double than_gloo, double than_openmpi) {
    all.push_back({of, memory, gloo, than_gloo});
    all.push_back({of, memory, openmpi, than_openmpi});
  };
  faster(cell(2, 25 * kMiB), "allocated", 10, 4);
  faster(cell(2, 25 * kMiB), "plain", 3.5, 1.5);
  for (const int ranks : {4, 8}) {
    faster(cell(ranks, 25 * kMiB), "allocated", 10, 5);
    faster(cell(ranks, 25 * kMiB), "plain", 2.5, 1.5);
  }
  faster(cell(2, 4 * kKiB), "plain", 300, 1);
  faster(cell(8, 4 * kKiB), "plain", 300, 2);
  for (const int ranks : {2, 4, 8}) all.push_back({cell(ranks, 100 * kMiB), "allocated", floor, 0, 1.25});
  for (const int ranks : {2, 4, 8})
    for (const char* memory : {"plain", "allocated"})
      all.push_back({cell(ranks, 6553600 * 2, Type::bfloat16),
                     memory,
                     {"shm", memory},
                     0,
                     0.6,
                     cell(ranks, 6553600 * 4)});
  return all;
}

std::string show(const Cell& cell, const std::string& memory) {
  return fmt::format("{} {}, {}, {} ranks, {}", kOps[static_cast<int>(cell.op)],
                     kTypes[static_cast<int>(cell.type)], show_bytes(cell.bytes), cell.ranks, memory);
}

std::string verdict(bool reached) { return reached ? "reached" : "MISSED"; }

// With 16 cores: faster than gloo and Open MPI in every row, and a minimum of GB/s.
std::string aims_on_sixteen_cores(const std::vector<Row>& rows) {
  std::string text;
  int compared = 0, behind = 0;
  for (const Row& row : rows) {
    if (row.peer.backend != "shm") continue;
    for (const char* backend : {"gloo", "openmpi"}) {
      const Row* other = find(rows, row.cell, {backend, "plain"});
      if (other == nullptr) continue;
      ++compared;
      if (other->us_median >= row.us_median) continue;
      ++behind;
      text += fmt::format("{:58} behind {} ({:.3g}x)\n", show(row.cell, row.peer.memory), backend,
                          other->us_median / row.us_median);
    }
  }
  if (compared > 0)
    text += fmt::format("{:58} {} of {} rows   {}\n", "ahead of gloo and Open MPI everywhere",
                        compared - behind, compared, verdict(behind == 0));
  const std::map<int, double> least{{2, 18}, {4, 14}, {8, 6}, {16, 4}};
  for (const auto& [ranks, speed] : least) {
    const Cell cell{Op::all_reduce, Type::float32, ranks, 25 * kMiB};
    const Row* row = find(rows, cell, {"shm", "allocated"});
    const Row* floor = find(rows, cell, {"memcpy", "plain"});
    if (row == nullptr || floor == nullptr) continue;
    const double part = row->us_median / floor->us_median;
    text += fmt::format("{:58} {:g} GB/s or 0.75 of memcpy's time: {:.1f} GB/s, {:.2f}   {}\n",
                        show(cell, "allocated"), speed, row->gigabytes_per_second(), part,
                        verdict(row->gigabytes_per_second() >= speed || part <= 0.75));
  }
  return text;
}

template <std::size_t N>
int place_of(const char* const (&names)[N], const std::string& name) {
  const auto found = std::find(std::begin(names), std::end(names), name);
  if (found == std::end(names)) throw std::runtime_error("unknown name '" + name + "'");
  return static_cast<int>(found - std::begin(names));
}

}  // namespace

std::string show_bytes(std::int64_t bytes) {
  if (bytes >= kMiB && bytes % (kMiB / 10) == 0)
    return fmt::format("{:g} MiB", static_cast<double>(bytes) / kMiB);
  if (bytes >= kMiB) return fmt::format("{:.4g} MiB", static_cast<double>(bytes) / kMiB);
  if (bytes >= kKiB) return fmt::format("{:.4g} KiB", static_cast<double>(bytes) / kKiB);
  return fmt::format("{} B", bytes);
}

std::string table_head() {
  return fmt::format(
      "Times are microseconds per operation, until the last rank has its result. x gloo: speed relative to "
      "gloo.\n"
      "/ memcpy: time relative to that in which all ranks copy as many bytes.\n\n"
      "{:14} {:8} {:>5} {:>9}  {:13} {:9} {:>10} {:>10} {:>10} {:>8} {:>9} {:>9} {:>8}\n",
      "op", "dtype", "ranks", "bytes", "backend", "memory", "median", "p10", "p90", "GB/s", "x gloo",
      "x openmpi", "/ memcpy");
}

std::string table_lines(const std::vector<Row>& cell) {
  std::string text;
  for (const Row& row : cell) {
    const auto peer = [&](const char* backend) { return find(cell, row.cell, {backend, "plain"}); };
    const Row* floor = peer("memcpy");
    text += fmt::format(
        "{:14} {:8} {:5} {:>9}  {:13} {:9} {:10.2f} {:10.2f} {:10.2f} {:>8} {:>9} {:>9} {:>8}\n",
        kOps[static_cast<int>(row.cell.op)], kTypes[static_cast<int>(row.cell.type)], row.cell.ranks,
        show_bytes(row.cell.bytes), row.peer.backend, row.peer.memory, row.us_median, row.us_p10, row.us_p90,
        row.cell.bytes == 0 ? "-" : fmt::format("{:.3g}", row.gigabytes_per_second()),
        times_as_fast(row, peer("gloo")), times_as_fast(row, peer("openmpi")),
        floor == nullptr || floor == &row ? "-" : fmt::format("{:.3g}", row.us_median / floor->us_median));
  }
  return text;
}

std::string aims(const std::vector<Row>& rows, int cores) {
  std::string text;
  int unmeasured = 0;
  for (const Aim& aim : aims_on_two_cores()) {
    const Row* ours = find(rows, aim.cell, {"shm", aim.memory});
    const Row* other = find(rows, aim.other_cell, aim.other);
    if (ours == nullptr || other == nullptr) {
      ++unmeasured;
      continue;
    }
    const bool same = aim.other.backend == "shm";
    const double faster = other->us_median / ours->us_median, part = 1 / faster;
    const bool reached = aim.at_least > 0 ? faster >= aim.at_least : part <= aim.at_most;
    text += fmt::format("{:58} ", show(aim.cell, aim.memory));
    text += aim.at_least > 0 ? fmt::format("{:>5g}x {:22} {:>8}", aim.at_least, aim.other.backend,
                                           fmt::format("{:.3g}x", faster))
                             : fmt::format("{:>5g} of {:19} {:>8}", aim.at_most,
                                           same ? "float32's time" : aim.other.backend + "'s time",
                                           fmt::format("{:.3g}", part));
    text += fmt::format("   {}\n", verdict(reached));
  }
  if (cores >= 16) text += aims_on_sixteen_cores(rows);
  if (unmeasured > 0)
    text += fmt::format("{} aims were not measured: their rows are not in this run\n", unmeasured);
  return fmt::format("\nAims, on {} cores (those for 4 and 8 ranks assume 2 cores)\n{}", cores, text);
}

void write_json(const std::string& path, const std::vector<Row>& rows) {
  const auto round = [](double value) { return std::round(value * 1e6) / 1e6; };
  auto list = nlohmann::ordered_json::array();
  for (const Row& row : rows)
    list.push_back({{"op", kOps[static_cast<int>(row.cell.op)]},
                    {"backend", row.peer.backend},
                    {"memory", row.peer.memory},
                    {"dtype", kTypes[static_cast<int>(row.cell.type)]},
                    {"ranks", row.cell.ranks},
                    {"bytes", row.cell.bytes},
                    {"us_median", round(row.us_median)},
                    {"us_p10", round(row.us_p10)},
                    {"us_p90", round(row.us_p90)},
                    {"GBps", round(row.gigabytes_per_second())}});
  std::ofstream out(path);
  out << "[";
  for (std::size_t i = 0; i < list.size(); ++i) out << (i == 0 ? "\n" : ",\n") << list[i].dump();
  out << "\n]\n";
  if (!out.flush()) throw std::runtime_error("cannot write " + path);
}

std::vector<Row> read_json(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw std::runtime_error("cannot read " + path);
  std::vector<Row> rows;
  for (const auto& each : nlohmann::json::parse(in)) {
    Row row;
    row.cell = {static_cast<Op>(place_of(kOps, each.at("op"))),
                static_cast<Type>(place_of(kTypes, each.at("dtype"))), each.at("ranks"), each.at("bytes")};
    row.peer = {each.at("backend"), each.at("memory")};
    row.us_median = each.at("us_median");
    row.us_p10 = each.at("us_p10");
    row.us_p90 = each.at("us_p90");
    rows.push_back(row);
  }
  return rows;
}

}  // namespace lockstep::bench
