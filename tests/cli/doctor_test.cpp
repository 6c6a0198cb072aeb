// Tests of `lockstep doctor`. Findings depend on the machine, so they check the form, and what they set up.
#include <sys/stat.h>

#include <filesystem>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

#include "support/errors.h"
#include "support/folder.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Environment = std::map<std::string, std::string>;

Outcome doctor(std::vector<std::string> arguments, const Environment& environment = {},
               const std::string& program = LOCKSTEP_PROGRAM) {
  arguments.insert(arguments.begin(), {program, "doctor"});
  return run({arguments, environment}, std::chrono::seconds(110));
}

struct Report {
  int status = -1;
  Json json;

  explicit Report(const Outcome& outcome) : status(outcome.status) {
    json = Json::parse(outcome.output, nullptr, false);
    EXPECT_TRUE(json.is_object()) << outcome.output;
    if (!json.is_object()) json = Json::object();
    EXPECT_EQ(status, json.value("bad", -1) == 0 ? 0 : 1) << outcome.output;
    for (const auto& row : json.value("rows", Json::array())) EXPECT_TRUE(row["values"].is_object()) << row;
  }
  Json row(const std::string& name) const {
    for (const auto& each : json.value("rows", Json::array()))
      if (each["name"] == name) return each;
    ADD_FAILURE() << "no row '" << name << "' in " << json.dump(2);
    return {{"finding", ""}, {"verdict", ""}, {"hint", ""}, {"values", Json::object()}};
  }
};

// A copy of the program in its own folder, with another probe or none.
class Copy {
 public:
  explicit Copy(const std::string& probe = "") {
    fs::create_directories(folder_ / "bin");
    fs::copy_file(LOCKSTEP_PROGRAM, folder_ / "bin/lockstep");
    if (probe.empty()) return;
    const auto path = folder_.write("lib/lockstep/lockstep-probe", "#!/bin/sh\n" + probe + "\n");
    ::chmod(path.c_str(), 0755);
  }

  std::string program() const { return folder_ / "bin/lockstep"; }
  Report report(std::vector<std::string> arguments = {}) const {
    arguments.push_back("--json");
    return Report(doctor(arguments, {}, program()));
  }

 private:
  Folder folder_;
};

// A probe that prints this description, and fails otherwise.
std::string probe_that_says(Json described) {
  described["lockstep"] = LOCKSTEP_VERSION;
  return "[ \"$1\" = --describe ] && echo '" + described.dump() +
         "' && exit\necho 'lockstep-probe: error: no luck' >&2; exit 1";
}

TEST(Doctor, every_row_has_a_name_a_finding_and_a_verdict) {
  const Report report(doctor({"--json"}));
  std::set<std::string> names;
  for (const auto& row : report.json["rows"]) {
    EXPECT_TRUE(names.insert(row["name"]).second) << row;
    EXPECT_FALSE(row["finding"].get<std::string>().empty()) << row;
    EXPECT_THAT(row["verdict"].get<std::string>(), AnyOf("ok", "note", "bad"));
    EXPECT_TRUE(row["hint"].is_string() && row["values"].is_object()) << row;
    // A bad verdict needs a hint.
    EXPECT_TRUE(row["verdict"] != "bad" || row["hint"] != "") << row;
  }
  for (const char* name : {"cores",      "load",    "memory",    "swap",         "/dev/shm",  "huge pages",
                           "kernel",     "clock",   "container", "open files",   "processes", "locked memory",
                           "core dumps", "network", "host name", "LibTorch",     "CUDA",      "NCCL",
                           "Open MPI",   "MPICH",   "SLURM",     "order of sums"})
    EXPECT_TRUE(names.contains(name)) << name;
  EXPECT_GE(report.row("cores")["values"]["usable"], 1);
  EXPECT_GT(report.row("memory")["values"]["total"], 0);
  EXPECT_EQ(report.row("LibTorch")["values"]["lockstep"], LOCKSTEP_VERSION);
}

TEST(Doctor, a_table_fits_into_80_columns_of_a_pipe) {
  const auto outcome = doctor({});
  std::istringstream lines(outcome.output);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80U) << line;
  EXPECT_THAT(outcome.output, Not(HasSubstr("\033")));
  EXPECT_THAT(outcome.output, AllOf(ContainsRegex("\n(ok|note) +cores  +[0-9]+ usable"),
                                    ContainsRegex("\n[a-z]+ +LibTorch "), ContainsRegex("bad, [0-9]+ note")));
}

