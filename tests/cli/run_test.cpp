// The program `lockstep`: how `run` handles its options, and the environment of the ranks.
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <lockstep/os/host.h>

#include "cli/session.h"
#include "support/errors.h"
#include "support/folder.h"
#include "support/process.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;

Outcome lockstep_run(std::vector<std::string> arguments,
                     std::map<std::string, std::string> environment = {}) {
  arguments.insert(arguments.begin(), LOCKSTEP_PROGRAM);
  return run({arguments, std::move(environment)});
}

// Runs a shell as the program of each rank, with these options.
Outcome shell(const std::vector<std::string>& options, const std::string& script,
              std::map<std::string, std::string> environment = {}) {
  std::vector<std::string> arguments = {"run", "--quiet"};
  arguments.insert(arguments.end(), options.begin(), options.end());
  arguments.insert(arguments.end(), {"sh", "-c", script});
  return lockstep_run(arguments, std::move(environment));
}

Outcome shell(const char* ranks, const std::string& script) {
  return shell(std::vector<std::string>{"-n", ranks}, script);
}

// The error text for bad arguments.
std::string complaint(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "run");
  const auto outcome = lockstep_run(arguments);
  EXPECT_EQ(outcome.status, 2) << outcome.output;
  return outcome.output;
}

TEST(Run, ranks_find_torchruns_variables) {
  const auto outcome = shell(
      "3",
      "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR:${MASTER_PORT:+port}");
  EXPECT_EQ(outcome.status, 0);
  for (const std::string rank : {"0", "1", "2"})
    EXPECT_THAT(outcome.output, HasSubstr("[" + rank + "] " + rank + "/3 " + rank + "/3 0 127.0.0.1:port\n"));
}

TEST(Run, ranks_find_lockstep_variables) {
  const auto outcome =
      shell({"-n", "1", "--threads", "3", "--timeout", "2m", "--join-timeout", "1.5"},
            "echo $LOCKSTEP_AGENT; echo $OMP_NUM_THREADS $LOCKSTEP_THREADS $LOCKSTEP_RESTART_COUNT "
            "$TORCHELASTIC_RESTART_COUNT $LOCKSTEP_TIMEOUT $LOCKSTEP_JOIN_TIMEOUT");
  EXPECT_THAT(outcome.output, ContainsRegex("^lockstep/[0-9a-f]{32}\n3 3 0 0 120000ms 1500ms\n$"));
}

