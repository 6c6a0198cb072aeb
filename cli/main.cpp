#include <algorithm>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/version.h>

#include "verbs.h"

namespace {

void check_verb(const CLI::App& app, const std::vector<std::string>& arguments) {
  if (!arguments.empty() && arguments[0].starts_with('-')) return;
  std::string verbs;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!arguments.empty() && verb->get_name() == arguments[0]) return;
    verbs += fmt::format("\n  {:10} {}", verb->get_name(), verb->get_description());
  }
  throw lockstep::ConfigError(fmt::format(
      "{}; the verbs are:{}\nRun `lockstep VERB --help` for details",
      arguments.empty() ? "missing verb" : fmt::format("unknown verb '{}'", arguments[0]), verbs));
}

int with_output_written(int status) {
  if (std::cout.flush()) return status;
  std::cerr << "lockstep: cannot write to standard output\n";
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Parallel and distributed training for LibTorch.", "lockstep");
  app.set_version_flag("--version", std::string("lockstep ") + lockstep::kVersion);
  app.require_subcommand(1);
  lockstep::cli::Action action;
  lockstep::cli::add_run(app, action);
  lockstep::cli::add_key(app, action);
  lockstep::cli::add_doctor(app, action);
  lockstep::cli::add_schedule(app, action);
  lockstep::cli::add_trace(app, action);
  try {
    std::vector<std::string> arguments(argv + 1, argv + argc);
    check_verb(app, arguments);
    lockstep::cli::tidy_run(app, arguments);
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them in reverse.
    app.parse(arguments);
    return with_output_written(action());
  } catch (const CLI::ParseError& error) {
    return with_output_written(app.exit(error) == 0 ? 0 : 2);
  } catch (const std::exception& error) {
    std::cerr << "lockstep: " << error.what() << '\n';
    return 2;
  }
}
