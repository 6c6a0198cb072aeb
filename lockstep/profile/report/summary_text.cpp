#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/text.h>
#include <lockstep/os/host.h>
#include <lockstep/profile/report/summary.h>
#include <nlohmann/json.hpp>

namespace lockstep::profile {

namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostRows = 16;  // of ranks and of collectives, in the terminal

struct Named {
  const char* name;
  double Parts::*part;
};
constexpr Named kParts[] = {{"compute", &Parts::compute}, {"communication", &Parts::communication},
                            {"data", &Parts::data},       {"optimizer", &Parts::optimizer},
                            {"code", &Parts::code},       {"idle", &Parts::idle},
                            {"other", &Parts::other}};

std::string short_number(double value) {
  const char* units[] = {"", "k", "M", "G", "T", "P"};
  std::size_t unit = 0;
  while (std::abs(value) >= 1000 && unit + 1 < std::size(units)) value /= 1000, ++unit;
  return fmt::format("{:.3g} {}", value, units[unit]);
}

std::string row(const std::string& title, const RankSummary& rank) {
  std::string text = fmt::format("{:>8} {:9.2f} {:9.2f}", title, rank.step_median, rank.step_p90);
  for (const auto& [name, part] : kParts) text += fmt::format(" {:9.2f}", rank.parts.*part);
  return text + fmt::format(" {:9.2f} {:9.2f}", rank.transfer_ms, rank.waiting_ms);
}

Json json_of(const Parts& parts) {
  Json object;
  for (const auto& [name, part] : kParts) object[name] = parts.*part;
  return object;
}

Json json_of(const DeviceSummary& device) {
  auto top = Json::array();
  for (const auto& kernel : device.top)
    top.push_back({{"name", kernel.name}, {"count", kernel.count}, {"total_ms", kernel.total_ms}});
  return {{"busy_ms", device.busy_ms},       {"kernel_ms", device.kernel_ms},
          {"copy_ms", device.copy_ms},       {"communication_ms", device.communication_ms},
          {"exposed_ms", device.exposed_ms}, {"top_kernels", std::move(top)}};
}

Json json_of(const RankSummary& rank) {
  const double exposed = std::min(rank.parts.communication, rank.transfer_ms);
  Json object{{"step_ms", {{"median", rank.step_median}, {"p90", rank.step_p90}, {"mean", rank.step_mean}}},
              {"parts_ms", json_of(rank.parts)},
              {"communication",
               {{"total_ms", rank.transfer_ms},
                {"exposed_ms", rank.parts.communication},
                {"waiting_ms", rank.waiting_ms},
                {"overlap_percent", rank.transfer_ms > 0 ? 100 * (1 - exposed / rank.transfer_ms) : 0.0}}}};
  if (!rank.memory.empty()) object["memory_peak"] = rank.memory;
  if (rank.device) object["device"] = json_of(*rank.device);
  return object;
}

std::string row(const std::string& title, const RankSummary& rank, const DeviceSummary& device) {
  return fmt::format("{:>8} {:9.2f} {:9.0f} {:9.2f} {:9.2f} {:9.2f} {:9.2f}\n", title, device.busy_ms,
                     rank.step_mean > 0 ? 100 * device.busy_ms / rank.step_mean : 0.0, device.kernel_ms,
                     device.copy_ms, device.communication_ms, device.exposed_ms);
}

std::string device_text(const Summary& summary) {
  if (!summary.overall.device) return {};
  auto text = fmt::format("\n{:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}   ms per step on the device\n", "rank",
                          "busy", "% of step", "kernels", "copies", "nccl", "exposed");
  std::size_t rows = 0;
  for (const auto& rank : summary.each)
    if (rank.device && ++rows <= kMostRows) text += row(std::to_string(rank.rank), rank, *rank.device);
  if (rows > kMostRows) text += fmt::format("... and {} more ranks, in summary.json\n", rows - kMostRows);
  text += row("all", summary.overall, *summary.overall.device);
  text += fmt::format("\n{:>8} {:>12}   kernel\n", "times", "total ms");
  for (const auto& kernel : summary.overall.device->top) {
    constexpr std::size_t kMostLetters = 90;  // names of template instances may fill many lines
    text += fmt::format("{:8} {:12.3f}   {}{}\n", kernel.count, kernel.total_ms,
                        kernel.name.substr(0, kMostLetters), kernel.name.size() > kMostLetters ? "..." : "");
  }
  return text;
}

std::string memory_text(const Summary& summary) {
  std::map<std::string, std::int64_t> most;
  for (const auto& rank : summary.each)
    for (const auto& [kind, bytes] : rank.memory) most[kind] = std::max(most[kind], bytes);
  if (most.empty()) return {};
  std::vector<std::string> kinds;
  for (const auto& [kind, bytes] : most)
    if (kind != "total")
      kinds.push_back(fmt::format("{} {}", kind, host::bytes_text(static_cast<std::uint64_t>(bytes))));
  return fmt::format("peak tensor memory on a rank: {} ({})\n",
                     host::bytes_text(static_cast<std::uint64_t>(most["total"])), fmt::join(kinds, ", "));
}

std::string collectives_text(const Summary& summary) {
  if (summary.collectives.empty()) return {};
  const bool known = std::any_of(summary.collectives.begin(), summary.collectives.end(),
                                 [](const auto& each) { return each.doctor_gb_per_s > 0; });
  auto text = fmt::format("\n{:<16} {:<14} {:<22} {:>10} {:>7} {:>10} {:>8} {:>12}\n", "operation", "group",
                          "tag", "bytes", "times", "median ms", "GB/s", "exposed ms");
  if (known) text.insert(text.size() - 1, fmt::format(" {:>12}", "doctor GB/s"));
  for (std::size_t i = 0; i < std::min(kMostRows, summary.collectives.size()); ++i) {
    const auto& each = summary.collectives[i];
    text += fmt::format("{:<16} {:<14} {:<22} {:>10} {:7} {:10.3f} {:8.2f} {:12.3f}\n", name(each.operation),
                        each.group, each.tag, host::bytes_text(static_cast<std::uint64_t>(each.bytes)),
                        each.count, each.ms_median, each.gb_per_s, each.exposed_ms);
    if (each.doctor_gb_per_s > 0)
      text.insert(text.size() - 1, fmt::format(" {:12.2f}", each.doctor_gb_per_s));
  }
  if (summary.collectives.size() > kMostRows)
    text += fmt::format("... and {} more, in summary.json\n", summary.collectives.size() - kMostRows);
  return text;
}

}  // namespace

