#include <lockstep/launch/identity/identity.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/launch/identity/nodelist.h>

namespace lockstep::detail {
namespace {

constexpr int kMostRanks = 1 << 20;
constexpr int kMostThreads = 4096;
constexpr std::size_t kLongestJob = 72;

// Ports that are worked out: below those that Linux gives to outgoing connections, above the usual servers.
constexpr int kFirstPort = 20000, kLastPort = 32000, kPortsPerJob = 16;

// The variables of one launcher; local ones may be null.
struct Names {
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

constexpr Names kTorchrun{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpi{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                         "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names kMpich{"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
constexpr Names kSlurm{"SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr};

std::optional<int> number(const char* name, int lowest, int highest) {
  auto value = env::integer(name, lowest, highest);
  if (!value) return std::nullopt;
  return static_cast<int>(*value);
}

bool is_set(const char* name) { return env::text(name).has_value(); }
bool either_is_set(const Names& names) { return is_set(names.rank) || is_set(names.size); }

std::string value_of(const char* name) { return env::text(name).value_or(""); }

void refuse_half_a_pair(const char* set, int value, const char* missing) {
  throw ConfigError(fmt::format(
      "{}={} is set and {} is not: a launcher sets both, a program alone has neither", set, value, missing));
}

// A number that counts from 0 to below another.
void check_below(const char* name, int value, const char* limit_name, int limit) {
  if (value >= limit)
    throw ConfigError(fmt::format("{}={} is not allowed: with {}={} it is from 0 to {}", name, value,
                                  limit_name, limit, limit - 1));
}

void read_ranks(Identity& identity, const Names& names) {
  const auto size = number(names.size, 1, kMostRanks);
  const auto rank = number(names.rank, 0, kMostRanks - 1);
  if (rank && !size) refuse_half_a_pair(names.rank, *rank, names.size);
  if (size && !rank) refuse_half_a_pair(names.size, *size, names.rank);
  check_below(names.rank, *rank, names.size, *size);
  identity.rank = *rank;
  identity.size = *size;
  identity.launcher = names.launcher;
  if (names.local_size) identity.local_size = number(names.local_size, 1, kMostRanks);
  identity.local_rank = number(names.local_rank, 0, kMostRanks - 1);
  if (identity.local_size && *identity.local_size > *size)
    throw ConfigError(fmt::format("{}={} is not allowed: with {}={} it is from 1 to {}", names.local_size,
                                  *identity.local_size, names.size, *size, *size));
  if (identity.local_rank)
    check_below(names.local_rank, *identity.local_rank, identity.local_size ? names.local_size : names.size,
                identity.local_size.value_or(*size));
}

// ---- SLURM ------------------------------------------------------------------------------------------------

using Above = std::vector<Process>;  // the nearest first

// "3.0" of the nearest slurmstepd's title, "slurmstepd: [3.0]"; "3.batch" for a batch script. Empty: not
// seen.
std::string slurm_step_above(const Above& above) {
  for (const Process& process : above) {
    if (process.name != "slurmstepd") continue;
    const auto open = process.title.find('['), close = process.title.find(']');
    if (open == std::string::npos || close == std::string::npos || close < open) return {};
    return process.title.substr(open + 1, close - open - 1);
  }
  return {};
}

std::string slurm_step() {
  return fmt::format("{}.{}", value_of("SLURM_JOB_ID"),
                     env::text("SLURM_STEP_ID").value_or(value_of("SLURM_STEPID")));
}

// Whether srun started us. A batch script and the shell of salloc have SLURM_NTASKS, and the script
// SLURM_PROCID=0 too, though it is one process; only a step has a number. Both inherit that of a step in
// which they were asked for, and then the title of the daemon above tells.
bool in_slurm_step(const Above& all_above) {
  if (!is_set("SLURM_JOB_ID") || !is_set("SLURM_PROCID")) return false;
  if (!is_set("SLURM_STEP_ID") && !is_set("SLURM_STEPID")) return false;
  const auto above = slurm_step_above(all_above);
  const auto dot = above.rfind('.');
  if (dot == std::string::npos || above == slurm_step()) return true;
  const auto step = above.substr(dot + 1);
  const bool numbers = above.find_first_not_of("0123456789.") == std::string::npos;
  return !numbers && step != "batch" && step != "extern";
}

// SLURM_GTIDS has the ranks on this node: "0,1,4,5".
std::optional<int> slurm_local_size() {
  const auto ranks = value_of("SLURM_GTIDS");
  if (ranks.empty() || ranks.find_first_not_of("0123456789,") != std::string::npos) return std::nullopt;
  return static_cast<int>(std::count(ranks.begin(), ranks.end(), ',')) + 1;
}

void read_slurm(Identity& identity) {
  Names names = kSlurm;
  if (!is_set(names.size)) names.size = "SLURM_NTASKS";
  read_ranks(identity, names);
  const auto local_size = slurm_local_size();
  if (local_size && *local_size <= identity.size && identity.local_rank.value_or(0) < *local_size)
    identity.local_size = local_size;
  // Two clusters may share a host, and each counts its jobs from 1.
  identity.job = fmt::format("SLURM {} {}", value_of("SLURM_CLUSTER_NAME"), slurm_step());
}

// Jobs and steps that run side by side have near numbers, and so different ports.
int slurm_port() {
  const auto job = env::integer("SLURM_JOB_ID", 0, std::numeric_limits<std::uint32_t>::max()).value_or(0);
  const char* step_name = is_set("SLURM_STEP_ID") ? "SLURM_STEP_ID" : "SLURM_STEPID";
  const auto step = env::integer(step_name, 0, std::numeric_limits<std::uint32_t>::max()).value_or(0);
  constexpr int kRanges = (kLastPort - kFirstPort) / kPortsPerJob;
  return kFirstPort + static_cast<int>((job + step * 131) % kRanges) * kPortsPerJob;
}

std::string slurm_first_host() {
  const char* name = is_set("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
  const auto list = env::text(name);
  return list ? expand_nodelist(name, *list).front() : std::string();
}

// ---- MPI --------------------------------------------------------------------------------------------------

bool starts_with_any(const std::string& name, std::initializer_list<std::string_view> beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(),
                     [&](std::string_view beginning) { return name.starts_with(beginning); });
}

// Whose process that is; empty: no launcher's. MPICH's ranks come from a proxy, also on mpirun's own host.
std::string_view launcher_of(const Process& process) {
  if (starts_with_any(process.name, {"hydra_pmi_proxy", "pmi_proxy"})) return kMpich.launcher;
  if (starts_with_any(process.name, {"orted", "orterun", "prted", "prterun", "mpirun", "mpiexec"}))
    return kOpenMpi.launcher;
  return process.name == "slurmstepd" ? kSlurm.launcher : "";
}

// The process of that launcher which all its ranks on this host come from: wrappers may stand between. The
// parent where there is none, as with launchers that only speak MPICH's protocol.
std::string process_of_launcher(std::string_view launcher, const Above& above) {
  auto found = std::find_if(above.begin(), above.end(),
                            [&](const Process& process) { return launcher_of(process) == launcher; });
  if (found == above.end()) found = above.begin();
  if (found == above.end()) return {};
  return fmt::format("{}@{}", found->pid, found->start);
}

bool in_slurm_job() { return is_set("SLURM_JOB_ID"); }

// srun --mpi=pmi2 sets MPICH's variables, and --mpi=pmix leads Open MPI to set its own: they are the step's
// then.
bool pmi_is_slurms() { return in_slurm_job() && is_set("PMI_JOBID") && !is_set(kMpich.local_rank); }
bool pmix_is_slurms() { return in_slurm_job() && value_of("PMIX_NAMESPACE").starts_with("slurm."); }

void read_open_mpi(Identity& identity, const Above& above) {
  read_ranks(identity, kOpenMpi);
  auto unique = env::text("PMIX_NAMESPACE").value_or(value_of("OMPI_MCA_ess_base_jobid"));
  if (unique.empty()) unique = process_of_launcher(kOpenMpi.launcher, above);
  identity.job = fmt::format("Open MPI {}", unique);
}

void read_mpich(Identity& identity, const Above& above) {
  read_ranks(identity, kMpich);
  // Nothing in the environment is this job's alone. Each host has a proxy of its own, so that over several
  // hosts the master's address, which they need anyway, must do.
  const bool several_hosts = is_set("MASTER_ADDR") && is_set("MASTER_PORT");
  identity.job = fmt::format("MPICH {}", several_hosts ? "" : process_of_launcher(kMpich.launcher, above));
}

// ---- all of them ------------------------------------------------------------------------------------------

std::string shown(const Names& names) {
  return fmt::format("{}={} and {}={}", names.rank, value_of(names.rank), names.size, value_of(names.size));
}

// mpirun's and srun's variables are inherited by what they start, other launchers among that: where there are
// several, the nearest process decides. Where none can be seen (a container), mpirun is taken for the inner
// one, as it is in a batch job.
void read_mpi_or_slurm(Identity& identity, const Above& above) {
  std::vector<std::string_view> candidates;
  if (either_is_set(kOpenMpi) && !pmix_is_slurms()) candidates.push_back(kOpenMpi.launcher);
  if (either_is_set(kMpich) && !pmi_is_slurms()) candidates.push_back(kMpich.launcher);
  if (in_slurm_step(above)) candidates.push_back(kSlurm.launcher);
  if (candidates.empty()) {
    if (is_set("PMIX_RANK") && !in_slurm_job())
      throw ConfigError(
          fmt::format("PMIX_RANK={} is set, and nothing says how many ranks there are: set RANK "
                      "and WORLD_SIZE, or use mpirun or srun",
                      value_of("PMIX_RANK")));
    return;
  }
  auto chosen = candidates.front();
  if (candidates.size() > 1) {
    auto nearest = std::find_if(above.begin(), above.end(), [&](const Process& process) {
      return std::count(candidates.begin(), candidates.end(), launcher_of(process)) > 0;
    });
    if (nearest != above.end())
      chosen = launcher_of(*nearest);
    else if (candidates[1] == kMpich.launcher)
      throw ConfigError(
          fmt::format("{} contradict {}: unset those of the outer mpirun, or set RANK and WORLD_SIZE",
                      shown(kOpenMpi), shown(kMpich)));
  }
  if (chosen == kOpenMpi.launcher)
    read_open_mpi(identity, above);
  else if (chosen == kMpich.launcher)
    read_mpich(identity, above);
  else
    read_slurm(identity);
}

Identity identity_of_launcher(const std::function<Above()>& above) {
  Identity identity;
  if (auto agent = env::text("LOCKSTEP_AGENT")) {
    if (!either_is_set(kTorchrun))
      throw ConfigError(fmt::format(
          "LOCKSTEP_AGENT='{}' is set, and RANK and WORLD_SIZE are not: 'lockstep run' sets all three",
          *agent));
    read_ranks(identity, kTorchrun);
    identity.launcher = "lockstep run";
    identity.agent = *agent;
  } else if (either_is_set(kTorchrun)) {
    read_ranks(identity, kTorchrun);
    const bool elastic = is_set("TORCHELASTIC_RUN_ID") || is_set("TORCHELASTIC_USE_AGENT_STORE");
    if (!elastic) identity.launcher = "environment";
    identity.job = fmt::format("{} {}", identity.launcher, value_of("TORCHELASTIC_RUN_ID"));
  } else {
    read_mpi_or_slurm(identity, above());
  }
  return identity;
}

// For several hosts, and to tell jobs apart that nothing else does.
void read_master(Identity& identity) {
  auto address = env::text("MASTER_ADDR");
  auto port = number("MASTER_PORT", 1, std::numeric_limits<std::uint16_t>::max());
  const bool mpi = identity.launcher == kOpenMpi.launcher || identity.launcher == kMpich.launcher;
  if (identity.launcher == "lockstep run") {
    if (!address || !port) return;  // its agent is the way to the others
  } else if (identity.launcher == kSlurm.launcher) {
    if (!address) address = slurm_first_host();
    if (!port) {
      identity.master_port = slurm_port();
      identity.last_master_port = identity.master_port + kPortsPerJob - 1;
    }
  } else if (mpi && !address && !port) {
    return;  // all of them are on this host, or it will be said that they are not
  } else if (!address || !port) {
    throw ConfigError(fmt::format(
        "{} is not set{}: with {} ranks it must be {}", address ? "MASTER_PORT" : "MASTER_ADDR",
        mpi ? fmt::format(", and {} is", address ? "MASTER_ADDR" : "MASTER_PORT") : "", identity.size,
        address ? "a free port of rank 0's host, from 1 to 65535"
                : "rank 0's host, 127.0.0.1 where all ranks are on one"));
  }
  identity.master_address = *address;
  if (port) identity.master_port = identity.last_master_port = *port;
  identity.store_is_served =
      identity.launcher == kTorchrun.launcher && env::flag("TORCHELASTIC_USE_AGENT_STORE", false);
  if (port) identity.job += fmt::format(" at {}:{}", *address, *port);
}

void read_restart_count(Identity& identity) {
  const char* name = identity.launcher == kTorchrun.launcher ? "TORCHELASTIC_RESTART_COUNT"
                     : identity.launcher == "lockstep run" || is_set("LOCKSTEP_RESTART_COUNT")
                         ? "LOCKSTEP_RESTART_COUNT"
                         : "SLURM_RESTART_COUNT";
  identity.restart_count = number(name, 0, kMostRanks).value_or(0);
  if (!identity.job.empty()) identity.job += fmt::format(" restart {}", identity.restart_count);
}

// A name made of it must fit into the address of a unix socket, so long ones end in a sum over all of it
// (FNV-1a): names of hosts have up to 255 characters.
void shorten_job(std::string& job) {
  if (job.size() <= kLongestJob) return;
  std::uint64_t sum = 0xcbf29ce484222325;
  for (const char c : job) sum = (sum ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  job = fmt::format("{} {:016x}", job.substr(0, kLongestJob - 17), sum);
}

// What the program says of itself. Where the launcher says the same, the rest of what it says holds too.
void take_arguments(Identity& identity, int rank, int size, const std::function<Above()>& above) {
  if (size < 1 || size > kMostRanks)
    throw ConfigError(fmt::format("world_size={} is not allowed: from 1 to {} is, given together with rank",
                                  size, kMostRanks));
  if (rank < 0 || rank >= size)
    throw ConfigError(
        fmt::format("rank={} is not allowed: with world_size={} it is from 0 to {}", rank, size, size - 1));
  try {
    identity = identity_of_launcher(above);
  } catch (const ConfigError&) {
    // The program knows better, so what is wrong there does not matter.
  }
  if (identity.launcher != "none" && identity.rank == rank && identity.size == size) return;
  identity = Identity{};
  identity.rank = rank;
  identity.size = size;
  identity.job = "program";
}

}  // namespace

Identity identity_from_environment(int rank, int size, const std::function<std::vector<Process>()>& above) {
  const bool given = rank >= 0 || size >= 0;
  Identity identity;
  if (given)
    take_arguments(identity, rank, size, above);
  else
    identity = identity_of_launcher(above);
  if (identity.size > 1)
    read_master(identity);
  else
    identity.local_rank = 0, identity.local_size = 1;
  read_restart_count(identity);
  shorten_job(identity.job);
  identity.threads = number("LOCKSTEP_THREADS", 1, kMostThreads);
  if (given) identity.launcher = "the program";
  return identity;
}

}  // namespace lockstep::detail
