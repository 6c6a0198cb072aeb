// Derives advice from a summary: at most three hints, each with its measurement.
#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <lockstep/os/host.h>
#include <lockstep/profile/report/summary.h>

namespace lockstep::profile {

namespace {

constexpr double kWorthwhile = 0.05;  // fraction of a step

std::string of_a_step(double ms, const Summary& summary) {
  return fmt::format("{:.3g} ms of each {:.3g} ms step", ms, summary.overall.step_mean);
}

std::string about_data(const Summary& summary, double ms) {
  const auto most =
      std::max_element(summary.each.begin(), summary.each.end(),
                       [](const auto& a, const auto& b) { return a.parts.data < b.parts.data; });
  return fmt::format(
      "{} are spent waiting for data, most on rank {} ({:.3g} ms): use more loader workers (num_workers), a "
      "longer queue (prefetch_factor), or cheaper samples",
      of_a_step(ms, summary), most->rank, most->parts.data);
}

std::string about_slowest(const Summary& summary, double ms) {
  const auto rank = std::find_if(summary.each.begin(), summary.each.end(),
                                 [&](const auto& each) { return each.rank == summary.slowest_rank; });
  const auto& parts = rank->parts;
  Parts others;
  for (const auto& each : summary.each)
    if (each.rank != rank->rank) others += each.parts;
  others = others / std::max(1.0, static_cast<double>(summary.each.size() - 1));
  const std::pair<double, const char*> more[] = {{parts.compute - others.compute, "operators"},
                                                 {parts.data - others.data, "waiting for data"},
                                                 {parts.optimizer - others.optimizer, "the optimizer"},
                                                 {parts.code - others.code, "the program's own code"},
                                                 {parts.idle - others.idle, "sleeping"}};
  const auto most = std::max_element(std::begin(more), std::end(more));
  return fmt::format(
      "{} are spent waiting for late ranks; rank {} on {} was the slowest in {} of {} steps: it spent {:.3g} "
      "ms more on {} than the other ranks",
      of_a_step(ms, summary), rank->rank, rank->host, summary.slowest_times, summary.num_steps, most->first,
      most->second);
}

std::string about_communication(const Summary& summary, double ms) {
  auto text =
      fmt::format("{} are exposed communication, besides waiting for late ranks", of_a_step(ms, summary));
  if (summary.collectives.empty()) return text;
  const auto& most = summary.collectives.front();
  text += fmt::format("; most of it, {:.3g} ms, is {}{} of {} at {:.3g} GB/s", most.exposed_ms,
                      name(most.operation), most.tag.empty() ? "" : fmt::format(" ({})", most.tag),
                      host::bytes_text(static_cast<std::uint64_t>(most.bytes)), most.gb_per_s);
  if (detail::point_to_point(most.operation))
    return text +
           ": another stage or rank is slower or starts later; in a pipeline, use more micro-batches, or "
           "balance the stages by measured time (PipelineBalance::time)";
  return text + (most.tag.starts_with("ddp bucket")
                     ? ": accumulate gradients (no_sync), send bfloat16 (bf16_compress_hook), or increase "
                       "the batch size per rank"
                     : ": start it earlier, wait for it later, or communicate less often");
}

// If the host runs ahead of the device, it waits for it in the driver. That is harmless.
bool device_is_busy(const Summary& summary) {
  const auto& all = summary.overall;
  return all.device && all.device->busy_ms > 0.8 * all.step_mean;
}

std::string about_device(const Summary& summary, double ms) {
  return fmt::format(
      "the device is idle for {}, because the host launches work too slowly: capture the step with "
      "StepGraph, or use larger batches",
      of_a_step(ms, summary));
}

}  // namespace

std::vector<std::string> hints_for(const Summary& summary) {
  const auto& parts = summary.overall.parts;
  const double step = summary.overall.step_mean;
  std::vector<std::pair<double, std::string>> found;
  const auto consider = [&](double ms, auto text) {
    if (step > 0 && ms > kWorthwhile * step) found.emplace_back(ms, text(summary, ms));
  };
  consider(parts.data, about_data);
  if (summary.slowest_rank >= 0 && 2 * summary.slowest_times > summary.num_steps)
    consider(summary.overall.waiting_ms, about_slowest);
  consider(parts.communication - summary.overall.waiting_ms, about_communication);
  const bool busy = device_is_busy(summary);
  if (!busy)
    consider(parts.idle, [](const Summary& s, double ms) {
      return fmt::format(
          "the main thread sleeps for {} outside operators, waiting for a lock, a file or a timer",
          of_a_step(ms, s));
    });
  if (!busy && summary.overall.device) consider(step - summary.overall.device->busy_ms, about_device);
  if (summary.ranks > 1 && parts.optimizer > 0.15 * step)
    consider(parts.optimizer, [](const Summary& s, double ms) {
      return fmt::format(
          "{} are spent in the optimizer, which every rank repeats: DistributedOptimizer divides the work "
          "between the ranks",
          of_a_step(ms, s));
    });
  if (!busy && parts.code > 0.15 * step)
    consider(parts.code, [](const Summary& s, double ms) {
      return fmt::format("{} are the program's own code between operators: larger batches reduce its share",
                         of_a_step(ms, s));
    });
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::string> hints;
  for (auto& [ms, text] : found)
    if (hints.size() < 3) hints.push_back(std::move(text));
  return hints;
}

}  // namespace lockstep::profile