std::string text_of(const Summary& summary) {
  const auto& all = summary.overall;
  auto text = fmt::format("{}: {} on {}, steps {} to {}; milliseconds per step on the main thread\n\n",
                          summary.program, detail::counted(summary.ranks, "rank"),
                          fmt::join(summary.hosts, ", "), summary.first_step, summary.last_step);
  if (!summary.missing.empty())
    text += fmt::format("No profile from {}; the figures below cover the other ranks.\n\n",
                        detail::ranks_text(summary.missing));
  text += fmt::format("{:>8} {:>9} {:>9}", "rank", "median", "p90");
  for (const auto& [name, part] : kParts)
    text += fmt::format(" {:>9}", std::string_view(name) == "communication" ? "exposed" : name);
  text += fmt::format(" {:>9} {:>9}\n", "transfer", "waiting");
  for (std::size_t i = 0; i < std::min(kMostRows, summary.each.size()); ++i)
    text += row(std::to_string(summary.each[i].rank), summary.each[i]) + '\n';
  if (summary.each.size() > kMostRows)
    text += fmt::format("... and {} more ranks, in summary.json\n", summary.each.size() - kMostRows);
  text += row("all", all) + "\n\n";
  if (all.transfer_ms > 0)
    text += fmt::format(
        "communication: {:.2f} ms per step, {:.2f} exposed ({:.0f} % overlapped), including {:.2f} waiting "
        "for late ranks\n",
        all.transfer_ms, all.parts.communication, summary.overlap_percent, all.waiting_ms);
  if (summary.slowest_rank >= 0)
    text += fmt::format("slowest: rank {}, in {} of {} steps\n", summary.slowest_rank, summary.slowest_times,
                        summary.num_steps);
  if (summary.samples_per_s > 0) text += fmt::format("samples: {:.1f} /s\n", summary.samples_per_s);
  if (summary.tokens_per_s > 0) text += fmt::format("tokens: {:.1f} /s\n", summary.tokens_per_s);
  if (summary.flops_per_step > 0)
    text += fmt::format("computing: {}FLOP per step, {}FLOP/s{}\n", short_number(summary.flops_per_step),
                        short_number(summary.flops_per_step / all.step_mean * 1e3),
                        summary.mfu_percent > 0 ? fmt::format(", MFU {:.1f} %", summary.mfu_percent) : "");
  text += memory_text(summary) + collectives_text(summary) + device_text(summary);
  for (std::size_t i = 0; i < summary.hints.size(); ++i)
    text += fmt::format("{}{}. {}\n", i == 0 ? "\n" : "", i + 1, summary.hints[i]);
  return text;
}

