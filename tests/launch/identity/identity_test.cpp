#include <lockstep/launch/identity/identity.h>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include <lockstep/base/error.h>

#include "support/environment.h"
#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::Process;
using Variables = std::map<std::string, std::optional<std::string>>;

// Unsets every relevant variable except the given ones.
Variables only(Variables given) {
  Variables all;
  for (const char* name : {"RANK",
                           "WORLD_SIZE",
                           "LOCAL_RANK",
                           "LOCAL_WORLD_SIZE",
                           "MASTER_ADDR",
                           "MASTER_PORT",
                           "LOCKSTEP_AGENT",
                           "LOCKSTEP_THREADS",
                           "LOCKSTEP_RESTART_COUNT",
                           "TORCHELASTIC_RUN_ID",
                           "TORCHELASTIC_USE_AGENT_STORE",
                           "TORCHELASTIC_RESTART_COUNT",
                           "OMPI_COMM_WORLD_RANK",
                           "OMPI_COMM_WORLD_SIZE",
                           "OMPI_COMM_WORLD_LOCAL_RANK",
                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                           "OMPI_MCA_ess_base_jobid",
                           "PMIX_RANK",
                           "PMIX_NAMESPACE",
                           "PMI_RANK",
                           "PMI_SIZE",
                           "PMI_JOBID",
                           "MPI_LOCALRANKID",
                           "MPI_LOCALNRANKS",
                           "SLURM_JOB_ID",
                           "SLURM_STEP_ID",
                           "SLURM_STEPID",
                           "SLURM_PROCID",
                           "SLURM_NTASKS",
                           "SLURM_STEP_NUM_TASKS",
                           "SLURM_LOCALID",
                           "SLURM_GTIDS",
                           "SLURM_STEP_NODELIST",
                           "SLURM_JOB_NODELIST",
                           "SLURM_CLUSTER_NAME",
                           "SLURM_RESTART_COUNT"})
    all[name] = std::nullopt;
  for (auto& [name, value] : given) all[name] = value;
  return all;
}

Variables join(Variables base, const Variables& changes) {
  for (const auto& [name, value] : changes) base[name] = value;
  return base;
}

