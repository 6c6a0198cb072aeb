#include <memory>

#include <lockstep/launch/supervisor.h>

#include "verbs.h"

namespace lockstep::cli {

void drop_separator(std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] != "run") return;
  for (std::size_t i = 1; i < arguments.size() && arguments[i].starts_with('-'); ++i) {
    if (arguments[i] == "--") {
      arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
    // Every option of run takes a value, but for --help.
    const bool apart = arguments[i] == "-n" ||
                       (arguments[i].starts_with("--") && arguments[i].find('=') == std::string::npos);
    if (apart && arguments[i] != "--help") ++i;
  }
}

void add_run(CLI::App& app, Action& action) {
  auto plan = std::make_shared<detail::LaunchPlan>();
  auto* run = app.add_subcommand(
      "run",
      "Start a program as several ranks on this host: lockstep run -n N [OPTIONS] PROGRAM [ARGUMENTS...]");
  run->footer(
      "Example: lockstep run -n 4 ./train --lr 0.1\n"
      "Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its\n"
      "environment. When a rank fails the others are ended, and its status is this program's.");
  run->add_option("-n,--nproc", plan->num_ranks, "How many ranks")->required()->check(CLI::Range(1, 4096));
  run->add_option("--threads", plan->threads, "OMP_NUM_THREADS of each rank; cores / ranks by default")
      ->check(CLI::Range(1, 4096));
  // From the program's name on everything belongs to the program.
  run->prefix_command();
  run->callback([&action, plan, run] {
    plan->command = run->remaining();
    if (plan->command.empty())
      throw CLI::ValidationError("lockstep run", "which program? Usage: lockstep run -n N PROGRAM");
    if (plan->command[0].starts_with('-'))
      throw CLI::ValidationError("lockstep run",
                                 "unknown option " + plan->command[0] + "; lockstep run --help lists them");
    action = [plan] { return detail::supervise(*plan); };
  });
}

}  // namespace lockstep::cli
