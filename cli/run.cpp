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
  std::string profile, profile_directory = "profile";  // The steps to profile; empty: no profile.
};

using detail::bad_value;

// The error of an option that another option rules out, or of a file it cannot use.
ConfigError unusable(std::string_view option, std::string_view why) {
  return ConfigError(fmt::format("{}: {}", option, why));
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
  throw bad_value(option, fmt::format("an integer from {} to {}", lowest, highest), text);
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
  throw bad_value(option, names, text);
}

int ranks_here(const std::string& text) {
  if (text == "auto") {
    const int gpus = host::gpu_count();
    return gpus > 0 ? gpus : host::available_cores();
  }
  if (const auto value = whole(text, 1, kMostRanks)) return *value;
  throw bad_value("-n", fmt::format("an integer from 1 to {}, or auto", kMostRanks), text);
}

void check_variable(const std::string& option, const std::string& text, const std::string& name) {
  if (name.empty())
    throw bad_value(option, option == "--env" ? "NAME=VALUE" : "the name of a variable", text);
  if (detail::is_launchers_variable(name))
    throw unusable(option, fmt::format("cannot change {}, which lockstep run sets itself{}", name,
                                       name == "OMP_NUM_THREADS" ? "; use --threads" : ""));
}

// Rejects a rank that does not exist. With several hosts only the coordinator knows how many ranks there are.
void check_rank(const detail::LaunchOptions& options, const std::string& option, int rank) {
  if (options.num_nodes == 1 && rank >= options.num_ranks)
    throw bad_value(option, fmt::format("ranks from 0 to {}", options.num_ranks - 1), std::to_string(rank));
}

void resolve_hosts(Request& request) {
  auto& options = request.options;
  const bool apart = !request.master_address.empty() || !request.master_port.empty();
  if (apart && !request.master.empty())
    throw unusable("--master",
                   "cannot be combined with --master-addr and --master-port; give one or the other");
  if (apart && (request.master_address.empty() || request.master_port.empty()))
    throw ConfigError(
        "--master-addr and --master-port: expected both or neither; --master HOST:PORT sets both");
  if (options.num_nodes == 1) {
    if (request.node.value_or(0) != 0)
      throw bad_value("--node-rank", "0 with one host (--nnodes 1)", std::to_string(*request.node));
    // The address is not used on one host, but a bad one is still reported.
    if (apart) whole_or_throw("--master-port", request.master_port, 1, 65535);
    if (!request.master.empty()) detail::parse_endpoint("--master", request.master);
    return;
  }
  if (!request.node)
    throw unusable("--nnodes", fmt::format("{} hosts need --node-rank, this host's number from 0 to {}",
                                           options.num_nodes, options.num_nodes - 1));
  if (*request.node >= options.num_nodes)
    throw bad_value(
        "--node-rank",
        fmt::format("an integer from 0 to {} with --nnodes {}", options.num_nodes - 1, options.num_nodes),
        std::to_string(*request.node));
  options.node = *request.node;
  if (request.master.empty() && !apart)
    throw unusable("--nnodes", fmt::format("{} hosts need --master HOST:PORT, an address and a free port of "
                                           "the host with --node-rank 0",
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
        "--nnodes: several hosts need a shared key, so that nothing else can join the job:\n"
        "  lockstep key --output job.key    once; then copy it to every host, readable only by you (0600)\n"
        "  --key-file job.key               on every host");
  options.key = *key;
  // Distinguishes jobs that share one key, as SLURM users' jobs may.
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
    throw unusable("--chdir",
                   fmt::format("cannot use '{}': {}", options.directory,
                               error && error != std::errc::no_such_file_or_directory ? error.message()
                                                                                      : "no such directory"));
  for (const auto& [name, value] : options.set_environment)
    if (const auto& unset = options.unset_environment;
        std::find(unset.begin(), unset.end(), name) != unset.end())
      throw ConfigError(fmt::format("--env and --unset-env: both name {}; give one of them", name));
  const bool named = !options.flight_record.empty();
  if (!named) options.flight_record = env::text("LOCKSTEP_FLIGHT_RECORD").value_or("");
  // Checked now: after a failure it would be too late to report it.
  if (const auto folder = std::filesystem::path(options.flight_record).parent_path();
      !folder.empty() && !std::filesystem::is_directory(folder, error))
    throw bad_value(named ? "--flight-record" : "LOCKSTEP_FLIGHT_RECORD", "a file in an existing directory",
                    options.flight_record);
  if (!options.metrics.empty()) {
    // Resolved here, because the ranks may start in another directory. Only rank 0's host needs the folder,
    // and which host that is is not known yet.
    options.metrics = std::filesystem::absolute(options.metrics).lexically_normal().string();
    if (options.node == 0) detail::check_metric_folder("--metrics", options.metrics);
  }
  if (!options.interface.empty()) {
    const auto names = detail::network_interfaces();
    if (std::find(names.begin(), names.end(), options.interface) == names.end())
      throw bad_value("--interface", fmt::format("one of {}", fmt::join(names, ", ")), options.interface);
  }
}

class Help : public CLI::Formatter {
 public:
  Help() { column_width(30); }
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: lockstep run -n N [OPTIONS] [--] PROGRAM [ARGUMENTS...]\n";
  }
  std::string make_help(const CLI::App* run, std::string name, CLI::AppFormatMode mode) const override {
    return CLI::detail::find_and_replace(CLI::Formatter::make_help(run, name, mode), "\n\n\n", "\n\n");
  }
};