TEST(Doctor, verdicts_have_colours_on_a_terminal_unless_they_are_not_wanted) {
  const std::vector<std::string> command = {"script", "-qec", std::string(LOCKSTEP_PROGRAM) + " doctor",
                                            "/dev/null"};
  const auto coloured = run({command, {{"TERM", "xterm"}, {"NO_COLOR", ""}}});
  EXPECT_THAT(coloured.output, HasSubstr("\033[32mok\033[0m"));
  const auto plain = run({command, {{"TERM", "xterm"}, {"NO_COLOR", "1"}}});
  EXPECT_THAT(plain.output, AllOf(HasSubstr("ok "), Not(HasSubstr("\033["))));
}

TEST(Doctor, a_low_limit_is_bad_and_the_hint_says_how_to_raise_it) {
  const auto limited = [](const std::string& limit) {
    return Report(run({{"sh", "-c", "ulimit " + limit + "; exec " + LOCKSTEP_PROGRAM + " doctor --json"}}));
  };
  const auto files = limited("-S -n 64");
  EXPECT_EQ(files.status, 1);
  EXPECT_EQ(files.row("open files")["verdict"], "bad");
  EXPECT_THAT(files.row("open files")["hint"].get<std::string>(), HasSubstr("ulimit -n"));
  EXPECT_EQ(files.row("open files")["values"]["soft"], 64);
  // Raising the hard limit needs privileges, so the hint differs.
  EXPECT_THAT(limited("-n 64").row("open files")["hint"].get<std::string>(), HasSubstr("limits.conf"));
}

TEST(Doctor, ranks_measure_threads_shared_memory_and_gloo) {
  // The variables of doctor's own launcher must not reach the measured ranks.
  const Report report(
      doctor({"-n", "2", "--backend", "threads,shm,gloo", "--json"},
             {{"RANK", "1"}, {"WORLD_SIZE", "3"}, {"SLURM_PROCID", "1"}, {"LOCKSTEP_CHECK", "x"}}));
  EXPECT_EQ(report.json["ranks"], 2);
  for (const char* name : {"transport threads", "transport shm", "transport gloo"}) {
    const auto row = report.row(name);
    EXPECT_EQ(row["verdict"], "ok") << row;
    EXPECT_EQ(row["values"]["ranks"], 2);
    for (const char* figure : {"barrier_us", "all_reduce_4B_us", "all_reduce_4KiB_us", "all_reduce_1MiB_GBps",
                               "all_reduce_25MiB_GBps"})
      EXPECT_GT(row["values"].value(figure, 0.0), 0) << row;
  }
  EXPECT_GT(report.row("memory copy")["values"].value("25MiB_GBps", 0.0), 0);
}

TEST(Doctor, ranks_measure_every_mpi_that_is_there) {
  std::istringstream flavours(LOCKSTEP_MPI_FLAVOURS);
  const Report report(doctor({"-n", "2", "--backend", "mpi", "--json"}));
  int count = 0;
  for (std::string flavour; flavours >> flavour; ++count)
    EXPECT_GT(report.row("transport " + flavour)["values"].value("all_reduce_25MiB_GBps", 0.0), 0);
  if (count == 0) {
    EXPECT_EQ(report.row("transport mpi")["verdict"], "bad");
  }
}

TEST(Doctor, figures_stand_in_columns) {
  const auto outcome = doctor({"-n", "2", "--backend", "threads"});
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("2 ranks"), ContainsRegex("barrier +4 B +4 KiB +1 MiB +25 MiB"),
                                    ContainsRegex("ok +threads( +[0-9]+\\.[0-9]+){5}\n"),
                                    ContainsRegex("ok +memory copy( +[0-9]+\\.[0-9]+){2}\n")));
}

TEST(Doctor, a_missing_probe_is_told_and_the_rest_goes_on) {
  const Copy copy;
  const auto report = copy.report({"-n", "2"});
  EXPECT_EQ(report.status, 1);
  EXPECT_EQ(report.row("LibTorch")["verdict"], "bad");
  EXPECT_THAT(report.row("LibTorch")["finding"].get<std::string>(), HasSubstr("lockstep-probe"));
  EXPECT_EQ(report.row("transport gloo")["verdict"], "bad");
  EXPECT_EQ(report.row("SLURM").contains("finding"), true);
}

