// The memory of CPU tensors. By default glibc gives what a step frees back to the kernel, and the next step
// takes it anew, page by page; here it is kept and given out again. A World installs it, for all of LibTorch,
// but for {.cpu_allocator = false} and LOCKSTEP_CPU_ALLOCATOR=0; an allocator of the program's own stays.
//
// Where there is no more, c10::OutOfMemoryError says what was asked for, what is held and what the limit is.
//
//   lockstep::use_caching_cpu_allocator();         // without a World
//   auto stats = lockstep::cpu_memory_stats();     // stats.allocated, stats.reserved, stats.peak
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>

#include <ATen/core/Tensor.h>

namespace lockstep {

struct CpuMemoryStats {
  bool installed = false;      // else nothing is counted
  std::int64_t allocated = 0;  // bytes of tensors
  std::int64_t peak = 0;       // the most of them, since the start or reset_peak_cpu_memory_stats()
  std::int64_t reserved = 0;   // bytes held of the system
  std::int64_t allocations = 0, hits = 0;  // how often memory was asked for; out of what was held
  std::int64_t shared_allocated = 0;       // of the bytes of tensors: in memory that other ranks reach
  std::int64_t shared_reserved = 0;        // of those held; staging and buckets too
};
CpuMemoryStats cpu_memory_stats();
void reset_peak_cpu_memory_stats();
void empty_cpu_cache();  // what no tensor uses goes back to the system, by 2 MiB

// Tensors that are there stay where they are. False where the program has an allocator of its own, which
// stays.
bool use_caching_cpu_allocator();

namespace detail {

// Tensors of at least this many bytes can be born in memory that other ranks reach.
constexpr std::size_t kLeastShared = std::size_t{256} << 10;

bool caching_cpu_allocator_is_used();
// Sizes in bytes. The same address for the same sizes, for good.
const std::set<std::size_t>* shared_sizes(const std::set<std::size_t>& sizes);
// Until the backward pass that runs on this thread has ended, tensors of these sizes are born there.
void share_tensors_of_this_pass(const std::set<std::size_t>* sizes);
bool in_shared_memory(const at::Tensor& tensor);

}  // namespace detail
}  // namespace lockstep
