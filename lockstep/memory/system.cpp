#include <lockstep/memory/system.h>

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <lockstep/memory/align.h>
#include <lockstep/memory/fork.h>

namespace lockstep::memory {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kRegion = std::size_t{64} << 20;  // Minimum size of a mapping.
// Below this size, checking the system's files is not worthwhile.
constexpr std::size_t kSmall = std::size_t{16} << 20;

}  // namespace

System::System(host::Root root) : root_(std::move(root)) { hold_in_fork(mutex_, ForkOrder::inner); }

// Checked in advance: when pages are touched, the kernel does not report a lack of memory but kills a
// process.
Heap::Region System::map(std::size_t bytes) const {
  if (bytes >= kSmall) {
    const auto cgroup = host::cgroup_memory_left(root_);
    if (cgroup && bytes > cgroup->left)
      throw OutOfMemory(fmt::format("the cgroup's limit is {}, of which {} are left",
                                    host::bytes_text(cgroup->limit), host::bytes_text(cgroup->left)));
    const auto system = host::system_memory(root_);
    if (system.total != 0 && bytes > system.available)
      throw OutOfMemory(fmt::format("this host has {} available of {}", host::bytes_text(system.available),
                                    host::bytes_text(system.total)));
  }
  auto size = round_up(std::max(bytes, kRegion), kHugePage);
  const auto take = [&] {
    return ::mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  void* memory = take();
  if (memory == MAP_FAILED) {  // Map no more than needed, then.
    size = round_up(bytes, kHugePage);
    memory = take();
  }
  if (memory == MAP_FAILED)
    throw OutOfMemory("the system has no more memory: " + std::generic_category().message(errno));
  // Align to a huge page; unmap what lies before and after.
  auto* begin = static_cast<char*>(memory);
  auto* base = reinterpret_cast<char*>(round_up(reinterpret_cast<std::uintptr_t>(begin), kHugePage));
  if (base != begin) ::munmap(begin, static_cast<std::size_t>(base - begin));
  ::munmap(base + size, static_cast<std::size_t>(begin + kHugePage - base));
  ::madvise(base, size, MADV_HUGEPAGE);
  return {base, size};
}

char* System::take(std::size_t bytes, bool grow) {
  std::unique_lock lock(mutex_);
  char* block = heap_.take(bytes, kPage);
  while (block == nullptr && grow) {
    lock.unlock();
    const auto region = map(bytes);
    lock.lock();
    heap_.add(region);
    block = heap_.take(bytes, kPage);
  }
  return block;
}

void System::give(char* block) noexcept {
  std::lock_guard lock(mutex_);
  heap_.put(block);
}

void System::trim() noexcept {
  std::lock_guard lock(mutex_);
  for (const auto& region : heap_.free_regions()) {
    heap_.remove(region);
    ::munmap(region.base, region.size);
  }
  // In partly used regions, release the pages of free blocks: they reappear as zeros when touched.
  for (const auto& block : heap_.free_blocks(kHugePage)) {
    const auto begin = round_up(reinterpret_cast<std::uintptr_t>(block.base), kHugePage);
    const auto end = reinterpret_cast<std::uintptr_t>(block.base + block.size) / kHugePage * kHugePage;
    if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }
}

std::size_t System::held() const {
  std::lock_guard lock(mutex_);
  return heap_.held();
}

}  // namespace lockstep::memory
