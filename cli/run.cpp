#include <algorithm>
#include <charconv>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/control/link/key.h>
#include <lockstep/launch/launcher.h>
#include <lockstep/launch/network.h>
#include <lockstep/launch/rank_process.h>
#include <lockstep/metrics/metric_log.h>
#include <lockstep/os/host.h>
#include <lockstep/profile/record/rank_profile.h>

#include "verbs.h"

namespace lockstep::cli {
namespace {

constexpr int kMostRanks = 4096, kMostNodes = 65536;

struct Request {
  detail::LaunchOptions options;
  std::string master, master_address, master_port, key_file;
  std::optional<int> node;
  std::string profile, profile_directory = "profile";  // which steps; none where it is empty
};

ConfigError not_allowed(const std::string& option, const std::string& value, const std::string& allowed) {
  return ConfigError(fmt::format("{}='{}' is not allowed: {} is", option, value, allowed));
}

std::optional<int> whole(const std::string& text, int lowest, int highest) {
  int value = 0;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end || value < lowest || value > highest) return std::nullopt;
  return value;
}

int whole_or_throw(const std::string& option, const std::string& text, int lowest, int highest) {
  if (const auto value = whole(text, lowest, highest)) return *value;
  throw not_allowed(option, text, fmt::format("a whole number from {} to {}", lowest, highest));
}

template <typename T>
T one_of(const std::string& option, const std::string& text,
         const std::vector<std::pair<const char*, T>>& choices) {
  std::string names;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    const auto& [name, value] = choices[i];
    if (text == name) return value;
    names += i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ";
    names += name;
  }
  throw not_allowed(option, text, names);
}

int ranks_here(const std::string& text) {
  if (text == "auto") {
    const int gpus = host::gpu_count();
    return gpus > 0 ? gpus : host::available_cores();
  }
  if (const auto value = whole(text, 1, kMostRanks)) return *value;
  throw not_allowed("-n", text, fmt::format("a whole number from 1 to {}, or auto,", kMostRanks));
}

void check_variable(const std::string& option, const std::string& text, const std::string& name) {
  if (name.empty())
    throw not_allowed(option, text, option == "--env" ? "NAME=VALUE" : "the name of a variable");
  if (detail::is_launchers_variable(name))
    throw ConfigError(fmt::format("{}='{}' is not allowed: {} is set by lockstep run{}", option, text, name,
                                  name == "OMP_NUM_THREADS" ? "; --threads says to what" : ""));
}

// A rank that is named must be there. On several hosts only the head knows how many there are.
void check_rank(const detail::LaunchOptions& options, const std::string& option, int rank) {
  if (options.num_nodes == 1 && rank >= options.num_ranks)
    throw ConfigError(fmt::format("{} names rank {}, and there are only ranks 0 to {}", option, rank,
                                  options.num_ranks - 1));
}

void resolve_hosts(Request& request) {
  auto& options = request.options;
  const bool apart = !request.master_address.empty() || !request.master_port.empty();
  if (apart && !request.master.empty())
    throw ConfigError("--master and --master-addr, --master-port say the same thing: give one of them");
  if (apart && (request.master_address.empty() || request.master_port.empty()))
    throw ConfigError("--master-addr and --master-port belong together: --master HOST:PORT is both");
  if (options.num_nodes == 1) {
    if (request.node.value_or(0) != 0)
      throw ConfigError(
          fmt::format("--node-rank={} is not allowed: with one host (--nnodes 1) 0 is", *request.node));
    // An address that is given is not needed, but whoever gives it means one.
    if (apart) whole_or_throw("--master-port", request.master_port, 1, 65535);
    if (!request.master.empty()) detail::parse_endpoint("--master", request.master);
    return;
  }
  if (!request.node)
    throw ConfigError(
        fmt::format("--nnodes {} needs --node-rank: which of the hosts this one is, from 0 to {}",
                    options.num_nodes, options.num_nodes - 1));
  if (*request.node >= options.num_nodes)
    throw ConfigError(fmt::format("--node-rank={} is not allowed: with --nnodes {} it is from 0 to {}",
                                  *request.node, options.num_nodes, options.num_nodes - 1));
  options.node = *request.node;
  if (request.master.empty() && !apart)
    throw ConfigError(
        fmt::format("--nnodes {} needs --master HOST:PORT: an address of the host with --node-rank 0, and a "
                    "free port of it",
                    options.num_nodes));
  if (apart) {
    options.master_address = request.master_address;
    options.master_port = whole_or_throw("--master-port", request.master_port, 1, 65535);
  } else {
    std::tie(options.master_address, options.master_port) =
        detail::parse_endpoint("--master", request.master);
  }
  const auto key = control::job_key(request.key_file);
  if (!key)
    throw ConfigError(
        "several hosts need a key that all of them have, so that no stranger can join:\n"
        "  lockstep key --output job.key    once; then copy it to every host, for you alone (0600)\n"
        "  --key-file job.key               on every host");
  options.key = *key;
  // Jobs that were given the same key by SLURM's users differ in this.
  options.job = fmt::format("run {} {}.{}", options.num_nodes, env::text("SLURM_JOB_ID").value_or("-"),
                            env::text("SLURM_STEP_ID").value_or("-"));
}