TEST(Doctor, a_probe_that_fails_is_quoted) {
  const auto row =
      Copy("echo 'lockstep-probe: error while loading libtorch.so' >&2; exit 127").report().row("LibTorch");
  EXPECT_EQ(row["verdict"], "bad");
  EXPECT_THAT(row["finding"].get<std::string>(), HasSubstr("error while loading libtorch.so"));
}

TEST(Doctor, a_transport_that_fails_is_a_row_and_not_the_end) {
  const Copy copy(probe_that_says({{"version", "2.13.0"}}));
  const auto report = copy.report({"-n", "2", "--backend", "threads,gloo,mpi,nccl"});
  EXPECT_EQ(report.status, 1);
  EXPECT_EQ(report.row("LibTorch")["verdict"], "ok");
  for (const char* name : {"transport threads", "transport gloo"}) {
    EXPECT_EQ(report.row(name)["verdict"], "bad");
    EXPECT_THAT(report.row(name)["finding"].get<std::string>(), HasSubstr("no luck"));
    EXPECT_THAT(report.row(name)["hint"].get<std::string>(), HasSubstr("--measure"));
  }
  EXPECT_THAT(report.row("transport mpi")["finding"].get<std::string>(), HasSubstr("module"));
  EXPECT_THAT(report.row("transport nccl")["finding"].get<std::string>(), HasSubstr("GPUs"));
}

TEST(Doctor, a_transport_that_is_not_there_is_a_row_of_the_table_too) {
  // No probe, no MPI in PATH, no GPU: each is reported, and the table is complete.
  const auto without_probe = Copy();
  const auto first = doctor({"-n", "2", "--backend", "gloo"}, {}, without_probe.program());
  EXPECT_EQ(first.status, 1) << first.output;
  EXPECT_THAT(first.output, AllOf(ContainsRegex("\nbad +gloo +not measured"), HasSubstr("memory copy"),
                                  ContainsRegex("[0-9] bad, ")));
  const Copy copy(probe_that_says({{"version", "2.13.0"}}));
  const auto second = doctor({"-n", "2", "--backend", "mpi,nccl"}, {{"PATH", "/no/such"}}, copy.program());
  EXPECT_EQ(second.status, 1) << second.output;
  EXPECT_THAT(second.output,
              AllOf(ContainsRegex("\nbad +mpi +no MPI"), ContainsRegex("\nbad +nccl +2 ranks need"),
                    HasSubstr("memory copy"), ContainsRegex("[0-9] bad, ")));
}

TEST(Doctor, a_missing_proc_is_a_row) {
  const std::vector<std::string> hidden = {"unshare", "--mount", "sh", "-c",
                                           "mount -t tmpfs none /proc && exec \"$0\" \"$@\""};
  auto command = hidden;
  command.push_back("true");
  if (run({command}).status != 0) GTEST_SKIP() << "/proc cannot be hidden here";
  command = hidden;
  command.insert(command.end(), {LOCKSTEP_PROGRAM, "doctor", "--json"});
  const Report report(run({command}, std::chrono::seconds(110)));
  EXPECT_EQ(report.status, 1);
  EXPECT_EQ(report.row("/proc")["verdict"], "bad");
  EXPECT_FALSE(report.row("SLURM")["finding"].get<std::string>().empty());
}

TEST(Doctor, gpus_and_libtorch_that_do_not_fit_are_told) {
  const Json gpu = {{"name", "Some GPU"}, {"bytes", std::uint64_t{80} << 30}};
  const auto verdict = [](const Json& described) {
    return Copy(probe_that_says(described)).report().row("CUDA")["verdict"].get<std::string>();
  };
  EXPECT_EQ(verdict({{"version", "2.13.0"}}), "ok");
  EXPECT_EQ(verdict({{"gpus", {gpu, gpu}}, {"driver", "12.4"}}), "note");  // LibTorch is CPU-only.
  EXPECT_EQ(verdict({{"cuda", "13.0"}}), "note");                          // No GPU.
  EXPECT_EQ(verdict({{"cuda", "13.0"}, {"gpus", {gpu}}, {"driver", "12.4"}, {"usable_gpus", 0}}), "bad");
  const Copy copy(probe_that_says(
      {{"cuda", "13.0"}, {"gpus", {gpu, gpu}}, {"driver", "13.0"}, {"usable_gpus", 2}, {"nccl", "2.28.9"}}));
  EXPECT_THAT(copy.report().row("CUDA")["finding"].get<std::string>(), HasSubstr("2 x Some GPU of 80.0 GiB"));
  EXPECT_THAT(copy.report().row("NCCL")["hint"].get<std::string>(), HasSubstr("build"));  // No transport.
}

