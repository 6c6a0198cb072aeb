// What this host lets a process use: processors, memory, GPUs. It is read from /proc, /sys and /dev; `root`
// stands for "/", so that a test may have a tree of its own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace lockstep::host {

using Root = std::filesystem::path;

// Processors in this process's affinity mask.
int affinity_cores();

// Processors' worth of time that the cgroup, or one above it, grants; nothing where there is no limit.
std::optional<double> cpu_quota(const Root& root = "/");

// Those of the affinity mask, at most what the quota grants (rounded up), at least 1.
int available_cores(const Root& root = "/");

// Of a process's cgroup. Limit, usage and peak are those of the level with the lowest limit, its own or one
// above it; without any limit they are its own. What the kernel does not tell is left out.
struct CgroupMemory {
  std::optional<std::uint64_t> limit, usage, peak;
  std::optional<std::uint64_t>
      oom_kills;  // processes of this cgroup that the kernel ended for want of memory
};
CgroupMemory cgroup_memory(const Root& root = "/", int pid = 0);  // pid 0: this process

// What this process may still take before a cgroup's limit is reached, its own or one above it, whichever
// comes first. What is kept of files only to be read again counts as free: the kernel drops it first.
struct MemoryLeft {
  std::uint64_t left = 0, limit = 0, usage = 0;  // usage without what counts as free
};
std::optional<MemoryLeft> cgroup_memory_left(const Root& root = "/");

std::optional<std::uint64_t> memory_limit(const Root& root = "/");  // of this process's cgroup
std::optional<std::uint64_t> memory_usage(const Root& root = "/");

struct SystemMemory {
  std::uint64_t total = 0, available = 0;
  std::optional<std::uint64_t> oom_kills;  // of all processes since the system's start
};
SystemMemory system_memory(const Root& root = "/");

// NVIDIA's GPUs that CUDA would show to a program started here; CUDA_VISIBLE_DEVICES counts.
int gpu_count(const Root& root = "/");

// Of this host, as the kernel has it.
std::string name();

// "512.0 MiB"
std::string bytes_text(std::uint64_t bytes);

}  // namespace lockstep::host