void check(Request& request) {
  auto& options = request.options;
  resolve_hosts(request);
  if (options.stdin_rank) check_rank(options, "--stdin", *options.stdin_rank);
  check_rank(options, "--show", options.show.highest());
  std::error_code error;
  if (!options.directory.empty() && !std::filesystem::is_directory(options.directory, error))
    throw ConfigError(fmt::format("--chdir='{}' is not allowed: {}", options.directory,
                                  error && error != std::errc::no_such_file_or_directory
                                      ? error.message()
                                      : "there is no such folder"));
  for (const auto& [name, value] : options.set_environment)
    if (const auto& unset = options.unset_environment;
        std::find(unset.begin(), unset.end(), name) != unset.end())
      throw ConfigError(fmt::format("--env and --unset-env both name {}: give one of them", name));
  const bool named = !options.flight_record.empty();
  if (!named) options.flight_record = env::text("LOCKSTEP_FLIGHT_RECORD").value_or("");
  // After the failure it would be too late to say so.
  if (const auto folder = std::filesystem::path(options.flight_record).parent_path();
      !folder.empty() && !std::filesystem::is_directory(folder, error))
    throw not_allowed(named ? "--flight-record" : "LOCKSTEP_FLIGHT_RECORD", options.flight_record,
                      "a file in a folder that is there");
  if (!options.metrics.empty()) {
    // As it is seen from here, wherever the ranks start. Only rank 0's host must have it, and that is not
    // known yet.
    options.metrics = std::filesystem::absolute(options.metrics).lexically_normal().string();
    if (options.node == 0) detail::check_metric_folder("--metrics", options.metrics);
  }
  if (!options.interface.empty()) {
    const auto names = detail::network_interfaces();
    if (std::find(names.begin(), names.end(), options.interface) == names.end())
      throw not_allowed("--interface", options.interface, fmt::format("one of {}", fmt::join(names, ", ")));
  }
}

class Help : public CLI::Formatter {
 public:
  Help() { column_width(30); }
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: lockstep run -n K [OPTIONS] [--] PROGRAM [ARGUMENTS...]\n";
  }
  std::string make_help(const CLI::App* run, std::string name, CLI::AppFormatMode mode) const override {
    return CLI::detail::find_and_replace(CLI::Formatter::make_help(run, name, mode), "\n\n\n", "\n\n");
  }
};

// Adds options to `run`, one line each: names, what follows them in the help, what it means, what to do.
class Adder {
 public:
  explicit Adder(CLI::App* run) : run_(run) {}
  void group(const char* name) { group_ = name; }

  using Take = std::function<void(const std::string&)>;
  CLI::Option* value(const char* names, const char* text, const char* description, Take take) {
    return run_->add_option_function<std::string>(names, std::move(take), description)
        ->option_text(text)
        ->group(group_);
  }
  void repeated(const char* names, const char* text, const char* description, Take take) {
    run_->add_option_function<std::vector<std::string>>(
            names,
            [take = std::move(take)](const std::vector<std::string>& values) {
              for (const auto& each : values) take(each);
            },
            description)
        ->option_text(text)
        ->allow_extra_args(false)
        ->group(group_);
  }
  void flag(const char* names, const char* description, bool& target) {
    run_->add_flag(names, target, description)->group(group_);
  }

 private:
  CLI::App* run_;
  std::string group_;
};

