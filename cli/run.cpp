#include <memory>

#include <lockstep/launch/supervisor.h>

#include "verbs.h"

namespace lockstep::cli {

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
    if (!plan->command.empty() && plan->command[0] == "--") plan->command.erase(plan->command.begin());
    if (plan->command.empty())
      throw CLI::ValidationError("lockstep run", "which program? Usage: lockstep run -n N PROGRAM");
    if (plan->command[0].starts_with('-'))
      throw CLI::ValidationError("lockstep run",
                                 "unknown option " + plan->command[0] + "; lockstep run --help lists them");
    action = [plan] { return detail::supervise(*plan); };
  });
}

}  // namespace lockstep::cli
