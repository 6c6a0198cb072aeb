// Caching allocator for CPU tensors. By default glibc returns freed memory to the kernel after each step, and
// the next step faults it in again page by page; this allocator keeps it for reuse. A World installs it for
// all of LibTorch, unless {.cpu_allocator = false} or LOCKSTEP_CPU_ALLOCATOR=0 is set or the program has
// installed its own allocator.
//
// If memory runs out, c10::OutOfMemoryError reports the size of the request, the memory held and the limit.
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
  bool installed = false;      // false: nothing is counted
  std::int64_t allocated = 0;  // bytes in tensors
  std::int64_t peak = 0;       // largest value of allocated since the start or reset_peak_cpu_memory_stats()
  std::int64_t reserved = 0;   // bytes held from the system
  std::int64_t allocations = 0, hits = 0;  // number of requests; number of those served from the cache
  std::int64_t shared_allocated = 0;       // part of allocated that other ranks can reach
  // part of reserved that other ranks can reach, including staging buffers and buckets
  std::int64_t shared_reserved = 0;
};
CpuMemoryStats cpu_memory_stats();
void reset_peak_cpu_memory_stats();
void empty_cpu_cache();  // returns memory that no tensor uses to the system, in units of 2 MiB

// Existing tensors are not moved. Returns false if the program has installed its own allocator, which then
// stays.
bool use_caching_cpu_allocator();

namespace detail {

// Tensors of at least this many bytes can be allocated in memory that other ranks can reach.
constexpr std::size_t kLeastShared = std::size_t{256} << 10;

bool caching_cpu_allocator_is_used();
// Interns a set of sizes in bytes: the same sizes always give the same address.
const std::set<std::size_t>* shared_sizes(const std::set<std::size_t>& sizes);
// Until the backward pass on this thread ends, tensors of these sizes are allocated in shared memory.
void share_tensors_of_this_pass(const std::set<std::size_t>* sizes);
bool in_shared_memory(const at::Tensor& tensor);

}  // namespace detail
}  // namespace lockstep