void add_rank_options(Adder& add, Request& request) {
  auto& options = request.options;
  add.group("Ranks");
  add.value("-n,--nproc", "K|auto", "How many ranks this host has; auto: one per GPU, else one per core",
            [&](const auto& text) { options.num_ranks = ranks_here(text); })
      ->required();
  add.value(
      "--threads", "K",
      "Threads of each rank, which finds them as OMP_NUM_THREADS and\nLOCKSTEP_THREADS; by default what "
      "LOCKSTEP_THREADS says, else\nOMP_NUM_THREADS, else cores / ranks",
      [&](const auto& text) {
        options.threads = whole_or_throw("--threads", text, 1, detail::kMostThreads);
      });
  add.value("--bind", "auto|cores|none",
            "Each rank to its own cores; auto: where there are enough of them and\nno CPU quota",
            [&](const auto& text) {
              using detail::Bind;
              options.bind = one_of<Bind>(
                  "--bind", text, {{"auto", Bind::automatic}, {"cores", Bind::cores}, {"none", Bind::none}});
            });
  add.repeated("--env", "NAME=VALUE", "Set a variable for the ranks; may be given several times",
               [&](const auto& text) {
                 const auto equals = text.find('=');
                 const auto name = equals == std::string::npos ? "" : text.substr(0, equals);
                 check_variable("--env", text, name);
                 options.set_environment.emplace_back(name, text.substr(equals + 1));
               });
  add.repeated("--unset-env", "NAME", "Do not pass a variable on; may be given several times",
               [&](const auto& text) {
                 check_variable("--unset-env", text, text.find('=') == std::string::npos ? text : "");
                 options.unset_environment.push_back(text);
               });
  add.value("--chdir", "DIR", "Start the ranks in this folder",
            [&](const auto& text) { options.directory = text; });
  add.value("--stdin", "RANK|none", "Which rank gets the standard input; 0 by default",
            [&](const auto& text) {
              if (text == "none")
                options.stdin_rank.reset();
              else if (const auto rank = whole(text, 0, kMostRanks * kMostNodes - 1))
                options.stdin_rank = rank;
              else
                throw not_allowed("--stdin", text, "a rank or none");
            });
}

void add_output_options(Adder& add, Request& request) {
  auto& options = request.options;
  add.group("Output");
  add.value("--show", "RANKS", "Whose output is shown: all, none, or a list such as 0,2 or 0-3",
            [&](const auto& text) { options.show = detail::RankSet::parse("--show", text); });
  add.value("--prefix", "auto|always|never", "The rank before each line; auto: unless there is only one",
            [&](const auto& text) {
              using detail::Prefix;
              options.prefix = one_of<Prefix>(
                  "--prefix", text,
                  {{"auto", Prefix::automatic}, {"always", Prefix::always}, {"never", Prefix::never}});
            });
  add.value("--log-dir", "DIR",
            "Also keep each rank's output as it is, in DIR/rank-K.log, and after the\nR-th restart in "
            "DIR/rank-K.restart-R.log;\nfiles that are there are gone on with",
            [&](const auto& text) { options.log_directory = text; });
  add.value(
      "--status", "auto|always|never",
      "A line at the bottom with step, speed, loss and the slowest rank; auto: on a\nterminal; always: "
      "elsewhere "
      "too, as a line every 10 s",
      [&](const auto& text) {
        using detail::StatusLine;
        options.status = one_of<StatusLine>(
            "--status", text,
            {{"auto", StatusLine::automatic}, {"always", StatusLine::always}, {"never", StatusLine::never}});
      });
  add.value("--metrics", "DIR",
            "Where World::log_metric writes: DIR/metrics.jsonl and TensorBoard's event\nfiles; else what "
            "LOCKSTEP_METRICS says",
            [&](const auto& text) { options.metrics = text; });
  add.value("--metrics-format", "jsonl|csv", "jsonl by default", [&](const auto& text) {
    detail::parse_metric_format("--metrics-format", text);
    options.metrics_format = text;
  });
  add.flag("-q,--quiet", "No line at the start", options.quiet);
}

// Such as 10:20; whether it makes sense is another matter.
bool is_window(const std::string& text) {
  const auto colon = text.find(':');
  return colon != std::string::npos && colon > 0 && colon + 1 < text.size() &&
         text.find_first_not_of("0123456789:") == std::string::npos;
}

