// Checks the limits of this shell, which the ranks inherit.
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>
#include <lockstep/os/host.h>

#include "doctor_rows.h"

namespace lockstep::cli {
namespace {

rlimit limit_of(__rlimit_resource resource) {
  rlimit limit{RLIM_INFINITY, RLIM_INFINITY};
  ::getrlimit(resource, &limit);
  return limit;
}

std::string count_text(rlim_t value) { return value == RLIM_INFINITY ? "unlimited" : std::to_string(value); }

std::string bytes_text(rlim_t value) {
  return value == RLIM_INFINITY ? "unlimited" : host::bytes_text(value);
}

nlohmann::ordered_json values_of(const rlimit& limit) {
  auto value = [](rlim_t number) {
    return number == RLIM_INFINITY ? nlohmann::ordered_json() : nlohmann::ordered_json(number);
  };
  return {{"soft", value(limit.rlim_cur)}, {"hard", value(limit.rlim_max)}};  // null: unlimited
}

std::string raise_hint(const char* option, const rlimit& limit, rlim_t wanted, const char* name) {
  if (limit.rlim_max >= wanted)
    return fmt::format("ulimit -{} {}", option,
                       limit.rlim_max == RLIM_INFINITY ? wanted : std::min(limit.rlim_max, wanted));
  return fmt::format("above the hard limit: raise '{}' in /etc/security/limits.conf or the service", name);
}

Row files(int ranks) {
  const auto limit = limit_of(RLIMIT_NOFILE);
  // Each rank connects to every other in every group, and the launcher holds some descriptors per rank.
  const rlim_t needed = std::max<rlim_t>(256, 128 + 8 * static_cast<rlim_t>(ranks));
  Row row{"open files",
          fmt::format("{}, hard limit {}", count_text(limit.rlim_cur), count_text(limit.rlim_max))};
  row.values = values_of(limit);
  if (limit.rlim_cur >= std::max<rlim_t>(needed, 1024)) return row;
  row.verdict = limit.rlim_cur < needed ? Verdict::bad : Verdict::note;
  row.finding += limit.rlim_cur < needed ? fmt::format(": a run needs {}", needed) : "";
  row.hint = raise_hint("n", limit, std::max<rlim_t>(needed, 4096), "nofile");
  return row;
}

Row processes(int ranks) {
  const auto limit = limit_of(RLIMIT_NPROC);
  // The limit counts the threads of all processes of this user: LibTorch's pools and the engines' threads.
  const rlim_t needed = 128 + 32 * static_cast<rlim_t>(std::max(ranks, 1));
  Row row{"processes", fmt::format("{} including threads", count_text(limit.rlim_cur))};
  row.values = values_of(limit);
  if (limit.rlim_cur >= std::max<rlim_t>(needed, 1024)) return row;
  row.verdict = limit.rlim_cur < needed ? Verdict::bad : Verdict::note;
  row.finding += limit.rlim_cur < needed ? fmt::format(": a run needs {}", needed) : "";
  row.hint = raise_hint("u", limit, std::max<rlim_t>(needed, 4096), "nproc");
  return row;
}

Row locked_memory() {
  const auto limit = limit_of(RLIMIT_MEMLOCK);
  std::error_code none;
  const bool rdma = std::filesystem::exists("/sys/class/infiniband", none) &&
                    !std::filesystem::is_empty("/sys/class/infiniband", none);
  Row row{"locked memory", bytes_text(limit.rlim_cur)};
  row.values = values_of(limit);
  row.values["rdma"] = rdma;
  if (!rdma) {
    if (limit.rlim_cur != RLIM_INFINITY) row.finding += "; enough without RDMA";
  } else if (limit.rlim_cur < (rlim_t{1} << 30)) {
    row.verdict = Verdict::bad;
    row.finding += ": NCCL and MPI cannot register memory for RDMA";
    row.hint = limit.rlim_max == RLIM_INFINITY
                   ? "ulimit -l unlimited"
                   : "raise 'memlock' in /etc/security/limits.conf or the service, to unlimited";
  }
  return row;
}

Row core_files() {
  const auto limit = limit_of(RLIMIT_CORE);
  const auto pattern = first_line_of("/proc/sys/kernel/core_pattern");
  Row row{"core dumps", {}};
  row.values = values_of(limit);
  row.values["pattern"] = pattern;
  if (pattern.starts_with('|')) {  // The limit is ignored then.
    row.finding = "piped to " + pattern.substr(1, pattern.find(' ') - 1);
    if (pattern.find("systemd-coredump") != std::string::npos) row.hint = "coredumpctl list shows them";
  } else if (limit.rlim_cur == 0) {
    row.verdict = Verdict::note;
    row.finding = "none: a crashing rank leaves no core file";
    row.hint = limit.rlim_max == 0 ? "raise 'core' in /etc/security/limits.conf" : "ulimit -c unlimited";
  } else {
    row.finding = fmt::format("to '{}', at most {}", pattern, bytes_text(limit.rlim_cur));
  }
  return row;
}

}  // namespace

Rows limit_rows(int ranks) { return {files(ranks), processes(ranks), locked_memory(), core_files()}; }

}  // namespace lockstep::cli