// Adds options to `run`. Each takes its names, its value's name in the help, a description and a setter.
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
  add.value("-n,--nproc", "N|auto",
            "Number of ranks on this host, or auto for one per GPU (one per core\nwithout GPUs)",
            [&](const auto& text) { options.num_ranks = ranks_here(text); })
      ->required();
  add.value("--threads", "K",
            "Threads per rank, exported as OMP_NUM_THREADS and LOCKSTEP_THREADS\n(default: LOCKSTEP_THREADS, "
            "else OMP_NUM_THREADS, else cores / ranks)",
            [&](const auto& text) {
              options.threads = whole_or_throw("--threads", text, 1, detail::kMostThreads);
            });
  add.value(
      "--bind", "auto|cores|none",
      "Bind each rank to its own cores; auto: if there are enough cores and no\nCPU quota (default: auto)",
      [&](const auto& text) {
        using detail::Bind;
        options.bind = one_of<Bind>(
            "--bind", text, {{"auto", Bind::automatic}, {"cores", Bind::cores}, {"none", Bind::none}});
      });
  add.repeated("--env", "NAME=VALUE", "Set a variable for the ranks; repeatable", [&](const auto& text) {
    const auto equals = text.find('=');
    const auto name = equals == std::string::npos ? "" : text.substr(0, equals);
    check_variable("--env", text, name);
    options.set_environment.emplace_back(name, text.substr(equals + 1));
  });
  add.repeated("--unset-env", "NAME", "Remove a variable from the ranks' environment; repeatable",
               [&](const auto& text) {
                 check_variable("--unset-env", text, text.find('=') == std::string::npos ? text : "");
                 options.unset_environment.push_back(text);
               });
  add.value("--chdir", "DIR", "Start the ranks in this directory",
            [&](const auto& text) { options.directory = text; });
  add.value("--stdin", "RANK|none", "Rank that receives standard input (default: 0)", [&](const auto& text) {
    if (text == "none")
      options.stdin_rank.reset();
    else if (const auto rank = whole(text, 0, kMostRanks * kMostNodes - 1))
      options.stdin_rank = rank;
    else
      throw bad_value("--stdin", "a rank or none", text);
  });
}

