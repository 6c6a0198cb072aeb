#include <lockstep/os/host.h>

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <vector>

#include <fmt/format.h>

namespace lockstep::host {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool contains(const std::vector<std::string>& list, const std::string& item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

template <typename T>
std::optional<T> number(const std::string& text) {
  T value{};
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return value;
}

// The first line of a file; most cgroup files have only one.
std::string line_of(const fs::path& file) {
  std::string line;
  std::ifstream stream(file);
  std::getline(stream, line);
  return line;
}

// Finds "KEY VALUE" or "KEY:   VALUE kB" among the lines of a file; returns the number as written.
std::optional<std::uint64_t> entry_of(const fs::path& file, const std::string& key) {
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) {
    std::istringstream words(line);
    std::string name;
    std::uint64_t value = 0;
    if (words >> name >> value && (name == key || name == key + ":")) return value;
  }
  return std::nullopt;
}

// A process's cgroup in the hierarchy that has a controller, followed by its ancestors. A system may have
// both kinds of hierarchy; a controller is in one of them.
struct Cgroup {
  bool unified = false;  // Version 2.
  std::vector<fs::path> levels;
};

std::optional<std::string> path_of_cgroup(const fs::path& file, const std::string& controller,
                                          bool& unified) {
  std::optional<std::string> found;
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) {  // "4:memory:/jobs/17", "0::/jobs/17"
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    const bool is_unified = controllers.empty() && line.starts_with("0:");
    const bool has_it = contains(split(controllers, ','), controller);
    if (!has_it && !is_unified) continue;
    if (is_unified && found) continue;
    found = line.substr(second + 1);
    unified = is_unified;
    if (has_it) break;
  }
  return found;
}

std::optional<Cgroup> cgroup_of(const Root& root, int pid, const std::string& controller) {
  const fs::path process = root / "proc" / (pid == 0 ? "self" : std::to_string(pid));
  Cgroup cgroup;
  const auto path = path_of_cgroup(process / "cgroup", controller, cgroup.unified);
  if (!path) return std::nullopt;
  std::ifstream mounts(root / "proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    // "35 31 0:32 /jobs /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    const auto middle = line.find(" - ");
    if (middle == std::string::npos) continue;
    const auto left = split(line.substr(0, middle), ' '), right = split(line.substr(middle + 3), ' ');
    if (left.size() < 5 || right.size() < 3) continue;
    const bool fits = cgroup.unified ? right[0] == "cgroup2"
                                     : right[0] == "cgroup" && contains(split(right[2], ','), controller);
    if (!fits) continue;
    // In a container the mount may show only a part of the hierarchy.
    const std::string& shown = left[3];
    std::string below = *path;
    if (shown != "/") below = below.starts_with(shown) ? below.substr(shown.size()) : "";
    cgroup.levels = {root / fs::path(left[4]).relative_path()};
    for (const auto& name : fs::path(below).relative_path()) {
      const auto next = cgroup.levels.front() / name;
      if (name == ".." || !fs::exists(next)) break;  // Not visible to this process.
      cgroup.levels.insert(cgroup.levels.begin(), next);
    }
    return cgroup;
  }
  return std::nullopt;
}

std::optional<double> quota_of(const fs::path& level, bool unified) {
  std::string quota, period;
  if (unified)
    std::istringstream(line_of(level / "cpu.max")) >> quota >> period;  // "150000 100000", "max 100000"
  else
    quota = line_of(level / "cpu.cfs_quota_us"), period = line_of(level / "cpu.cfs_period_us");
  const auto granted = number<double>(quota), length = number<double>(period);
  if (!granted || !length || *granted <= 0 || *length <= 0) return std::nullopt;
  return *granted / *length;
}

std::optional<std::uint64_t> limit_of(const fs::path& level, bool unified) {
  const auto limit =
      number<std::uint64_t>(line_of(level / (unified ? "memory.max" : "memory.limit_in_bytes")));
  // Version 1 represents "no limit" as the largest multiple of the page size.
  if (!limit || *limit >= (std::uint64_t{1} << 62)) return std::nullopt;
  return limit;
}

int devices_of(const Root& root) {
  int nodes = 0, known = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root / "dev", error)) {
    const auto name = entry.path().filename().string();
    nodes += name.starts_with("nvidia") && number<int>(name.substr(6)).has_value();
  }
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(root / "proc/driver/nvidia/gpus", error))
    ++known;
  // A container sees all of the host's GPUs in /proc, but only its own in /dev. If /dev has none yet, CUDA
  // creates them.
  return nodes > 0 ? nodes : known;
}

}  // namespace