std::string profiled_steps(const std::string& text) {
  const auto colon = text.find(':');
  const auto first = whole(text.substr(0, colon), 1, 1000000000);
  const auto last = colon == std::string::npos ? std::nullopt
                                               : whole(text.substr(colon + 1), first.value_or(1), 1000000000);
  if (!first || !last) throw not_allowed("--profile", text, "FIRST:LAST, steps from 1, such as 10:20,");
  return text;
}

void add_profile_options(Adder& add, Request& request) {
  add.group("Profile");
  add.value(
      "--profile", "FIRST:LAST",
      "Record these steps of every rank (--profile=5:15; --profile alone: 10:20),\nthen say where the time "
      "went; the program must call world.step(n)",
      [&](const auto& text) { request.profile = profiled_steps(text); });
  add.value("--profile-dir", "DIR",
            "Where trace.json.gz, summary.json, report.html and each rank's file go;\nprofile by default",
            [&](const auto& text) { request.profile_directory = text; });
}

void add_failure_options(Adder& add, Request& request) {
  auto& options = request.options;
  add.group("Failures (times: 250ms, 30s, 5m, 2h; a plain number is seconds)");
  add.value("--timeout", "TIME", "How long a collective may take", [&](const auto& text) {
    options.timeout = fmt::format("{}ms", env::parse_duration("--timeout", text).count());
  });
  add.value("--join-timeout", "TIME", "How long hosts and ranks are waited for at the start",
            [&](const auto& text) { options.join_timeout = env::parse_duration("--join-timeout", text); });
  add.value("--grace", "TIME", "Between the signal that ends the ranks and SIGKILL; 5s by default",
            [&](const auto& text) { options.grace = env::parse_duration("--grace", text); });
  add.value("--stop-grace", "TIME", "How long a rank may be stopped (SIGSTOP); 5s by default",
            [&](const auto& text) { options.stop_grace = env::parse_duration("--stop-grace", text); });
  add.value(
      "--flight-record", "FILE|none",
      "Where the last 1,000 operations of each rank are saved after a failure,\nfor `lockstep trace flight`; "
      "by default what LOCKSTEP_FLIGHT_RECORD says,\nelse DIR/flight.json with --log-dir DIR, else a new "
      "file in TMPDIR or /tmp",
      [&](const auto& text) {
        if (text.empty()) throw not_allowed("--flight-record", text, "the name of a file, or none,");
        options.flight_record = text;
      });
  add.value(
      "--max-restarts", "K", "Start all ranks again after a failure, at most K times; 0 by default",
      [&](const auto& text) { options.max_restarts = whole_or_throw("--max-restarts", text, 0, 1000000); });
}

void add_host_options(Adder& add, Request& request) {
  auto& options = request.options;
  add.group("Several hosts (the same command on each, but for --node-rank)");
  add.value("--nnodes", "K", "How many hosts",
            [&](const auto& text) { options.num_nodes = whole_or_throw("--nnodes", text, 1, kMostNodes); });
  add.value("--node-rank", "K", "Which of them this is, from 0",
            [&](const auto& text) { request.node = whole_or_throw("--node-rank", text, 0, kMostNodes - 1); });
  add.value("--master", "HOST:PORT", "Where host 0 is reached; it listens there and nowhere else",
            [&](const auto& text) { request.master = text; });
  add.value("--master-addr", "HOST", "With --master-port: another way of saying --master",
            [&](const auto& text) { request.master_address = text; });
  add.value("--master-port", "PORT", "", [&](const auto& text) { request.master_port = text; });
  add.value("--key-file", "FILE", "The job's key, made by `lockstep key`; else the variable LOCKSTEP_KEY",
            [&](const auto& text) { request.key_file = text; });
  add.value("--interface", "NAME", "The network interface that the ranks use",
            [&](const auto& text) { options.interface = text; });
}