Json json_of(const Summary& summary) {
  Json object{{"format", "lockstep.summary/1"},
              {"job",
               {{"program", summary.program},
                {"ranks", summary.ranks},
                {"hosts", summary.hosts},
                {"first_step", summary.first_step},
                {"last_step", summary.last_step}}},
              {"missing_ranks", summary.missing},
              {"hints", summary.hints}};
  auto overall = json_of(summary.overall);
  overall["steps"] = summary.num_steps;
  if (summary.slowest_rank >= 0)
    overall["slowest"] = {
        {"rank", summary.slowest_rank}, {"times", summary.slowest_times}, {"of", summary.num_steps}};
  overall["communication"]["overlap_percent"] = summary.overlap_percent;
  if (summary.samples_per_s > 0) overall["samples_per_s"] = summary.samples_per_s;
  if (summary.tokens_per_s > 0) overall["tokens_per_s"] = summary.tokens_per_s;
  if (summary.flops_per_step > 0) overall["flops_per_step"] = summary.flops_per_step;
  if (summary.mfu_percent > 0) overall["mfu_percent"] = summary.mfu_percent;
  object["overall"] = std::move(overall);
  auto& ranks = object["ranks"] = Json::array();
  for (const auto& rank : summary.each) {
    auto one = json_of(rank);
    one["rank"] = rank.rank;
    one["host"] = rank.host;
    one["slowest_times"] = rank.slowest_times;
    ranks.push_back(std::move(one));
  }
  auto& steps = object["steps"] = Json::array();
  for (const auto& step : summary.steps) {
    if (steps.empty() || steps.back()["step"] != step.step)
      steps.push_back({{"step", step.step}, {"ranks", Json::array()}});
    steps.back()["ranks"].push_back({{"rank", step.rank},
                                     {"begin_ms", step.begin_ms},
                                     {"ms", step.ms},
                                     {"parts_ms", json_of(step.parts)},
                                     {"transfer_ms", step.transfer_ms},
                                     {"waiting_ms", step.waiting_ms},
                                     {"late_ms", step.late_ms}});
  }
  auto& collectives = object["collectives"] = Json::array();
  for (const auto& each : summary.collectives)
    collectives.push_back({{"operation", name(each.operation)},
                           {"group", each.group},
                           {"tag", each.tag},
                           {"bytes", each.bytes},
                           {"count", each.count},
                           {"ms_median", each.ms_median},
                           {"gb_per_s", each.gb_per_s},
                           {"exposed_ms", each.exposed_ms}});
  for (std::size_t i = 0; i < summary.collectives.size(); ++i) {
    if (const double figure = summary.collectives[i].doctor_gb_per_s; figure > 0)
      collectives[i]["doctor_gb_per_s"] = figure;
    for (const auto& each : summary.collectives[i].arrivals)
      collectives[i]["arrivals"].push_back({{"rank", each.rank},
                                            {"mean_ms", each.mean_ms},
                                            {"most_ms", each.most_ms},
                                            {"last_times", each.last_times}});
  }
  return object;
}

}  // namespace lockstep::profile