void add_output_options(Adder& add, Request& request) {
  auto& options = request.options;
  add.group("Output");
  add.value("--show", "RANKS",
            "Ranks whose output is shown: all, none, or a list such as 0,2 or 0-3\n(default: all)",
            [&](const auto& text) { options.show = detail::RankSet::parse("--show", text); });
  add.value("--prefix", "auto|always|never",
            "Prefix each line with its rank; auto: if there are several ranks\n(default: auto)",
            [&](const auto& text) {
              using detail::Prefix;
              options.prefix = one_of<Prefix>(
                  "--prefix", text,
                  {{"auto", Prefix::automatic}, {"always", Prefix::always}, {"never", Prefix::never}});
            });
  add.value("--log-dir", "DIR",
            "Also write each rank's raw output to DIR/rank-K.log, and after restart R\nto "
            "DIR/rank-K.restart-R.log; existing files are appended to",
            [&](const auto& text) { options.log_directory = text; });
  add.value(
      "--status", "auto|always|never",
      "Show step, speed, loss and the slowest rank on the last line; auto: on a\nterminal only; always: "
      "without a terminal too, as a line every 10 s\n(default: auto)",
      [&](const auto& text) {
        using detail::StatusLine;
        options.status = one_of<StatusLine>(
            "--status", text,
            {{"auto", StatusLine::automatic}, {"always", StatusLine::always}, {"never", StatusLine::never}});
      });
  add.value("--metrics", "DIR",
            "Write the values of World::log_metric to DIR/metrics.jsonl and TensorBoard\nevent files "
            "(default: LOCKSTEP_METRICS)",
            [&](const auto& text) { options.metrics = text; });
  add.value("--metrics-format", "jsonl|csv", "Format of the metrics file (default: jsonl)",
            [&](const auto& text) {
              detail::parse_metric_format("--metrics-format", text);
              options.metrics_format = text;
            });
  add.flag("-q,--quiet", "Do not print the line that announces the job", options.quiet);
}

// True for text that looks like 10:20; profiled_steps checks the numbers.
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
  if (!first || !last) throw bad_value("--profile", "FIRST:LAST, steps counted from 1, such as 10:20", text);
  return text;
}

void add_profile_options(Adder& add, Request& request) {
  add.group("Profile");
  add.value(
      "--profile", "FIRST:LAST",
      "Profile these steps of every rank (--profile=5:15; --profile alone: 10:20)\nand report where the time "
      "went; the program must call world.step(n)",
      [&](const auto& text) { request.profile = profiled_steps(text); });
  add.value(
      "--profile-dir", "DIR",
      "Directory for trace.json.gz, summary.json, report.html and each rank's\nprofile (default: profile)",
      [&](const auto& text) { request.profile_directory = text; });
}

void add_failure_options(Adder& add, Request& request) {
  auto& options = request.options;
  add.group("Failures (times: 250ms, 30s, 5m, 2h; a plain number is seconds)");
  add.value("--timeout", "TIME",
            "Fail an operation that takes longer than TIME (default: LOCKSTEP_TIMEOUT,\nelse 30m)",
            [&](const auto& text) {
              options.timeout = fmt::format("{}ms", env::parse_duration("--timeout", text).count());
            });
  add.value("--join-timeout", "TIME",
            "Fail the job if not all hosts and ranks have joined within TIME\n(default: 5m)",
            [&](const auto& text) { options.join_timeout = env::parse_duration("--join-timeout", text); });
  add.value("--grace", "TIME", "Time that ranks get to exit before SIGKILL (default: 5s)",
            [&](const auto& text) { options.grace = env::parse_duration("--grace", text); });
  add.value("--stop-grace", "TIME",
            "Fail the job if a rank stays stopped (SIGSTOP) longer than TIME\n(default: 5s)",
            [&](const auto& text) { options.stop_grace = env::parse_duration("--stop-grace", text); });
  add.value(
      "--flight-record", "FILE|none",
      "Save the last 1,000 operations of each rank to FILE after a failure, for\n`lockstep trace flight` "
      "(default: LOCKSTEP_FLIGHT_RECORD, else\nDIR/flight.json with --log-dir DIR, else a new file in TMPDIR "
      "or /tmp)",
      [&](const auto& text) {
        if (text.empty()) throw bad_value("--flight-record", "a file name or none", text);
        options.flight_record = text;
      });
  add.value(
      "--max-restarts", "K", "Restart all ranks after a failure, at most K times (default: 0)",
      [&](const auto& text) { options.max_restarts = whole_or_throw("--max-restarts", text, 0, 1000000); });
}

