#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/schedule/schedule.h>
#include <nlohmann/json.hpp>

#include "schedule_drawing.h"
#include "verbs.h"

namespace lockstep::cli {
namespace {

using Json = nlohmann::ordered_json;

struct SchedulePlan {
  std::string name, file, svg;
  ScheduleOptions options{.ranks = 4, .microbatches = 8};
  std::vector<double> times;
  bool transfers = false, csv = false, json = false;
};

PipelineSchedule schedule_of(const SchedulePlan& plan) {
  if (plan.file.empty()) return make_schedule(plan.name, plan.options);
  std::ostringstream text;
  if (std::ifstream in(plan.file, std::ios::binary);
      std::filesystem::is_directory(plan.file) || !in || !(text << in.rdbuf()))
    throw ConfigError(fmt::format("cannot read '{}', or it is empty", plan.file));
  return schedule_from_csv(text.str(), plan.file);
}

Json json_of(const PipelineSchedule& schedule, const SimulatedSchedule& run) {
  Json actions = Json::array();
  for (const auto& rank : schedule.ranks) {
    auto& row = actions.emplace_back(Json::array());
    for (const auto& action : rank) row.push_back(to_string(action));
  }
  return {{"name", schedule.name},
          {"ranks", schedule.num_ranks()},
          {"microbatches", schedule.microbatches},
          {"rank_of_stage", schedule.rank_of_stage},
          {"actions", actions},
          {"makespan", run.makespan},
          {"bubble", run.bubble},
          {"bubble_inside", run.bubble_inside},
          {"peak_activations", run.stage_peaks},
          {"peak_activations_of_ranks", run.peak_activations}};
}

int show(const SchedulePlan& plan) {
  auto schedule = schedule_of(plan);
  if (plan.transfers) schedule = with_transfers(schedule);
  check_schedule(schedule);
  ActionTimes times;
  double* const given[] = {&times.forward, &times.input_backward, &times.weight_backward, &times.transfer};
  for (std::size_t i = 0; i < plan.times.size(); ++i) *given[i] = plan.times[i];
  const auto run = simulate_schedule(schedule, times);
  if (run.makespan == 0) throw ConfigError("--times: expected at least one time above 0");
  const auto title = fmt::format("{}: {} ranks, {} stages, {} micro-batches; bubble {:.4f}, inside {:.4f}",
                                 schedule.name, schedule.num_ranks(), schedule.num_stages(),
                                 schedule.microbatches, run.bubble, run.bubble_inside);
  if (!plan.svg.empty()) {
    std::ofstream out(plan.svg, std::ios::binary);
    out << drawn_as_svg(schedule, run, title);
    if (!out.flush()) throw ConfigError(fmt::format("cannot write '{}'", plan.svg));
  }
  if (plan.json) {
    std::cout << json_of(schedule, run).dump(1) << '\n';
  } else if (plan.csv) {
    std::cout << to_csv(schedule);
  } else {
    const bool colors = ::isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
    std::cout << title
              << fmt::format("\npeak activations of ranks: {}\n\n", fmt::join(run.peak_activations, " "))
              << drawn_as_text(schedule, run, colors);
  }
  return 0;
}

}  // namespace

void add_schedule(CLI::App& app, Action& action) {
  auto plan = std::make_shared<SchedulePlan>();
  auto* schedule = app.add_subcommand(
      "schedule", "Draw and check pipeline schedules: lockstep schedule show 1f1b -p 4 -m 8");
  schedule->require_subcommand(1);
  auto* shown =
      schedule->add_subcommand("show", "Check a schedule, simulate it and draw each rank's timeline");
  shown->footer(
      "Example: lockstep schedule show zbv -p 4 -m 8 --svg zbv.svg\n"
      "0F3 is stage 0, forward, micro-batch 3; B is backward, I its input part, W its weight part. The\n"
      "bubble is the fraction of all ranks' time that is idle. `inside` counts only idle time between a\n"
      "rank's first and last action, for the rank that idles most.");
  auto* name =
      shown->add_option("name", plan->name, fmt::format("One of {}", fmt::join(schedule_names(), ", ")))
          ->option_text("NAME");
  auto* file =
      shown
          ->add_option("--file", plan->file,
                       "Read the schedule from FILE: a line per rank, 0F0,0F1,... as PyTorch writes it")
          ->option_text("FILE")
          ->excludes(name);
  shown->add_option("-p,--ranks", plan->options.ranks, "Number of ranks (default: 4)")
      ->option_text("P")
      ->check(CLI::Range(1, 4096))
      ->excludes(file);
  shown->add_option("-m,--microbatches", plan->options.microbatches, "Number of micro-batches (default: 8)")
      ->option_text("M")
      ->check(CLI::Range(1, 65536))
      ->excludes(file);
  shown
      ->add_option("--stages-per-rank", plan->options.stages_per_rank,
                   "Number of stages per rank, for interleaved1f1b and loopedbfs (default: 2)")
      ->option_text("V")
      ->check(CLI::Range(1, 64))
      ->excludes(file);
  shown
      ->add_option(
          "--times", plan->times,
          "Times of forward, of backward's input and weight parts, and of a transfer (default: 1,1,1,0)")
      ->option_text("F[,I[,W[,T]]]")
      ->delimiter(',')
      ->expected(1, 4)
      ->check(CLI::NonNegativeNumber);
  shown->add_flag("--transfers", plan->transfers, "Include sends and receives");
  auto* csv = shown->add_flag("--csv", plan->csv, "Print the schedule in the format that --file reads");
  shown->add_flag("--json", plan->json, "Print actions, bubble and the stages' peak activations as JSON")
      ->excludes(csv);
  shown->add_option("--svg", plan->svg, "Write a drawing of the schedule to FILE")->option_text("FILE");
  shown->callback([&action, plan] {
    if (plan->name.empty() && plan->file.empty())
      throw ConfigError(fmt::format("missing schedule: expected one of {}, or --file FILE",
                                    fmt::join(schedule_names(), ", ")));
    action = [plan] { return show(*plan); };
  });
}

}  // namespace lockstep::cli