TEST(Run, what_another_launcher_left_is_not_passed_on) {
  const auto outcome = shell({"-n", "1"}, "env | grep -E '^(LOCKSTEP_KEY|TORCHELASTIC_)'",
                             {{"LOCKSTEP_KEY", "secret"},
                              {"TORCHELASTIC_RUN_ID", "x"},
                              {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                              {"RANK", "7"},
                              {"WORLD_SIZE", "8"}});
  EXPECT_EQ(outcome.output, "TORCHELASTIC_RESTART_COUNT=0\n");
}

TEST(Run, nothing_listens_at_the_masters_port) {
  const auto outcome =
      run({{LOCKSTEP_PROGRAM, "run", "-q", "-n", "1", "bash", "-c",
            "exec 2>&-; if (: >/dev/tcp/127.0.0.1/$MASTER_PORT); then echo open; else echo closed; fi"}});
  EXPECT_EQ(outcome.output, "closed\n");
}

TEST(Run, what_follows_the_program_belongs_to_it) {
  const auto outcome = lockstep_run({"run", "-q", "-n", "1", "echo", "-n", "5", "--threads", "--help"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.output, "5 --threads --help");
}

TEST(Run, a_separator_may_stand_before_the_program) {
  for (const std::vector<std::string>& options :
       {std::vector<std::string>{"-n", "1", "--threads", "2", "--quiet"}, {"-q", "-n1", "--threads=2"}}) {
    std::vector<std::string> arguments = {"run"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    arguments.insert(arguments.end(), {"--", "echo", "--", "x"});
    const auto outcome = lockstep_run(arguments);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(outcome.output, "-- x\n");
  }
}

TEST(Run, torchruns_spellings_are_understood) {
  for (const char* name : {"--nproc-per-node", "--nproc_per_node"}) {
    const auto outcome = lockstep_run({"run", "-q", name, "2", "--max_restarts=0", "--node_rank", "0",
                                       "--nnodes=1", "--master_addr", "somewhere", "--master_port", "29500",
                                       "sh", "-c", "echo $WORLD_SIZE"});
    EXPECT_THAT(outcome.output, AllOf(HasSubstr("[0] 2\n"), HasSubstr("[1] 2\n")));
  }
}

TEST(Run, auto_is_a_rank_for_each_core_or_gpu) {
  const int gpus = host::gpu_count();
  EXPECT_EQ(shell({"-n", "auto", "--show", "0", "--prefix", "never"}, "echo $WORLD_SIZE").output,
            std::to_string(gpus > 0 ? gpus : host::available_cores()) + "\n");
}

TEST(Run, variables_are_set_and_not_passed_on) {
  const auto outcome =
      shell({"-n", "1", "--env", "A=1=2", "--env=B=", "--unset-env", "C", "--env", "PATH=/usr/bin:/bin"},
            "echo $A/${B-unset}/${C-unset}/$D/$PATH", {{"C", "3"}, {"D", "4"}, {"B", "5"}});
  EXPECT_EQ(outcome.output, "1=2//unset/4/" + std::string("/usr/bin:/bin\n"));
  EXPECT_THAT(complaint({"-n", "1", "--env", "A", "true"}), HasSubstr("--env: expected NAME=VALUE, got 'A'"));
  EXPECT_THAT(complaint({"-n", "1", "--env", "RANK=3", "true"}),
              HasSubstr("cannot change RANK, which lockstep run sets"));
  EXPECT_THAT(complaint({"-n", "1", "--env", "OMP_NUM_THREADS=3", "true"}), HasSubstr("--threads"));
  EXPECT_THAT(complaint({"-n", "1", "--unset-env", "A=2", "true"}),
              HasSubstr("expected the name of a variable, got 'A=2'"));
}

TEST(Run, ranks_start_in_the_folder_that_is_given) {
  EXPECT_EQ(shell({"-n", "1", "--chdir", "/usr"}, "pwd").output, "/usr\n");
  EXPECT_EQ(lockstep_run({"run", "-q", "-n", "1", "--chdir", "/usr/bin", "./printf", "here"}).output, "here");
  EXPECT_THAT(complaint({"-n", "1", "--chdir", "/no/such", "true"}),
              HasSubstr("--chdir: cannot use '/no/such': no such directory"));
}

TEST(Run, threads_are_shared_out_or_given) {
  const auto threads = "echo $OMP_NUM_THREADS $LOCKSTEP_THREADS";
  EXPECT_EQ(shell({"-n", "1", "--threads", "3"}, threads, {{"OMP_NUM_THREADS", "5"}}).output, "3 3\n");
  EXPECT_EQ(shell({"-n", "1"}, threads, {{"OMP_NUM_THREADS", "5"}}).output, "5 5\n");
  EXPECT_EQ(shell({"-n", "1"}, threads, {{"OMP_NUM_THREADS", "4,2"}}).output, "4,2 4\n");
  const auto all = std::to_string(host::available_cores());
  EXPECT_EQ(shell({"-n", "1"}, threads, {{"OMP_NUM_THREADS", ""}}).output, all + " " + all + "\n");
  EXPECT_EQ(lockstep_run({"run", "-n", "512", "--threads", "0", "true"}).status, 2);
  EXPECT_THAT(shell({"-n", "1"}, threads, {{"OMP_NUM_THREADS", "many"}}).output,
              HasSubstr("OMP_NUM_THREADS: expected an integer"));
  EXPECT_EQ(shell({"-n", "1"}, threads, {{"OMP_NUM_THREADS", "4,2"}, {"LOCKSTEP_THREADS", "3"}}).output,
            "3 3\n");
  EXPECT_EQ(shell({"-n", "1", "--threads", "2"}, threads, {{"LOCKSTEP_THREADS", "3"}}).output, "2 2\n");
  EXPECT_EQ(shell({"-n", "1"}, threads, {{"OMP_NUM_THREADS", " 7 "}}).output, "7 7\n");
  EXPECT_EQ(shell({"-n", "1"}, threads, {{"OMP_NUM_THREADS", "100000000"}}).status, 2);
  EXPECT_THAT(shell({"-n", "1"}, threads, {{"LOCKSTEP_THREADS", "4097"}}).output,
              HasSubstr("LOCKSTEP_THREADS: expected an integer from 1 to 4096, got '4097'"));
}

TEST(Run, ranks_are_bound_where_there_are_cores_for_all) {
  const auto mask = "taskset -cp $$ | sed 's/.*: //'";
  const auto unbound = shell({"-n", "1", "--bind", "none"}, mask).output;
  if (host::affinity_cores() < 2) GTEST_SKIP() << "there is only one core";
  const auto two = shell({"-n", "2", "--threads", "1", "--bind", "cores", "--prefix", "never"}, mask).output;
  EXPECT_EQ(std::count(two.begin(), two.end(), '\n'), 2);
  EXPECT_THAT(two, Not(HasSubstr(unbound)));
  EXPECT_NE(two.substr(0, two.find('\n')), two.substr(two.find('\n') + 1, two.size() - two.find('\n') - 2));
  const auto cores = host::affinity_cores();
  EXPECT_EQ(shell({"-n", "2", "--threads", std::to_string(cores), "--prefix", "never"}, mask).output,
            unbound + unbound);
  EXPECT_THAT(complaint({"-n", "2", "--bind", "cores", "--threads", std::to_string(cores), "true"}),
              HasSubstr("--bind cores: expected at least"));
}

TEST(Run, ranks_are_not_bound_where_a_quota_shares_out_time) {
  if (host::affinity_cores() < 2) GTEST_SKIP() << "there is only one core";
  const bool unified = fs::exists("/sys/fs/cgroup/cgroup.controllers");
  const fs::path group = fs::path(unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu") /
                         ("lockstep-test-" + std::to_string(::getpid()));
  std::error_code error;
  if (!fs::create_directory(group, error)) GTEST_SKIP() << "no cgroup can be made in " << group.parent_path();
  std::ofstream quota(group / (unified ? "cpu.max" : "cpu.cfs_quota_us"));
  quota << (unified ? "150000 100000" : "150000") << std::flush;
  if (!quota) {
    ::rmdir(group.c_str());
    GTEST_SKIP() << "time cannot be limited in " << group;
  }
  const auto outcome = run({{"sh", "-c", "echo $$ > " + word(group / "cgroup.procs") + "; exec \"$@\"", "sh",
                             LOCKSTEP_PROGRAM, "run", "-n", "2", "sh", "-c", "echo $LOCKSTEP_THREADS"},
                            {{"OMP_NUM_THREADS", ""}}});
  EXPECT_TRUE(eventually([&] { return ::rmdir(group.c_str()) == 0; }));
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr("1 thread each, not bound (a quota of 1.5 of "), HasSubstr("[1] 1\n")));
}

TEST(Run, many_ranks_need_more_files_than_a_shell_allows) {
  const auto outcome = run({{"bash", "-c",
                             std::string("ulimit -Sn 48; exec ") + LOCKSTEP_PROGRAM +
                                 " run -q -n 40 --show 39 --prefix never sh -c 'ulimit -Sn'"}});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.output, "48\n");
}

TEST(Run, the_start_line_tells_threads_and_cores) {
  const auto outcome = lockstep_run({"run", "-n", "3", "--threads", "100", "true"});
  EXPECT_THAT(
      outcome.output,
      ContainsRegex("^lockstep: 3 ranks on this host, 100 threads each, not bound \\(.*[0-9]+ cores?\\)\n$"));
  EXPECT_THAT(lockstep_run({"run", "-n", "1", "--threads", "1", "--bind", "cores", "true"}).output,
              ContainsRegex("^lockstep: 1 rank on this host, 1 thread each, bound to cores [0-9,-]+\n$"));
  EXPECT_THAT(lockstep_run({"run", "-n", "1", "--bind", "none", "true"}).output,
              HasSubstr("not bound (--bind none)"));
  EXPECT_EQ(lockstep_run({"run", "-n", "1", "--quiet", "true"}).output, "");
}

TEST(Run, the_interface_is_told_to_the_ranks) {
  EXPECT_EQ(shell({"-n", "1", "--interface", "lo"}, "echo $GLOO_SOCKET_IFNAME").output, "lo\n");
  EXPECT_THAT(complaint({"-n", "1", "--interface", "wibble0", "true"}),
              AllOf(HasSubstr("--interface: expected one of"), HasSubstr("lo"), HasSubstr("got 'wibble0'")));
}

TEST(Run, a_program_that_cannot_be_started_is_named) {
  const auto outcome = lockstep_run({"run", "-n", "2", "./no-such-program"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("'./no-such-program'"), HasSubstr("No such file")));
  EXPECT_THAT(complaint({"-n", "2", "no-such-program"}),
              HasSubstr("No such file or directory in any directory of PATH"));
  EXPECT_THAT(complaint({"-n", "2", "/etc/passwd"}),
              HasSubstr("cannot start '/etc/passwd': Permission denied"));
  EXPECT_THAT(complaint({"-n", "2", "/usr"}), HasSubstr("Permission denied"));
}

class RunFile : public ::testing::Test {
 protected:
  std::string make(const std::string& name, const std::string& text) {
    const auto path = folder_.write(name, text);
    fs::permissions(path, fs::perms::owner_all);
    return path;
  }
  const Folder folder_;
};

TEST_F(RunFile, a_script_without_an_interpreter_is_the_shells) {
  const auto outcome = lockstep_run({"run", "-q", "-n", "2", make("script", "echo $RANK $1\n"), "x"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("[0] 0 x\n"), HasSubstr("[1] 1 x\n")));
}

TEST_F(RunFile, a_program_for_another_machine_is_named_and_not_given_to_the_shell) {
  // The header of a program for s390: 64 bits, big-endian, an executable.
  std::string header = "\177ELF\2\2\1";
  header.resize(16, '\0');
  header += std::string("\0\2\0\26\0\0\0\1", 8);
  header.resize(512, '\0');
  const auto foreign = lockstep_run({"run", "-q", "-n", "2", make("foreign", header)});
  EXPECT_EQ(foreign.status, 2);
  EXPECT_THAT(foreign.output,
              ContainsRegex("^lockstep: cannot start '[^']*foreign': it is built for s390, 64 bits, "
                            "big-endian, and this host is [^\n]* bits[^\n]*\n$"));
  const auto data = lockstep_run({"run", "-q", "-n", "2", make("data", std::string(100, '\0'))});
  EXPECT_EQ(data.status, 2);
  EXPECT_THAT(data.output, HasSubstr("': it is neither a program nor a script\n"));
}

TEST_F(RunFile, a_program_whose_interpreter_is_missing_is_named) {
  const auto outcome = lockstep_run({"run", "-q", "-n", "2", make("script", "#!/no/such/interpreter\n")});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("': No such file"), Not(HasSubstr("rank"))));
}

