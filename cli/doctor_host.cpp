// Checks the machine and its kernel: processors, memory, clock.
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/timex.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hwloc.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/text.h>
#include <lockstep/os/host.h>

#include "doctor_rows.h"

namespace lockstep::cli {

std::string first_line_of(const std::filesystem::path& file) {
  std::string line;
  std::ifstream in(file);
  std::getline(in, line);
  return line;
}

namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20, kGiB = kMiB << 10;

struct Shape {
  int packages = 0, numa_nodes = 0, cores = 0, processors = 0;
};

Shape shape_of_this_machine() {
  Shape shape;
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return shape;
  // The whole machine, not only what the cgroup allows, because both are compared.
  hwloc_topology_set_flags(topology, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
  if (hwloc_topology_load(topology) == 0) {
    auto count = [&](hwloc_obj_type_t type) { return std::max(0, hwloc_get_nbobjs_by_type(topology, type)); };
    shape = {count(HWLOC_OBJ_PACKAGE), count(HWLOC_OBJ_NUMANODE), count(HWLOC_OBJ_CORE), count(HWLOC_OBJ_PU)};
  }
  hwloc_topology_destroy(topology);
  return shape;
}

Row cores(int ranks) {
  const auto shape = shape_of_this_machine();
  const int usable = host::available_cores(), affinity = host::affinity_cores();
  const auto quota = host::cpu_quota();
  Row row{"cores",
          fmt::format("{} usable of {}: {}, {}, {}", usable, std::max(shape.processors, affinity),
                      detail::counted(shape.packages, "socket"),
                      detail::counted(shape.numa_nodes, "NUMA node"), detail::counted(shape.cores, "core"))};
  if (shape.cores > 0 && shape.processors > shape.cores)
    row.finding += fmt::format(" with {} threads each", shape.processors / shape.cores);
  if (affinity < shape.processors) row.finding += fmt::format("; affinity allows {}", affinity);
  if (quota) row.finding += fmt::format("; the cgroup's quota is {:.3g}", *quota);
  row.values = {{"usable", usable},         {"affinity", affinity},
                {"quota", nullptr},         {"processors", shape.processors},
                {"cores", shape.cores},     {"numa_nodes", shape.numa_nodes},
                {"sockets", shape.packages}};
  if (quota) row.values["quota"] = *quota;
  if (ranks > usable) {
    row.verdict = Verdict::note;
    row.finding += fmt::format(", shared by {} ranks", ranks);
    row.hint =
        fmt::format("with more than {}, ranks wait for each other's cores", detail::counted(usable, "rank"));
  }
  return row;
}

Row load() {
  std::array<double, 3> average{};
  Row row{"load", "unknown"};
  if (::getloadavg(average.data(), 3) != 3) return row;
  const int usable = host::available_cores();
  row.finding = fmt::format("{:.2f} in the last minute, {:.2f} in 15, for {}", average[0], average[2],
                            detail::counted(usable, "core"));
  row.values = {{"1min", average[0]}, {"5min", average[1]}, {"15min", average[2]}};
  if (average[0] > 0.5 * usable) {
    row.verdict = Verdict::note;
    row.hint = "other processes are busy here: ranks will wait for cores, and timings will vary";
  }
  return row;
}

Row memory(int ranks) {
  const auto system = host::system_memory();
  const auto cgroup = host::cgroup_memory();
  auto available = system.available;
  Row row{"memory", fmt::format("{} available of {}", host::bytes_text(system.available),
                                host::bytes_text(system.total))};
  row.values = {
      {"total", system.total}, {"available", system.available}, {"limit", nullptr}, {"usage", nullptr}};
  if (cgroup.usage) row.values["usage"] = *cgroup.usage;
  if (cgroup.limit && *cgroup.limit < system.total) {
    const auto usage = cgroup.usage.value_or(0);
    row.values["limit"] = *cgroup.limit;
    row.finding += fmt::format("; the cgroup uses {} of its limit of {}", host::bytes_text(usage),
                               host::bytes_text(*cgroup.limit));
    available = std::min(available, *cgroup.limit - std::min(usage, *cgroup.limit));
  }
  // LibTorch alone takes about 300 MiB in each rank, more with CUDA.
  const auto count = static_cast<std::uint64_t>(std::max(ranks, 1));
  if (available < count * 300 * kMiB) {
    row.verdict = Verdict::bad;
    row.hint =
        fmt::format("{} with LibTorch need at least {}", detail::counted(static_cast<int>(count), "process"),
                    host::bytes_text(count * 300 * kMiB));
  } else if (available < count * kGiB) {
    row.verdict = Verdict::note;
    row.hint = "less than 1 GiB per rank: enough for small models only";
  }
  return row;
}

Row swap() {
  std::ifstream in("/proc/meminfo");
  std::uint64_t total = 0, unused = 0, value = 0;
  for (std::string line, key; std::getline(in, line);) {
    if (!(std::istringstream(line) >> key >> value)) continue;
    if (key == "SwapTotal:") total = value * 1024;
    if (key == "SwapFree:") unused = value * 1024;
  }
  Row row{"swap", "none"};
  row.values = {{"total", total}, {"used", total - unused}};
  if (total == 0) return row;
  row.finding = fmt::format("{} used of {}", host::bytes_text(total - unused), host::bytes_text(total));
  if (total - unused > 64 * kMiB) {
    row.verdict = Verdict::note;
    row.hint = "memory has been short here; a rank whose pages are swapped out delays all ranks";
  }
  return row;
}

Row shared_memory() {
  struct statvfs space {};
  Row row{"/dev/shm", "absent; Lockstep does not need it, but PyTorch's data loaders do"};
  row.verdict = Verdict::note;
  row.values["bytes"] = 0;
  if (::statvfs("/dev/shm", &space) != 0) return row;
  const auto bytes = static_cast<std::uint64_t>(space.f_blocks) * space.f_frsize;
  row.values["bytes"] = bytes;
  row.finding = host::bytes_text(bytes) + "; Lockstep does not need it";
  row.verdict = Verdict::ok;
  if (bytes < kGiB) {
    row.verdict = Verdict::note;
    row.finding += ", but PyTorch's data loaders and NCCL need more";
    row.hint = "docker run --shm-size=8g, or --ipc=host";
  }
  return row;
}

Row huge_pages() {
  const auto modes =
      first_line_of("/sys/kernel/mm/transparent_hugepage/enabled");  // "always [madvise] never"
  const auto begin = modes.find('['), end = modes.find(']');
  Row row{"huge pages", "not supported by this kernel"};
  const auto mode = begin < end && end != std::string::npos ? modes.substr(begin + 1, end - begin - 1) : "";
  row.values["mode"] = mode;
  if (mode.empty()) return row;
  row.finding = mode == "never" ? "never: large tensors cause more page faults" : mode;
  if (mode == "never") {
    row.verdict = Verdict::note;
    row.hint = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
  }
  return row;
}

Row kernel() {
  utsname name{};
  ::uname(&name);
  Row row{"kernel", fmt::format("{} {} {}", name.sysname, name.release, name.machine)};
  std::vector<std::string> missing;
  auto check = [&](const char* call, long fd) {
    if (fd < 0) missing.push_back(fmt::format("{} ({})", call, std::strerror(errno)));
    if (fd >= 0) ::close(static_cast<int>(fd));
    row.values[call] = fd >= 0;
  };
  row.values["release"] = name.release;
  check("memfd_create", ::memfd_create("lockstep-doctor", MFD_CLOEXEC));
  check("pidfd_open", ::syscall(SYS_pidfd_open, ::getpid(), 0));
  if (missing.empty()) {
    row.finding += ", with memfd and pidfd";
  } else {
    row.verdict = Verdict::bad;
    row.finding += fmt::format(", without {}", fmt::join(missing, ", "));
    row.hint = "Linux 5.3 has both; a container's seccomp profile may block them";
  }
  return row;
}

Row clock() {
  const auto source = first_line_of("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  // Clock sources that are read without a system call.
  static const std::set<std::string> cheap = {"tsc", "kvm-clock", "hyperv_clocksource_tsc_page",
                                              "arch_sys_counter"};
  timex state{};
  const bool known = ::adjtimex(&state) >= 0, synchronised = known && (state.status & STA_UNSYNC) == 0;
  Row row{"clock", source.empty() ? "unknown source" : source};
  row.values = {{"source", source}, {"synchronised", synchronised}};
  row.finding += synchronised ? ", synchronised" : known ? ", not synchronised" : ", synchronisation unknown";
  if (!source.empty() && !cheap.contains(source)) {
    row.verdict = Verdict::note;
    row.finding += "; reading it is slow";
    row.hint = "dmesg | grep -i tsc shows why the kernel does not use it";
  } else if (!synchronised) {
    row.verdict = Verdict::note;
    row.hint = "with several hosts, run chrony or systemd-timesyncd, or their logs and traces disagree";
  }
  return row;
}

Row container() {
  std::string sign;
  for (const char* file : {"/.dockerenv", "/run/.containerenv"})
    if (sign.empty() && std::filesystem::exists(file)) sign = file;
  if (auto name = env::text("container"); sign.empty() && name) sign = "container=" + *name;
  const auto groups = first_line_of("/proc/1/cgroup");
  for (const char* word : {"docker", "kubepods", "lxc", "containerd", "libpod"})
    if (sign.empty() && groups.find(word) != std::string::npos) sign = "cgroup of process 1";
  const auto first = first_line_of("/proc/1/comm");
  Row row{"container", sign.empty() ? "not detected" : fmt::format("yes, by {}", sign)};
  row.finding += ::getpid() == 1 ? "; this is process 1, so lockstep run reaps orphans"
                 : first.empty() ? ""
                                 : fmt::format("; process 1 is {}", first);
  row.values = {{"sign", sign}, {"process_1", first}};
  return row;
}

}  // namespace

Rows host_rows(int ranks) {
  return {cores(ranks), load(),   memory(ranks), swap(),     shared_memory(),
          huge_pages(), kernel(), clock(),       container()};
}

}  // namespace lockstep::cli
