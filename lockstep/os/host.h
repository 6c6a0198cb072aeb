// The resources this host lets a process use: processors, memory, GPUs, as read from /proc, /sys and /dev.
// `root` replaces "/", so that tests can provide their own tree.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace lockstep::host {

using Root = std::filesystem::path;

// Number of processors in this process's affinity mask.
int affinity_cores();

// CPU time, in processors, granted by the cgroup or an ancestor of it; nullopt without a limit.
std::optional<double> cpu_quota(const Root& root = "/");

// Number of processors in the affinity mask, at most the quota (rounded up), at least 1.
int available_cores(const Root& root = "/");

// Memory of a process's cgroup. Limit, usage and peak are those of the level with the lowest limit: its own
// or an ancestor's. Without any limit they are its own. Values the kernel does not report are empty.
struct CgroupMemory {
  std::optional<std::uint64_t> limit, usage, peak;
  std::optional<std::uint64_t> oom_kills;  // Processes of this cgroup killed because memory ran out.
};
CgroupMemory cgroup_memory(const Root& root = "/", int pid = 0);  // pid 0: this process.

// Memory that this process may still use before it reaches the limit of a cgroup, its own or an ancestor's,
// whichever comes first. Cached file pages count as free, because the kernel drops them first.
struct MemoryLeft {
  std::uint64_t left = 0, limit = 0, usage = 0;  // usage excludes what counts as free.
};
std::optional<MemoryLeft> cgroup_memory_left(const Root& root = "/");

std::optional<std::uint64_t> memory_limit(const Root& root = "/");  // Of this process's cgroup.
std::optional<std::uint64_t> memory_usage(const Root& root = "/");

struct SystemMemory {
  std::uint64_t total = 0, available = 0;
  std::optional<std::uint64_t> oom_kills;  // Of all processes since boot.
};
SystemMemory system_memory(const Root& root = "/");

// Number of NVIDIA GPUs visible to a program started here, considering CUDA_VISIBLE_DEVICES.
int gpu_count(const Root& root = "/");

// This host's name according to the kernel.
std::string name();

// "512.0 MiB"
std::string bytes_text(std::uint64_t bytes);

}  // namespace lockstep::host