TEST(Run, options_that_contradict_or_are_nonsense_are_refused) {
  EXPECT_THAT(complaint({"-n", "1", "--bind", "x", "true"}),
              HasSubstr("--bind: expected auto, cores or none, got 'x'"));
  EXPECT_THAT(complaint({"-n", "1", "--env", "A=2", "--unset-env", "A", "true"}),
              HasSubstr("--env and --unset-env: both name A"));
  EXPECT_THAT(complaint({"-n", "1", "--master", "x", "true"}), HasSubstr("--master: expected HOST:PORT"));
  EXPECT_THAT(complaint({"-n", "1", "--master-addr", "x", "--master-port", "y", "true"}),
              HasSubstr("--master-port: expected an integer from 1 to 65535, got 'y'"));
  const std::string too_long(5000, 'x');
  EXPECT_THAT(complaint({"-n", "1", "--chdir", too_long, "true"}),
              AllOf(HasSubstr("--chdir: cannot use '"), HasSubstr("File name too long"),
                    Not(HasSubstr("filesystem"))));
  EXPECT_EQ(lockstep_run({"run", "-q", "-n=1", "echo", "-n=1"}).output, "-n=1\n");
  EXPECT_THAT(complaint({"-n=", "true"}), HasSubstr("got '='"));
}

