// lockstep trace: explains a job's flight record and profile.
#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/text.h>
#include <lockstep/launch/flight/flight_file.h>
#include <lockstep/launch/flight/flight_verdict.h>

#include "verbs.h"

namespace lockstep::cli {
namespace {

using control::FlightEntry;
using control::FlightRecord;

constexpr std::uintmax_t kMostBytes = std::uintmax_t{1} << 30;

std::string read_whole(const std::string& file) {
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  if (!std::filesystem::exists(status))
    throw ConfigError(fmt::format("cannot read '{}': no such file", file));
  if (std::filesystem::is_directory(status))
    throw ConfigError(fmt::format("cannot read '{}': it is a directory", file));
  const auto too_large = [&] {
    return ConfigError(fmt::format("'{}' is too large for a flight record: expected at most 1 GiB", file));
  };
  if (std::filesystem::is_regular_file(status) && std::filesystem::file_size(file, error) > kMostBytes)
    throw too_large();
  std::ifstream in(file, std::ios::binary);
  std::string text;
  std::vector<char> piece(1 << 16);
  while (in && text.size() <= kMostBytes) {  // A pipe or device has no size and may never end.
    in.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    text.append(piece.data(), static_cast<std::size_t>(in.gcount()));
  }
  if (text.size() > kMostBytes) throw too_large();
  if (!in.eof()) throw ConfigError(fmt::format("cannot read '{}'", file));
  if (text.empty())
    throw ConfigError(fmt::format("'{}' is empty; expected a flight record of lockstep run", file));
  return text;
}

struct FlightPlan {
  std::string file;
  std::optional<int> rank;
  int last = 5;
};

std::string time_of_day(std::int64_t ns) {
  const auto seconds = static_cast<std::time_t>(ns / 1'000'000'000);
  std::tm local{};
  if (::localtime_r(&seconds, &local) == nullptr) return "-";
  return fmt::format("{:%H:%M:%S}.{:06}", local, ns % 1'000'000'000 / 1000);
}

std::string took(const FlightEntry& entry) {
  if (entry.ended_ns == 0) return "unfinished";
  const auto time = detail::duration_text(entry.ended_ns - entry.began_ns);
  return entry.failed ? "failed, " + time : time;
}

void show(const FlightRecord& record, int rank, int last) {
  const auto& flight = record.ranks.at(rank);
  std::string line = fmt::format("rank {} (pid {})", rank, flight.pid);
  if (flight.ended) line += " " + flight.ended->text();
  line += ", " + detail::counted(flight.log.begun, "operation");
  std::cout << '\n' << line << '\n';
  if (!flight.error.empty()) std::cout << "  error: " << flight.error << '\n';
  const auto& entries = flight.log.entries;
  const auto shown = std::min(entries.size(), static_cast<std::size_t>(last));
  if (shown == 0) return;
  std::vector<std::vector<std::string>> rows = {
      {"began", "took", "step", "operation", "group", "what", "where"}};
  for (auto entry = entries.end() - static_cast<std::ptrdiff_t>(shown); entry != entries.end(); ++entry)
    rows.push_back({time_of_day(entry->began_ns), took(*entry),
                    entry->step < 0 ? "-" : std::to_string(entry->step),
                    fmt::format("{} #{}", entry->operation, entry->sequence),
                    detail::group_name(record, entry->key), detail::details(record, *entry), entry->site});
  std::vector<std::size_t> widths(rows[0].size());
  for (const auto& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  for (const auto& row : rows) {
    std::string text = " ";
    for (std::size_t i = 0; i < row.size(); ++i)
      text += i == 1 ? fmt::format(" {:>{}}", row[i], widths[i]) : fmt::format(" {:{}}", row[i], widths[i]);
    text.erase(text.find_last_not_of(' ') + 1);
    std::cout << text << '\n';
  }
}

int explain(const FlightPlan& plan) {
  const auto record = detail::parse_flight(read_whole(plan.file), plan.file);
  if (plan.rank && !record.ranks.contains(*plan.rank)) {
    std::string known;
    for (const auto& [rank, flight] : record.ranks)
      known += (known.empty() ? "" : ", ") + std::to_string(rank);
    throw detail::bad_value(
        "--rank", fmt::format("one of the ranks in '{}': {}", plan.file, known.empty() ? "none" : known),
        std::to_string(*plan.rank));
  }
  std::cout << detail::judge(record).text << '\n';
  if (record.failure) std::cout << "the job's failure: " << record.failure->text() << '\n';
  if (static_cast<int>(record.ranks.size()) < record.world_size)
    std::cout << fmt::format("{1} of {0} ranks have a record; the hosts of the others were lost\n",
                             record.world_size, record.ranks.size());
  for (const auto& [rank, flight] : record.ranks)
    if (!plan.rank || plan.rank == rank) show(record, rank, plan.last);
  return 0;
}

void add_flight(CLI::App& trace, Action& action) {
  auto plan = std::make_shared<FlightPlan>();
  auto* flight = trace.add_subcommand(
      "flight", "Explain a flight record: which rank diverged first, and each rank's last operations");
  flight->footer(
      "Example: lockstep run -n 4 --flight-record flight.json ./train || lockstep trace flight flight.json\n"
      "Times are this host's local time.");
  flight->add_option("file", plan->file, "File saved by `lockstep run` after a failure")
      ->option_text("FILE")
      ->required();
  flight->add_option("--rank", plan->rank, "Show only this rank's operations")
      ->option_text("R")
      ->check(CLI::NonNegativeNumber);
  flight->add_option("--last", plan->last, "Number of operations shown per rank (default: 5)")
      ->option_text("N")
      ->check(CLI::Range(0, control::FlightRing::kKept));
  flight->callback([&action, plan] { action = [plan] { return explain(*plan); }; });
}

}  // namespace

void add_trace(CLI::App& app, Action& action) {
  auto* trace = app.add_subcommand("trace", "Explain what a job recorded: its profile or its flight record");
  trace->require_subcommand(1);
  add_flight(*trace, action);
  add_trace_profile(*trace, action);
}

}  // namespace lockstep::cli