// Environments as left by the real launchers.
const Variables kByHand{{"RANK", "3"},        {"WORLD_SIZE", "4"},
                        {"LOCAL_RANK", "1"},  {"LOCAL_WORLD_SIZE", "2"},
                        {"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}};
const Variables kTorchrun = join(kByHand, {{"TORCHELASTIC_RUN_ID", "none"},
                                           {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                           {"TORCHELASTIC_RESTART_COUNT", "2"}});
const Variables kLockstep{{"LOCKSTEP_AGENT", "lockstep-7"},
                          {"RANK", "1"},
                          {"WORLD_SIZE", "2"},
                          {"LOCAL_RANK", "1"},
                          {"LOCAL_WORLD_SIZE", "2"},
                          {"LOCKSTEP_RESTART_COUNT", "1"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                         {"OMPI_MCA_ess_base_jobid", "1536491521"},
                         {"PMIX_RANK", "1"},
                         {"PMIX_NAMESPACE", "1536491521"}};
const Variables kMpich{
    {"PMI_RANK", "4"}, {"PMI_SIZE", "5"}, {"MPI_LOCALRANKID", "4"}, {"MPI_LOCALNRANKS", "5"}};
const Variables kBatch{{"SLURM_JOB_ID", "12"},     {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"},
                       {"SLURM_LOCALID", "0"},     {"SLURM_GTIDS", "0"},  {"SLURM_JOB_NODELIST", "n[3-4]"},
                       {"SLURM_CLUSTER_NAME", "c"}};
const Variables kSrun = join(kBatch, {{"SLURM_STEP_ID", "1"},
                                      {"SLURM_PROCID", "5"},
                                      {"SLURM_NTASKS", "6"},
                                      {"SLURM_STEP_NUM_TASKS", "6"},
                                      {"SLURM_LOCALID", "2"},
                                      {"SLURM_GTIDS", "3,4,5"},
                                      {"SLURM_STEP_NODELIST", "n[07-08]"}});

using Above = std::vector<Process>;

// The tests themselves may run under a launcher, so the ancestors are given too.
detail::Identity identity_from_environment(int rank = -1, int size = -1,
                                           const Above& above = {{7, "bash", 70, ""}}) {
  return detail::identity_from_environment(rank, size, [&] { return above; });
}

detail::Identity identity_in(const Variables& variables, const Above& above = {{7, "bash", 70, ""}}) {
  ScopedEnvironment scope(only(variables));
  return identity_from_environment(-1, -1, above);
}

TEST(Identity, without_a_launcher_it_is_a_world_of_one) {
  const auto identity = identity_in({{"MASTER_ADDR", "left.over"}});
  EXPECT_EQ(identity.rank, 0);
  EXPECT_EQ(identity.size, 1);
  EXPECT_EQ(identity.local_rank, 0);
  EXPECT_EQ(identity.local_size, 1);
  EXPECT_EQ(identity.launcher, "none");
  EXPECT_EQ(identity.threads, std::nullopt);
}

TEST(Identity, lockstep_run_tells_its_agent) {
  const auto identity = identity_in(join(kLockstep, {{"LOCKSTEP_THREADS", "3"}}));
  EXPECT_EQ(identity.launcher, "lockstep run");
  EXPECT_EQ(identity.agent, "lockstep-7");
  EXPECT_EQ(identity.rank, 1);
  EXPECT_EQ(identity.size, 2);
  EXPECT_EQ(identity.restart_count, 1);
  EXPECT_EQ(identity.master_address, "");
  EXPECT_EQ(identity.threads, 3);
}

TEST(Identity, torchrun_serves_a_store_at_the_masters_port) {
  const auto identity = identity_in(kTorchrun);
  EXPECT_EQ(identity.launcher, "torchrun");
  EXPECT_EQ(identity.rank, 3);
  EXPECT_EQ(identity.size, 4);
  EXPECT_EQ(identity.local_rank, 1);
  EXPECT_EQ(identity.local_size, 2);
  EXPECT_EQ(identity.master_address, "a");
  EXPECT_EQ(identity.master_port, 29500);
  EXPECT_EQ(identity.last_master_port, 29500);
  EXPECT_TRUE(identity.store_is_served);
  EXPECT_EQ(identity.restart_count, 2);
  EXPECT_EQ(identity.job, "torchrun none at a:29500 restart 2");
  EXPECT_FALSE(identity_in(join(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).store_is_served);
}

TEST(Identity, variables_set_by_hand_are_torchruns_without_its_store) {
  const auto identity = identity_in(kByHand);
  EXPECT_EQ(identity.launcher, "environment");
  EXPECT_EQ(identity.rank, 3);
  EXPECT_FALSE(identity.store_is_served);
  EXPECT_EQ(identity.restart_count, 0);
  EXPECT_THAT(identity.job, HasSubstr("a:29500"));
}

TEST(Identity, local_variables_may_be_missing) {
  const auto identity = identity_in(join(kByHand, {{"LOCAL_RANK", ""}, {"LOCAL_WORLD_SIZE", std::nullopt}}));
  EXPECT_EQ(identity.local_rank, std::nullopt);
  EXPECT_EQ(identity.local_size, std::nullopt);
}

TEST(Identity, open_mpi_needs_no_master) {
  const auto identity = identity_in(kOpenMpi);
  EXPECT_EQ(identity.launcher, "Open MPI");
  EXPECT_EQ(identity.rank, 1);
  EXPECT_EQ(identity.size, 3);
  EXPECT_EQ(identity.local_rank, 1);
  EXPECT_EQ(identity.local_size, 3);
  EXPECT_EQ(identity.master_address, "");
  EXPECT_EQ(identity.master_port, 0);
  EXPECT_EQ(identity.job, "Open MPI 1536491521 restart 0");
  const auto other = identity_in(
      join(kOpenMpi, {{"PMIX_NAMESPACE", "prterun-vm-7@1"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "9"}}));
  EXPECT_EQ(other.job, "Open MPI prterun-vm-7@1 at a:9 restart 0");
  EXPECT_EQ(other.master_port, 9);
  EXPECT_EQ(other.last_master_port, 9);
  EXPECT_EQ(identity_in(join(kOpenMpi, {{"PMIX_NAMESPACE", ""}})).job, identity.job);
}

TEST(Identity, mpich_is_told_apart_by_its_process) {
  const auto identity = identity_in(kMpich);
  EXPECT_EQ(identity.launcher, "MPICH");
  EXPECT_EQ(identity.rank, 4);
  EXPECT_EQ(identity.size, 5);
  EXPECT_EQ(identity.local_rank, 4);
  EXPECT_EQ(identity.job, "MPICH 7@70 restart 0");  // The parent, without a known MPICH process.
  const Above wrapped{{9, "sh", 90, ""}, {8, "hydra_pmi_proxy", 80, ""}, {7, "mpirun.mpich", 70, ""}};
  EXPECT_EQ(identity_in(kMpich, wrapped).job, "MPICH 8@80 restart 0");
  // Over several hosts there are several such processes.
  EXPECT_EQ(identity_in(join(kMpich, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "9"}})).job,
            "MPICH  at a:9 restart 0");
}

TEST(Identity, srun_tells_hosts_and_a_number_of_which_a_port_is_made) {
  const auto identity = identity_in(join(kSrun, {{"SLURM_RESTART_COUNT", "3"}}));
  EXPECT_EQ(identity.launcher, "SLURM");
  EXPECT_EQ(identity.rank, 5);
  EXPECT_EQ(identity.size, 6);
  EXPECT_EQ(identity.local_rank, 2);
  EXPECT_EQ(identity.local_size, 3);
  EXPECT_EQ(identity.restart_count, 3);
  EXPECT_EQ(identity.job, "SLURM c 12.1 restart 3");
  EXPECT_EQ(identity.master_address, "n07");
  EXPECT_EQ(identity.master_port, 20000 + (12 + 131) * 16);
  EXPECT_EQ(identity.last_master_port, identity.master_port + 15);
  // Any job and step: within the range, and different for neighbours.
  for (const char* job : {"0", "749", "750", "67043327", "4294967295"})
    for (const char* step : {"0", "1", "40000"}) {
      const auto other = identity_in(join(kSrun, {{"SLURM_JOB_ID", job}, {"SLURM_STEP_ID", step}}));
      EXPECT_GE(other.master_port, 20000);
      EXPECT_LT(other.last_master_port, 32000);
    }
  EXPECT_NE(identity_in(join(kSrun, {{"SLURM_JOB_ID", "13"}})).master_port, identity.master_port);
  EXPECT_NE(identity_in(join(kSrun, {{"SLURM_STEP_ID", "2"}})).master_port, identity.master_port);
}

TEST(Identity, under_srun_the_master_may_be_given_in_part) {
  const auto host = identity_in(join(kSrun, {{"MASTER_ADDR", "a"}}));
  EXPECT_EQ(host.master_address, "a");
  EXPECT_EQ(host.last_master_port - host.master_port, 15);
  const auto port = identity_in(join(kSrun, {{"MASTER_PORT", "29500"}}));
  EXPECT_EQ(port.master_address, "n07");
  EXPECT_EQ(port.master_port, 29500);
  EXPECT_EQ(port.last_master_port, 29500);
  EXPECT_EQ(identity_in(join(kSrun, {{"SLURM_STEP_NODELIST", ""}})).master_address, "n3");
}

TEST(Identity, a_batch_script_is_one_process) {
  EXPECT_EQ(identity_in(kBatch).size, 1);
  EXPECT_EQ(identity_in(kBatch).launcher, "none");
  // salloc's shell has even fewer.
  EXPECT_EQ(identity_in({{"SLURM_JOB_ID", "12"}, {"SLURM_NTASKS", "8"}}).size, 1);
  // A job submitted within a step that had PMI inherits it.
  EXPECT_EQ(identity_in(join(kBatch, {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_JOBID", "11.0"}})).size, 1);
  EXPECT_EQ(identity_in(join(kBatch, {{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "slurm.pmix.11.0"}})).launcher,
            "none");
}

TEST(Identity, sruns_own_pmi_is_no_launcher) {
  const auto pmi2 = identity_in(join(kSrun, {{"PMI_RANK", "5"}, {"PMI_SIZE", "6"}, {"PMI_JOBID", "12.1"}}));
  EXPECT_EQ(pmi2.launcher, "SLURM");
  EXPECT_EQ(pmi2.rank, 5);
  const auto pmix = identity_in(join(kSrun, {{"PMIX_RANK", "5"},
                                             {"PMIX_NAMESPACE", "slurm.pmix.12.1"},
                                             {"OMPI_COMM_WORLD_RANK", "5"},
                                             {"OMPI_COMM_WORLD_SIZE", "6"}}));
  EXPECT_EQ(pmix.launcher, "SLURM");
  EXPECT_EQ(pmix.rank, 5);
}

TEST(Identity, the_text_of_a_job_fits_into_a_socket_and_still_tells_them_apart) {
  const std::string host = std::string(200, 'h') + ".example.org";
  auto job = [&](const char* port, const char* restart) {
    return identity_in(join(kTorchrun, {{"TORCHELASTIC_RUN_ID", "6f8a1c52-3c0e-4f0d-9a54-0d5a2f3b7c11"},
                                        {"MASTER_ADDR", host},
                                        {"MASTER_PORT", port},
                                        {"TORCHELASTIC_RESTART_COUNT", restart}}))
        .job;
  };
  EXPECT_EQ(job("1", "0").size(), 72u);
  EXPECT_EQ(job("1", "0"), job("1", "0"));
  EXPECT_NE(job("1", "0"), job("1", "1"));
  EXPECT_NE(job("1", "0"), job("2", "0"));
}

TEST(Identity, the_restart_count_is_the_launchers) {
  const Variables all{
      {"LOCKSTEP_RESTART_COUNT", "1"}, {"TORCHELASTIC_RESTART_COUNT", "2"}, {"SLURM_RESTART_COUNT", "3"}};
  EXPECT_EQ(identity_in(join(kLockstep, all)).restart_count, 1);
  EXPECT_EQ(identity_in(join(kTorchrun, all)).restart_count, 2);
  EXPECT_EQ(identity_in(join(kOpenMpi, {{"SLURM_RESTART_COUNT", "3"}})).restart_count, 3);
  EXPECT_EQ(identity_in(join(kLockstep, {{"LOCKSTEP_RESTART_COUNT", ""}, {"SLURM_RESTART_COUNT", "3"}}))
                .restart_count,
            0);
}

// Variables of several launchers are set: which one wins without a launcher process above.
TEST(Identity, precedence) {
  struct {
    Variables variables;
    std::string launcher;
  } const cases[] = {
      {join(join(join(kSrun, kOpenMpi), kTorchrun), kLockstep), "lockstep run"},  // The others enclose it.
      {join(kTorchrun, kLockstep), "lockstep run"},
      {join(kSrun, kLockstep), "lockstep run"},
      {join(kMpich, kLockstep), "lockstep run"},
      {join(kSrun, kTorchrun), "torchrun"},
      {join(kOpenMpi, kTorchrun), "torchrun"},
      {join(kMpich, kByHand), "environment"},
      {join(kSrun, kByHand), "environment"},
      {join(kSrun, kOpenMpi), "Open MPI"},
      {join(kBatch, kOpenMpi), "Open MPI"},
      {join(kSrun, kMpich), "MPICH"},
      {join(kBatch, kMpich), "MPICH"},
      {join(join(kSrun, kMpich), {{"PMI_JOBID", "12.1"}}), "MPICH"},  // mpirun inside srun --mpi=pmi2
      {kSrun, "SLURM"},
  };
  for (const auto& [variables, launcher] : cases) EXPECT_EQ(identity_in(variables).launcher, launcher);
}

TEST(Identity, of_several_launchers_the_nearest_counts) {
  const auto all = join(join(kSrun, kOpenMpi), kMpich);
  auto launcher_below = [](const std::vector<std::string>& names, const Variables& variables) {
    Above above;
    for (const auto& name : names)
      above.push_back({7, name, 70, name == "slurmstepd" ? "slurmstepd: [12.1] " : ""});
    return identity_in(variables, above).launcher;
  };
  EXPECT_EQ(launcher_below({"orted", "slurmstepd"}, all), "Open MPI");
  EXPECT_EQ(launcher_below({"slurmstepd", "mpirun.openmpi"}, all), "SLURM");
  EXPECT_EQ(launcher_below({"sh", "hydra_pmi_proxy", "mpirun"}, all), "MPICH");
  EXPECT_EQ(launcher_below({"sh", "mpiexec.openmpi", "hydra_pmi_proxy"}, all), "Open MPI");
  // A launcher that left no variables is ignored.
  EXPECT_EQ(launcher_below({"hydra_pmi_proxy", "orted"}, join(kSrun, kOpenMpi)), "Open MPI");
}

TEST(Identity, the_variables_of_a_step_may_be_inherited_by_what_is_no_step) {
  auto size_below = [](const std::string& title) {
    return identity_in(kSrun, {{8, "sh", 80, "sh "}, {7, "slurmstepd", 70, title}}).size;
  };
  EXPECT_EQ(size_below("slurmstepd: [12.1] "), 6);
  EXPECT_EQ(size_below("slurmstepd: [12.batch] "), 1);
  EXPECT_EQ(size_below("slurmstepd: [13.batch] "), 1);
  EXPECT_EQ(size_below("slurmstepd: [12.extern] "), 1);
  EXPECT_EQ(size_below("slurmstepd: [11.1] "), 1);
  EXPECT_EQ(size_below("slurmstepd: [12.0] "), 1);
  // Titles without a known format.
  EXPECT_EQ(size_below(""), 6);
  EXPECT_EQ(size_below("slurmstepd "), 6);
  EXPECT_EQ(size_below("slurmstepd: ] [ "), 6);
  EXPECT_EQ(size_below("slurmstepd: [12+0.1] "), 6);
}

// The ancestors with these names, the farthest first.
TEST(Ancestors, are_told_from_the_nearest_with_names_titles_and_start) {
  std::array<int, 2> ends;
  ASSERT_EQ(::pipe(ends.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    for (const char* name : {"hydra_pmi_proxy", "sh (1) x)"}) {
      ::prctl(PR_SET_NAME, name);
      const pid_t next = ::fork();
      if (next == 0) continue;
      int status = 1;
      ::waitpid(next, &status, 0);
      ::_exit(WEXITSTATUS(status));
    }
    std::string text;
    for (const auto& each : detail::ancestors())
      text += std::to_string(each.pid) + "|" + each.name + "|" + each.title + "|" +
              std::to_string(each.start) + "\n";
    ::_exit(::write(ends[1], text.data(), text.size()) < 0);
  }
  ::close(ends[1]);
  std::string text(1 << 16, '\0');
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(0, ::read(ends[0], text.data(), text.size()))));
  ::close(ends[0]);
  int status = 1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(text, ContainsRegex("^[0-9]+\\|sh \\(1\\) x\\)\\|.*plain_tests.*\\|[1-9][0-9]*\n"));
  EXPECT_THAT(text, HasSubstr("\n" + std::to_string(child) + "|hydra_pmi_proxy|"));
  EXPECT_THAT(text, HasSubstr("\n" + std::to_string(::getpid()) + "|"));
}

TEST(Identity, arguments_go_before_the_environment) {
  ScopedEnvironment scope(only(kByHand));
  EXPECT_EQ(identity_from_environment(1, 2).rank, 1);
  EXPECT_EQ(identity_from_environment(1, 2).size, 2);
  EXPECT_EQ(identity_from_environment(1, 2).launcher, "the program");
  for (auto [rank, size] : {std::pair(2, 2), {-1, 2}, {0, 0}, {0, -1}})
    EXPECT_THAT(error_of<ConfigError>([&, r = rank, s = size] { identity_from_environment(r, s); }),
                HasSubstr("expected an integer from"));
  ScopedEnvironment broken("WORLD_SIZE", "none");
  EXPECT_EQ(identity_from_environment(0, 1).size, 1);
}

TEST(Identity, arguments_that_say_what_the_launcher_says_have_its_job) {
  {
    ScopedEnvironment scope(only(kOpenMpi));
    EXPECT_EQ(identity_from_environment(1, 3).job, identity_from_environment().job);
    EXPECT_EQ(identity_from_environment(1, 3).local_size, 3);
    EXPECT_THAT(error_of<ConfigError>([] { identity_from_environment(0, 3); }),
                HasSubstr("MASTER_ADDR is not set"));
  }
  ScopedEnvironment scope(only(kLockstep));
  EXPECT_EQ(identity_from_environment(1, 2).agent, "lockstep-7");
  EXPECT_EQ(identity_from_environment(0, 1).agent, "");
}

struct BadCase {
  Variables variables;
  std::vector<std::string> parts;  // Of the error.
};

TEST(Identity, what_is_wrong_is_named) {
  auto by_hand = [](const Variables& changes) { return join(kByHand, changes); };
  const BadCase cases[] = {
      {by_hand({{"RANK", "4"}}), {"RANK: expected", "WORLD_SIZE=4", "0 to 3", "got '4'"}},
      {by_hand({{"RANK", "-1"}}), {"RANK: expected", "got '-1'"}},
      {by_hand({{"RANK", "two"}}), {"RANK: expected an integer", "got 'two'"}},
      {by_hand({{"RANK", std::nullopt}}), {"WORLD_SIZE=4", "RANK is not"}},
      {by_hand({{"WORLD_SIZE", std::nullopt}}), {"RANK=3", "WORLD_SIZE is not"}},
      {by_hand({{"WORLD_SIZE", "0"}}), {"WORLD_SIZE: expected", "1 to", "got '0'"}},
      {by_hand({{"MASTER_ADDR", ""}}), {"MASTER_ADDR is not set", "4 ranks", "127.0.0.1"}},
      {by_hand({{"MASTER_PORT", std::nullopt}}), {"MASTER_PORT is not set", "65535"}},
      {by_hand({{"MASTER_PORT", "70000"}}), {"MASTER_PORT: expected", "65535, got '70000'"}},
      {by_hand({{"LOCAL_RANK", "2"}}), {"LOCAL_RANK: expected", "LOCAL_WORLD_SIZE=2", "0 to 1", "got '2'"}},
      {by_hand({{"LOCAL_RANK", "9"}, {"LOCAL_WORLD_SIZE", ""}}),
       {"LOCAL_RANK: expected", "WORLD_SIZE=4", "0 to 3"}},
      {by_hand({{"LOCAL_WORLD_SIZE", "5"}}), {"LOCAL_WORLD_SIZE: expected", "WORLD_SIZE=4", "1 to 4"}},
      {by_hand({{"LOCKSTEP_THREADS", "0"}}), {"LOCKSTEP_THREADS: expected", "1 to"}},
      {by_hand({{"LOCKSTEP_RESTART_COUNT", "-1"}}), {"LOCKSTEP_RESTART_COUNT: expected"}},
      {join(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "perhaps"}}),
       {"TORCHELASTIC_USE_AGENT_STORE: expected", "got 'perhaps'"}},
      {join(kTorchrun, {{"MASTER_PORT", ""}}), {"MASTER_PORT is not set"}},
      {{{"LOCKSTEP_AGENT", "x"}}, {"LOCKSTEP_AGENT='x'", "RANK and WORLD_SIZE are not"}},
      {{{"LOCKSTEP_AGENT", "x"}, {"RANK", "0"}}, {"RANK=0", "WORLD_SIZE is not"}},
      {join(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "3"}}),
       {"OMPI_COMM_WORLD_RANK: expected", "OMPI_COMM_WORLD_SIZE=3"}},
      {join(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", ""}}),
       {"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE is not"}},
      {join(kOpenMpi, {{"MASTER_ADDR", "a"}}), {"MASTER_PORT is not set but MASTER_ADDR is"}},
      {join(kOpenMpi, {{"MASTER_PORT", "9"}}), {"MASTER_ADDR is not set but MASTER_PORT is"}},
      {join(kMpich, {{"PMI_RANK", "5"}}), {"PMI_RANK: expected", "PMI_SIZE=5", "0 to 4"}},
      {join(kMpich, {{"PMI_RANK", ""}}), {"PMI_SIZE=5", "PMI_RANK is not"}},
      {join(kMpich, {{"MPI_LOCALRANKID", "5"}}), {"MPI_LOCALRANKID: expected", "MPI_LOCALNRANKS=5"}},
      {join(kMpich, kOpenMpi), {"OMPI_COMM_WORLD_RANK=1", "PMI_RANK=4", "contradict"}},
      {{{"PMIX_RANK", "1"}}, {"PMIX_RANK=1", "the number of ranks"}},
      {join(kSrun, {{"SLURM_PROCID", "6"}}), {"SLURM_PROCID: expected", "SLURM_STEP_NUM_TASKS=6", "0 to 5"}},
      {join(kSrun, {{"SLURM_STEP_NUM_TASKS", ""}, {"SLURM_NTASKS", "5"}}),
       {"SLURM_PROCID: expected", "SLURM_NTASKS=5", "0 to 4"}},
      {join(kSrun, {{"SLURM_STEP_NUM_TASKS", ""}, {"SLURM_NTASKS", ""}}),
       {"SLURM_PROCID=5", "SLURM_NTASKS is not"}},
      {join(kSrun, {{"SLURM_STEP_NODELIST", "n[3-1]"}}),
       {"SLURM_STEP_NODELIST: expected", "got 'n[3-1]'", "counts down"}},
      {join(kSrun, {{"SLURM_JOB_ID", "x"}}), {"SLURM_JOB_ID: expected", "got 'x'"}},
  };
  for (const auto& [variables, parts] : cases) {
    const auto text = error_of<ConfigError>([&, &v = variables] { identity_in(v); });
    for (const auto& part : parts) EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST(Identity, the_world_of_one_of_a_launcher_needs_no_more) {
  for (const auto& variables : {Variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}},
                                join(kSrun, {{"SLURM_PROCID", "0"},
                                             {"SLURM_LOCALID", "0"},
                                             {"SLURM_STEP_NUM_TASKS", "1"},
                                             {"SLURM_STEP_NODELIST", "]"}}),
                                join(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"},
                                                {"OMPI_COMM_WORLD_SIZE", "1"},
                                                {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                                                {"MASTER_ADDR", "a"}})}) {
    const auto identity = identity_in(variables);
    EXPECT_EQ(identity.size, 1);
    EXPECT_EQ(identity.local_rank, 0);
    EXPECT_EQ(identity.master_address, "");
  }
}

}  // namespace
}  // namespace lockstep::testing
