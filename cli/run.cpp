#include <memory>

#include <lockstep/launch/supervisor.h>

#include "verbs.h"

namespace lockstep::cli {

void add_run(CLI::App& app, Action& action) {
  auto plan = std::make_shared<detail::LaunchPlan>();
  auto* run = app.add_subcommand("run", "Start a program as several ranks on this host");
  run->footer(
      "Example: lockstep run -n 4 ./train --lr 0.1\n"
      "Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its\n"
      "environment. When a rank fails the others are ended, and its status is this program's.");
  run->add_option("-n,--nproc", plan->num_ranks, "How many ranks")->required()->check(CLI::Range(1, 4096));
  run->add_option("--threads", plan->threads, "OMP_NUM_THREADS of each rank; cores / ranks by default")
      ->check(CLI::Range(1, 4096));
  run->add_option("command", plan->command, "The program and its arguments")->required();
  // What follows the program's name belongs to the program.
  run->prefix_command(false)->positionals_at_end(true);
  run->callback([&action, plan] { action = [plan] { return detail::supervise(*plan); }; });
}

}  // namespace lockstep::cli