TEST(Run, help_that_cannot_be_written_is_a_failure) {
  for (const std::string verb : {"run --help", "--version", "doctor --help"}) {
    const auto outcome = run({{"sh", "-c", LOCKSTEP_PROGRAM " " + verb + " >/dev/full"}});
    EXPECT_EQ(outcome.status, 2) << verb;
    EXPECT_THAT(outcome.output, HasSubstr("cannot write to standard output"));
  }
}

TEST(Run, misuse_is_explained) {
  EXPECT_THAT(lockstep_run({}).output, AllOf(HasSubstr("missing verb"), HasSubstr("run ")));
  EXPECT_EQ(lockstep_run({}).status, 2);
  EXPECT_THAT(lockstep_run({"rnu", "-n", "2", "true"}).output,
              AllOf(HasSubstr("unknown verb 'rnu'; the verbs are:"), HasSubstr("run ")));
  EXPECT_EQ(lockstep_run({"rnu"}).status, 2);
  EXPECT_THAT(complaint({"true"}), HasSubstr("-n"));
  EXPECT_THAT(complaint({"-n", "2"}), HasSubstr("missing program"));
  EXPECT_THAT(complaint({"-n", "2", "--wibble", "x"}), HasSubstr("--wibble"));
  EXPECT_THAT(complaint({"-n", "0", "true"}),
              HasSubstr("-n: expected an integer from 1 to 4096, or auto, got '0'"));
  EXPECT_THAT(complaint({"-n", "4097", "true"}), HasSubstr("or auto, got '4097'"));
  EXPECT_THAT(complaint({"-n", "many", "true"}), HasSubstr("or auto, got 'many'"));
  const std::vector<std::pair<const char*, const char*>> wrong = {
      {"--threads", "0"},      {"--threads", "two"},     {"--bind", "socket"},      {"--prefix", "maybe"},
      {"--show", "0,,1"},      {"--show", "3-1"},        {"--show", "x"},           {"--stdin", "-1"},
      {"--stdin", "first"},    {"--grace", "0"},         {"--stop-grace", "soon"},  {"--timeout", "1 week"},
      {"--join-timeout", "x"}, {"--max-restarts", "-1"}, {"--max-restarts", "all"}, {"--nnodes", "0"},
      {"--node-rank", "x"}};
  for (const auto& [option, value] : wrong)
    EXPECT_THAT(complaint({"-n", "2", std::string(option) + "=" + value, "true"}),
                AllOf(HasSubstr(std::string(option) + ": expected "),
                      HasSubstr(std::string(", got '") + value + "'")));
  EXPECT_THAT(complaint({"-n", "2", "--stdin", "2", "true"}),
              HasSubstr("--stdin: expected ranks from 0 to 1, got '2'"));
  EXPECT_THAT(complaint({"-n", "2", "--show", "0-2", "true"}),
              HasSubstr("--show: expected ranks from 0 to 1, got '2'"));
}