int affinity_cores() {
  for (int most = 1024; most <= 1 << 20; most *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(most),
                                                               [](cpu_set_t* s) { CPU_FREE(s); });
    const std::size_t size = CPU_ALLOC_SIZE(most);
    CPU_ZERO_S(size, set.get());
    if (::sched_getaffinity(0, size, set.get()) == 0) return std::max(1, CPU_COUNT_S(size, set.get()));
  }
  return 1;
}

std::optional<double> cpu_quota(const Root& root) {
  const auto cgroup = cgroup_of(root, 0, "cpu");
  std::optional<double> lowest;
  if (cgroup)
    for (const auto& level : cgroup->levels) {
      const auto quota = quota_of(level, cgroup->unified);
      if (quota && (!lowest || *quota < *lowest)) lowest = quota;
    }
  return lowest;
}

int available_cores(const Root& root) {
  const int cores = affinity_cores();
  const auto quota = cpu_quota(root);
  return quota && *quota < cores ? std::max(1, static_cast<int>(std::ceil(*quota))) : cores;
}

CgroupMemory cgroup_memory(const Root& root, int pid) {
  CgroupMemory memory;
  const auto cgroup = cgroup_of(root, pid, "memory");
  if (!cgroup) return memory;
  const bool unified = cgroup->unified;
  fs::path tightest = cgroup->levels.front();
  for (const auto& level : cgroup->levels) {
    const auto limit = limit_of(level, unified);
    if (limit && (!memory.limit || *limit < *memory.limit)) memory.limit = limit, tightest = level;
  }
  auto read = [&](const char* name) { return number<std::uint64_t>(line_of(tightest / name)); };
  memory.usage = read(unified ? "memory.current" : "memory.usage_in_bytes");
  memory.peak = read(unified ? "memory.peak" : "memory.max_usage_in_bytes");
  memory.oom_kills =
      entry_of(cgroup->levels.front() / (unified ? "memory.events" : "memory.oom_control"), "oom_kill");
  return memory;
}

std::optional<MemoryLeft> cgroup_memory_left(const Root& root) {
  const auto cgroup = cgroup_of(root, 0, "memory");
  std::optional<MemoryLeft> least;
  if (!cgroup) return least;
  const bool unified = cgroup->unified;
  for (const auto& level : cgroup->levels) {
    const auto limit = limit_of(level, unified);
    const auto usage =
        number<std::uint64_t>(line_of(level / (unified ? "memory.current" : "memory.usage_in_bytes")));
    if (!limit || !usage) continue;
    auto files = [&](const std::string& kind) {
      return entry_of(level / "memory.stat", (unified ? "" : "total_") + kind).value_or(0);
    };
    // Some of the files used repeatedly, such as programs, would soon be read again.
    const auto droppable = files("inactive_file") + files("active_file") / 2;
    MemoryLeft here{0, *limit, *usage - std::min(droppable, *usage)};
    here.left = here.limit - std::min(here.usage, here.limit);
    if (!least || here.left < least->left) least = here;
  }
  return least;
}

std::optional<std::uint64_t> memory_limit(const Root& root) { return cgroup_memory(root).limit; }
std::optional<std::uint64_t> memory_usage(const Root& root) { return cgroup_memory(root).usage; }

SystemMemory system_memory(const Root& root) {
  SystemMemory memory;
  memory.total = entry_of(root / "proc/meminfo", "MemTotal").value_or(0) * 1024;
  memory.available = entry_of(root / "proc/meminfo", "MemAvailable").value_or(0) * 1024;
  memory.oom_kills = entry_of(root / "proc/vmstat", "oom_kill");
  return memory;
}

int gpu_count(const Root& root) {
  const int devices = devices_of(root);
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");  // Empty means none, unset means all.
  if (visible == nullptr) return devices;
  int count = 0;
  for (const auto& entry : split(visible, ',')) {
    const auto index = number<int>(entry);
    const bool by_name = entry.starts_with("GPU-") || entry.starts_with("MIG-");
    if (!by_name && (!index || *index < 0 || *index >= devices)) break;  // As CUDA does.
    ++count;
  }
  return devices > 0 ? count : 0;
}

std::string name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 && name[0] != 0 ? name : "localhost";
}

std::string bytes_text(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

}  // namespace lockstep::host