// Files of an earlier run would be taken for this one's.
void clear_profile(const std::filesystem::path& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (!std::filesystem::is_directory(directory))
    throw ConfigError(fmt::format("--profile-dir='{}' is not allowed: {}", directory.string(),
                                  error ? error.message() : "it is not a folder"));
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const auto name = entry.path().filename().string();
    if (profile::is_rank_file(entry.path()) || name == "trace.json.gz" || name == "summary.json" ||
        name == "report.html")
      std::filesystem::remove(entry.path(), error);
    if (error)
      throw ConfigError(fmt::format("--profile-dir='{}' is not allowed: {} cannot be removed: {}",
                                    directory.string(), name, error.message()));
  }
}

int run_and_tell(Request& request) {
  auto& options = request.options;
  if (request.profile.empty()) return detail::launch(options);
  const auto directory = std::filesystem::absolute(request.profile_directory);
  clear_profile(directory);
  options.set_environment.emplace_back("LOCKSTEP_PROFILE", request.profile);
  options.set_environment.emplace_back("LOCKSTEP_PROFILE_DIR", directory.string());
  const int status = detail::launch(options);
  if (options.node > 0) {  // where hosts share the folder, only one of them may write there
    std::cerr << fmt::format(
        "lockstep: this host's profiles are in {}; host 0 puts together what it finds there\n",
        request.profile_directory);
    return status;
  }
  try {
    show_profile(request.profile_directory);
  } catch (const std::exception& error) {
    std::cerr << fmt::format("lockstep: there is no profile: {}\n", error.what());
    return status == 0 ? 1 : status;
  }
  return status;
}

}  // namespace

void tidy_run(const CLI::App& app, std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] != "run") return;
  const CLI::App* run = app.get_subcommand("run");
  for (std::size_t i = 1; i < arguments.size() && arguments[i].starts_with('-'); ++i) {
    std::string& argument = arguments[i];
    if (argument == "--") {
      arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
    const bool is_short = !argument.starts_with("--");
    const auto name_end =
        is_short ? std::min<std::size_t>(2, argument.size()) : std::min(argument.find('='), argument.size());
    std::string name = argument.substr(0, name_end);
    if (!is_short) std::replace(name.begin(), name.end(), '_', '-');
    if (name == "--nproc-per-node") name = "--nproc";
    argument.replace(0, name_end, name);
    if (argument == "--profile") {  // CLI11 would take the program for its value
      const bool given = i + 1 < arguments.size() && is_window(arguments[i + 1]);
      argument += "=" + (given ? arguments[i + 1] : "10:20");
      if (given) arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    }
    const CLI::Option* option = run->get_option_no_throw(name);
    if (option == nullptr) return;  // CLI11 says so
    if (is_short && argument.size() > 3 && argument[2] == '=') argument.erase(2, 1);
    if (option->get_items_expected_max() > 0 && argument.size() == name.size())
      ++i;  // its value stands apart
  }
}

void add_run(CLI::App& app, Action& action) {
  auto request = std::make_shared<Request>();
  auto* run =
      app.add_subcommand("run", "Start a program as the ranks of a job, and stay until they have ended");
  run->formatter(std::make_shared<Help>());
  run->footer(
      "\nExamples:\n"
      "  lockstep run -n 4 ./train --lr 0.1\n"
      "  lockstep run -n 8 --nnodes 2 --node-rank 0 --master node0:29500 --key-file job.key ./train\n\n"
      "Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its\n"
      "environment. When one fails the others are told and ended, and its status is this program's. SIGINT\n"
      "and SIGTERM go to every rank, a second one kills. torchrun's spellings are understood: "
      "--nproc_per_node,\n"
      "--node_rank, --master_addr, --master_port, --max_restarts.\n");
  Adder add(run);
  add_rank_options(add, *request);
  add_output_options(add, *request);
  add_profile_options(add, *request);
  add_failure_options(add, *request);
  add_host_options(add, *request);
  run->set_help_flag("-h,--help", "This text")->group("Output");  // again: after the others
  // From the program's name on everything belongs to the program.
  run->prefix_command();
  run->callback([&action, request, run] {
    auto& options = request->options;
    options.command = run->remaining();
    if (options.command.empty())
      throw ConfigError("which program? Usage: lockstep run -n K [OPTIONS] PROGRAM [ARGUMENTS...]");
    if (options.command[0].starts_with('-'))
      throw ConfigError(
          fmt::format("'{}' is not an option of run; lockstep run --help lists them", options.command[0]));
    check(*request);
    action = [request] { return run_and_tell(*request); };
  });
}

}  // namespace lockstep::cli