void add_host_options(Adder& add, Request& request) {
  auto& options = request.options;
  add.group("Several hosts (run the same command on each host, except for --node-rank)");
  add.value("--nnodes", "K", "Number of hosts (default: 1)",
            [&](const auto& text) { options.num_nodes = whole_or_throw("--nnodes", text, 1, kMostNodes); });
  add.value("--node-rank", "K", "This host's number, from 0",
            [&](const auto& text) { request.node = whole_or_throw("--node-rank", text, 0, kMostNodes - 1); });
  add.value("--master", "HOST:PORT", "Address and port of host 0, as the other hosts reach it",
            [&](const auto& text) { request.master = text; });
  add.value("--master-addr", "HOST", "With --master-port: the same as --master",
            [&](const auto& text) { request.master_address = text; });
  add.value("--master-port", "PORT", "Port of --master-addr",
            [&](const auto& text) { request.master_port = text; });
  add.value("--key-file", "FILE", "The job's key from `lockstep key` (default: the variable LOCKSTEP_KEY)",
            [&](const auto& text) { request.key_file = text; });
  add.value("--interface", "NAME", "Network interface that the ranks use",
            [&](const auto& text) { options.interface = text; });
}

// Files of an earlier run would be merged into this run's profile.
void clear_profile(const std::filesystem::path& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (!std::filesystem::is_directory(directory))
    throw unusable("--profile-dir", fmt::format("cannot use '{}': {}", directory.string(),
                                                error ? error.message() : "not a directory"));
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const auto name = entry.path().filename().string();
    if (profile::is_rank_file(entry.path()) || name == "trace.json.gz" || name == "summary.json" ||
        name == "report.html")
      std::filesystem::remove(entry.path(), error);
    if (error)
      throw unusable("--profile-dir",
                     fmt::format("cannot remove '{}/{}': {}", directory.string(), name, error.message()));
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
  if (options.node > 0) {  // Where hosts share the folder, only one of them may write there.
    std::cerr << fmt::format(
        "lockstep: this host's profiles are in {}; host 0 merges the profiles it finds there\n",
        request.profile_directory);
    return status;
  }
  try {
    show_profile(request.profile_directory);
  } catch (const std::exception& error) {
    std::cerr << fmt::format("lockstep: cannot write the profile: {}\n", error.what());
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
    if (argument == "--profile") {  // CLI11 would take the program as its value.
      const bool given = i + 1 < arguments.size() && is_window(arguments[i + 1]);
      argument += "=" + (given ? arguments[i + 1] : "10:20");
      if (given) arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    }
    const CLI::Option* option = run->get_option_no_throw(name);
    if (option == nullptr) return;  // CLI11 reports it.
    if (is_short && argument.size() > 3 && argument[2] == '=') argument.erase(2, 1);
    if (option->get_items_expected_max() > 0 && argument.size() == name.size())
      ++i;  // The value is a separate argument.
  }
}

void add_run(CLI::App& app, Action& action) {
  auto request = std::make_shared<Request>();
  auto* run = app.add_subcommand("run", "Run PROGRAM as N ranks and wait for them to finish");
  run->formatter(std::make_shared<Help>());
  run->footer(
      "\nExamples:\n"
      "  lockstep run -n 4 ./train --lr 0.1\n"
      "  lockstep run -n 8 --nnodes 2 --node-rank 0 --master node0:29500 --key-file job.key ./train\n\n"
      "Each rank has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its\n"
      "environment. If a rank fails, the others are terminated and `lockstep run` exits with its status.\n"
      "SIGINT and SIGTERM are forwarded to every rank; a second one kills them. torchrun's spellings work\n"
      "too: --nproc_per_node, --node_rank, --master_addr, --master_port, --max_restarts.\n");
  Adder add(run);
  add_rank_options(add, *request);
  add_output_options(add, *request);
  add_profile_options(add, *request);
  add_failure_options(add, *request);
  add_host_options(add, *request);
  // Set again, so that it is listed after the others.
  run->set_help_flag("-h,--help", "Print this help")->group("Output");
  // Everything after the program's name belongs to the program.
  run->prefix_command();
  run->callback([&action, request, run] {
    auto& options = request->options;
    options.command = run->remaining();
    if (options.command.empty())
      throw ConfigError("missing program; usage: lockstep run -n N [OPTIONS] PROGRAM [ARGUMENTS...]");
    if (options.command[0].starts_with('-'))
      throw ConfigError(fmt::format("unknown option '{}' of run; `lockstep run --help` lists the options",
                                    options.command[0]));
    check(*request);
    action = [request] { return run_and_tell(*request); };
  });
}

}  // namespace lockstep::cli