TEST(Run, misuse_of_hosts_is_explained) {
  EXPECT_THAT(complaint({"-n", "1", "--nnodes", "2", "true"}), HasSubstr("need --node-rank"));
  EXPECT_THAT(complaint({"-n", "1", "--nnodes", "2", "--node-rank", "2", "true"}),
              HasSubstr("expected an integer from 0 to 1 with --nnodes 2, got '2'"));
  EXPECT_THAT(complaint({"-n", "1", "--node-rank", "1", "true"}),
              HasSubstr("--node-rank: expected 0 with one host"));
  EXPECT_THAT(complaint({"-n", "1", "--nnodes", "2", "--node-rank", "0", "true"}),
              HasSubstr("need --master HOST:PORT"));
  const std::vector<std::string> two = {"-n", "1", "--nnodes", "2", "--node-rank", "0"};
  auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), two.begin(), two.end());
    more.push_back("true");
    return complaint(more);
  };
  for (const char* master :
       {"node0", "node0:", "node0:0", "node0:99999", ":29500", "fd00::1:29500", "node0:x"})
    EXPECT_THAT(with({"--master", master}), HasSubstr("--master: expected HOST:PORT"));
  EXPECT_THAT(with({"--master-addr", "node0"}), HasSubstr("expected both or neither"));
  EXPECT_THAT(with({"--master", "a:1", "--master-addr", "a"}), HasSubstr("cannot be combined"));
  EXPECT_THAT(with({"--master", "127.0.0.1:29500"}),
              AllOf(HasSubstr("lockstep key --output job.key"), HasSubstr("--key-file job.key")));
}

TEST(Run, help_names_every_option) {
  const auto outcome = lockstep_run({"run", "--help"});
  EXPECT_EQ(outcome.status, 0);
  for (const char* option : {"-n,--nproc N|auto",
                             "--threads K",
                             "--bind auto|cores|none",
                             "--env NAME=VALUE",
                             "--unset-env NAME",
                             "--chdir DIR",
                             "--stdin RANK|none",
                             "--show RANKS",
                             "--prefix auto|always|never",
                             "--log-dir DIR",
                             "DIR/rank-K.restart-R.log",
                             "-q,--quiet",
                             "--timeout TIME",
                             "--join-timeout TIME",
                             "--grace TIME",
                             "--stop-grace TIME",
                             "--max-restarts K",
                             "--nnodes K",
                             "--node-rank K",
                             "--master HOST:PORT",
                             "--key-file FILE",
                             "--interface NAME",
                             "PROGRAM",
                             "Examples:"})
    EXPECT_THAT(outcome.output, HasSubstr(option));
  EXPECT_THAT(lockstep_run({"--version"}).output, HasSubstr("lockstep 0."));
  EXPECT_THAT(lockstep_run({"--help"}).output, HasSubstr("run"));
}

}  // namespace
}  // namespace lockstep::testing
