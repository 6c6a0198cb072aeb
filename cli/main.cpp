#include <algorithm>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include <lockstep/version.h>

#include "verbs.h"

int main(int argc, char** argv) {
  CLI::App app("Parallel and distributed training for LibTorch.", "lockstep");
  app.set_version_flag("--version", std::string("lockstep ") + lockstep::kVersion);
  app.require_subcommand(1);
  lockstep::cli::Action action;
  lockstep::cli::add_run(app, action);
  lockstep::cli::add_key(app, action);
  lockstep::cli::add_doctor(app, action);
  try {
    std::vector<std::string> arguments(argv + 1, argv + argc);
    lockstep::cli::drop_separator(arguments);
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
    app.parse(arguments);
    return action();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::cerr << "lockstep: " << error.what() << '\n';
    return 2;
  }
}