TEST(Doctor, the_environment_is_looked_at) {
  const Report report(doctor(
      {"--json"},
      {{"GLOO_SOCKET_IFNAME", "wibble0"}, {"SLURM_JOB_ID", "77"}, {"SLURM_JOB_NODELIST", "node[1-2]"}}));
  EXPECT_EQ(report.row("network")["verdict"], "bad");
  EXPECT_THAT(report.row("network")["finding"].get<std::string>(), HasSubstr("'wibble0'"));
  EXPECT_THAT(report.row("SLURM")["finding"].get<std::string>(),
              AllOf(HasSubstr("job 77"), HasSubstr("node[1-2]")));
}

TEST(Doctor, the_order_of_sums_follows_from_the_ranks_of_each_host) {
  auto row = [](const std::vector<std::string>& arguments, const Environment& environment = {}) {
    auto all = arguments;
    all.emplace_back("--json");
    return Report(doctor(all, environment)).row("order of sums");
  };
  const auto alike = row({"--hosts", "2,2,2"});
  EXPECT_EQ(alike["verdict"], "ok");
  EXPECT_TRUE(alike["values"]["follows_tree"]);
  EXPECT_THAT(alike["finding"].get<std::string>(),
              AllOf(HasSubstr("3 hosts x 2 ranks"), HasSubstr("the bits of as many ranks on one host")));
  const auto others = row({"--hosts", "3,1"});
  EXPECT_EQ(others["verdict"], "note");
  EXPECT_FALSE(others["values"]["follows_tree"]);
  EXPECT_THAT(others["finding"].get<std::string>(),
              AllOf(HasSubstr("hosts of 3, 1 ranks"), HasSubstr("the same bits in every run")));
  EXPECT_THAT(others["hint"].get<std::string>(), HasSubstr("power of two"));
  // Read from SLURM inside an allocation.
  EXPECT_EQ(row({}, {{"SLURM_TASKS_PER_NODE", "4(x2),3"}})["values"]["ranks"], (std::vector{4, 4, 3}));
  EXPECT_TRUE(row({}, {{"SLURM_TASKS_PER_NODE", "4(x2),3"}})["values"]["follows_tree"]);
  EXPECT_FALSE(row(
      {}, {{"SLURM_TASKS_PER_NODE", "2(x2)"}, {"SLURM_DISTRIBUTION", "cyclic"}})["values"]["follows_tree"]);
  for (const char* nonsense : {"", "x", "2(y2)", "-1", "2(x99999999999)", "0"})
    EXPECT_THAT(row({}, {{"SLURM_TASKS_PER_NODE", nonsense}})["finding"].get<std::string>(),
                HasSubstr("--hosts"));
}

TEST(Doctor, misuse_is_explained) {
  const auto explained = [](std::vector<std::string> arguments, const std::string& text) {
    const auto outcome = doctor(std::move(arguments));
    EXPECT_EQ(outcome.status, 2) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr(text));
  };
  explained({"-n", "0"}, "0");
  explained({"-n", "many"}, "many");
  explained({"-n", "2", "--backend", "wibble"},
            "--backend: expected a list of threads, shm, gloo, mpi, nccl, cuda_ipc, got 'wibble'");
  explained({"--backend", "gloo"}, "-n");
  explained({"--hosts", "2,0"}, "0");
  explained({"--wibble"}, "--wibble");
  const auto help = doctor({"--help"});
  EXPECT_EQ(help.status, 0);
  EXPECT_THAT(help.output, AllOf(HasSubstr("-n,--nproc"), HasSubstr("--backend"), HasSubstr("--json"),
                                 HasSubstr("Example:")));
}

}  // namespace
}  // namespace lockstep::testing
