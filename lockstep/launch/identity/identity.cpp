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

// Range of derived ports: below Linux's ephemeral ports, above the usual servers.
constexpr int kFirstPort = 20000, kLastPort = 32000, kPortsPerJob = 16;

// The variables of one launcher; the local ones may be null.
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
  throw ConfigError(
      fmt::format("{}={} is set but {} is not: set both, as launchers do, or neither", set, value, missing));
}

// Requires 0 <= value < limit.
void check_below(const char* name, int value, const char* limit_name, int limit) {
  if (value >= limit)
    throw bad_value(name, fmt::format("an integer from 0 to {} with {}={}", limit - 1, limit_name, limit),
                    std::to_string(value));
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
    throw bad_value(names.local_size,
                    fmt::format("an integer from 1 to {} with {}={}", *size, names.size, *size),
                    std::to_string(*identity.local_size));
  if (identity.local_rank)
    check_below(names.local_rank, *identity.local_rank, identity.local_size ? names.local_size : names.size,
                identity.local_size.value_or(*size));
}

// ---- SLURM ------------------------------------------------------------------------------------------------

using Above = std::vector<Process>;  // Nearest first.

// Returns "3.0" from the title "slurmstepd: [3.0]" of the nearest slurmstepd, or "3.batch" for a batch
// script. Empty if there is none.
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

// True if srun started this process. A batch script and a salloc shell have SLURM_NTASKS, and the script has
// SLURM_PROCID=0 too, although each is one process; only a step has a step number. Both inherit that number
// if they were submitted from within a step; then the title of the slurmstepd above decides.
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

// SLURM_GTIDS lists the ranks on this node: "0,1,4,5".
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
  // Two clusters may share a host, and each numbers its jobs from 1.
  identity.job = fmt::format("SLURM {} {}", value_of("SLURM_CLUSTER_NAME"), slurm_step());
}

// Jobs and steps that run side by side have consecutive numbers, and so get different ports.
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

// The launcher this process belongs to; empty for other processes. MPICH's ranks are started by a proxy, also
// on mpirun's own host.
std::string_view launcher_of(const Process& process) {
  if (starts_with_any(process.name, {"hydra_pmi_proxy", "pmi_proxy"})) return kMpich.launcher;
  if (starts_with_any(process.name, {"orted", "orterun", "prted", "prterun", "mpirun", "mpiexec"}))
    return kOpenMpi.launcher;
  return process.name == "slurmstepd" ? kSlurm.launcher : "";
}

// Identifies the launcher process that all its ranks on this host descend from, possibly through wrappers.
// Falls back to the parent, for launchers that only implement MPICH's protocol.
std::string process_of_launcher(std::string_view launcher, const Above& above) {
  auto found = std::find_if(above.begin(), above.end(),
                            [&](const Process& process) { return launcher_of(process) == launcher; });
  if (found == above.end()) found = above.begin();
  if (found == above.end()) return {};
  return fmt::format("{}@{}", found->pid, found->start);
}

bool in_slurm_job() { return is_set("SLURM_JOB_ID"); }

// srun --mpi=pmi2 sets MPICH's variables, and --mpi=pmix makes Open MPI set its own; then they belong to the
// step.
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
  // No variable is unique to this job. Each host has its own proxy, so across hosts the master's address,
  // which is required anyway, identifies the job.
  const bool several_hosts = is_set("MASTER_ADDR") && is_set("MASTER_PORT");
  identity.job = fmt::format("MPICH {}", several_hosts ? "" : process_of_launcher(kMpich.launcher, above));
}

// ---- all launchers ------------------------------------------------------------------------------------

std::string shown(const Names& names) {
  return fmt::format("{}={} and {}={}", names.rank, value_of(names.rank), names.size, value_of(names.size));
}

// mpirun's and srun's variables are inherited by nested launchers. If several sets are present, the nearest
// launcher process decides. If none is visible (in a container), mpirun is assumed to be the inner one, as in
// a batch job.
void read_mpi_or_slurm(Identity& identity, const Above& above) {
  std::vector<std::string_view> candidates;
  if (either_is_set(kOpenMpi) && !pmix_is_slurms()) candidates.push_back(kOpenMpi.launcher);
  if (either_is_set(kMpich) && !pmi_is_slurms()) candidates.push_back(kMpich.launcher);
  if (in_slurm_step(above)) candidates.push_back(kSlurm.launcher);
  if (candidates.empty()) {
    if (is_set("PMIX_RANK") && !in_slurm_job())
      throw ConfigError(
          fmt::format("PMIX_RANK={} is set, but nothing gives the number of ranks: set RANK "
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
          fmt::format("{} contradict {}: unset the variables of the outer mpirun, or set RANK and WORLD_SIZE",
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
          "LOCKSTEP_AGENT='{}' is set but RANK and WORLD_SIZE are not; 'lockstep run' sets all three",
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

// The master address is used by jobs on several hosts, and distinguishes jobs that nothing else does.
void read_master(Identity& identity) {
  auto address = env::text("MASTER_ADDR");
  auto port = number("MASTER_PORT", 1, std::numeric_limits<std::uint16_t>::max());
  const bool mpi = identity.launcher == kOpenMpi.launcher || identity.launcher == kMpich.launcher;
  if (identity.launcher == "lockstep run") {
    if (!address || !port) return;  // The agent connects it to its peers.
  } else if (identity.launcher == kSlurm.launcher) {
    if (!address) address = slurm_first_host();
    if (!port) {
      identity.master_port = slurm_port();
      identity.last_master_port = identity.master_port + kPortsPerJob - 1;
    }
  } else if (mpi && !address && !port) {
    return;  // All ranks are on this host; if not, joining fails with an error.
  } else if (!address || !port) {
    throw ConfigError(fmt::format(
        "{} is not set{}: with {} ranks, set it to {}", address ? "MASTER_PORT" : "MASTER_ADDR",
        mpi ? fmt::format(" but {} is", address ? "MASTER_ADDR" : "MASTER_PORT") : "", identity.size,
        address ? "a free port of rank 0's host, from 1 to 65535"
                : "rank 0's host, or 127.0.0.1 if all ranks are on one host"));
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

// The job's name must fit into a unix socket's address, so long names end in a hash of the whole (FNV-1a):
// host names may have 255 characters.
void shorten_job(std::string& job) {
  if (job.size() <= kLongestJob) return;
  std::uint64_t sum = 0xcbf29ce484222325;
  for (const char c : job) sum = (sum ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  job = fmt::format("{} {:016x}", job.substr(0, kLongestJob - 17), sum);
}

// Takes rank and size from the program. If the launcher agrees, its other values are used too.
void take_arguments(Identity& identity, int rank, int size, const std::function<Above()>& above) {
  if (size < 1 || size > kMostRanks)
    throw bad_value("world_size",
                    fmt::format("an integer from 1 to {}, given together with rank", kMostRanks),
                    std::to_string(size));
  if (rank < 0 || rank >= size)
    throw bad_value("rank", fmt::format("an integer from 0 to {} with world_size={}", size - 1, size),
                    std::to_string(rank));
  try {
    identity = identity_of_launcher(above);
  } catch (const ConfigError&) {
    // The program's values take precedence, so a bad environment does not matter.
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
