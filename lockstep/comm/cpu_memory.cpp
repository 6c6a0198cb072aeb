#include <lockstep/comm/cpu_memory.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <mutex>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/transports/shm/engine/arena.h>
#include <lockstep/memory/system.h>
#include <torch/csrc/autograd/graph_task.h>

namespace lockstep {
namespace {

// Source of memory that other ranks can reach.
class SharedSource final : public memory::Source {
 public:
  char* take(std::size_t bytes, bool grow) override {
    try {
      return static_cast<char*>(shm::Arena::instance().allocate(bytes, grow));
    } catch (const ConfigError& error) {
      throw memory::OutOfMemory(error.what());
    }
  }
  void give(char* block) noexcept override { shm::Arena::instance().free(block); }
  std::size_t held() const override { return shm::Arena::instance().figures().held; }
};

// The sizes, and autograd's number of the pass they apply to.
struct SharedPass {
  const std::set<std::size_t>* sizes = nullptr;
  int task = -1;
};
thread_local SharedPass shared_pass;

bool is_to_be_shared(std::size_t bytes) {
  const auto& pass = shared_pass;
  return pass.sizes != nullptr && bytes >= detail::kLeastShared && pass.sizes->contains(bytes) &&
         torch::autograd::get_current_graph_task_id() == pass.task;
}

class CpuAllocator final : public c10::Allocator {
 public:
  // Null until the allocator is first installed.
  static CpuAllocator* made() { return made_.load(std::memory_order_acquire); }
  static CpuAllocator& make() {
    static CpuAllocator* const allocator = [] {
      // first: fork handlers run last first, and its lock must be taken after the caches' locks
      shm::Arena::instance();
      auto* fresh = new CpuAllocator;
      made_.store(fresh, std::memory_order_release);
      ::pthread_atfork(nullptr, nullptr, [] { made()->shared.disown(); });
      return fresh;
    }();
    return *allocator;
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, at::kCPU};
    const bool share = is_to_be_shared(bytes) && may_share();
    void* memory = share ? allocate_shared(bytes) : nullptr;
    auto* deleter = memory != nullptr ? &release_shared : &release;
    if (memory == nullptr) memory = allocate_own(bytes);
    c10::profiledCPUMemoryReporter().New(memory, bytes);
    return {memory, memory, deleter, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  memory::Usage usage;
  memory::Cache own, shared;

 private:
  using Clock = std::chrono::steady_clock;

  CpuAllocator() : own(*new memory::System, &usage), shared(*new SharedSource, &usage) {}

  // False in a child after fork, which shares the segments with its parent, and shortly after shared memory
  // ran out.
  bool may_share() const {
    return !shared.is_disowned() && Clock::now().time_since_epoch().count() >= no_more_until_.load();
  }
  // Returns null if there is none. The tensor is then staged, as other tensors are.
  void* allocate_shared(std::size_t bytes) {
    try {
      return shared.allocate(bytes);
    } catch (const memory::OutOfMemory&) {
      no_more_until_ = (Clock::now() + std::chrono::seconds(10)).time_since_epoch().count();
      return nullptr;
    }
  }
  void* allocate_own(std::size_t bytes) {
    try {
      return own.allocate(bytes);
    } catch (const memory::OutOfMemory& error) {
      c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  }
  static void release(void* memory) {
    if (memory == nullptr) return;
    c10::profiledCPUMemoryReporter().Delete(memory);
    memory::Cache::free(memory);
  }
  // In a child after fork this does nothing: the parent may have reused the memory.
  static void release_shared(void* memory) {
    if (!made()->shared.is_disowned()) release(memory);
  }

  static std::atomic<CpuAllocator*> made_;
  std::atomic<Clock::rep> no_more_until_ = 0;
};

std::atomic<CpuAllocator*> CpuAllocator::made_ = nullptr;

}  // namespace

bool use_caching_cpu_allocator() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (detail::caching_cpu_allocator_is_used()) return true;
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) {
    detail::log(LogLevel::info,
                "keeping the CPU allocator that the program installed; Lockstep's allocator is not used");
    return false;
  }
  c10::SetCPUAllocator(&CpuAllocator::make(), /*priority=*/0);
  // Does not displace an allocator of higher priority.
  return detail::caching_cpu_allocator_is_used();
}

CpuMemoryStats cpu_memory_stats() {
  CpuMemoryStats stats;
  stats.installed = detail::caching_cpu_allocator_is_used();
  if (!stats.installed) return stats;
  const auto& allocator = *CpuAllocator::made();
  const auto own = allocator.own.figures(), shared = allocator.shared.figures();
  stats.allocated = own.allocated + shared.allocated;
  stats.peak = allocator.usage.peak.load();
  stats.reserved = own.reserved + shared.reserved;
  stats.allocations = own.allocations + shared.allocations;
  stats.hits = own.hits + shared.hits;
  stats.shared_allocated = shared.allocated;
  stats.shared_reserved = shared.reserved;
  return stats;
}

void reset_peak_cpu_memory_stats() {
  if (auto* allocator = CpuAllocator::made()) allocator->usage.reset_peak();
}

void empty_cpu_cache() {
  auto* allocator = CpuAllocator::made();
  if (allocator == nullptr) return;
  allocator->own.release_all();
  allocator->shared.release_all();
}

namespace detail {

bool caching_cpu_allocator_is_used() {
  return CpuAllocator::made() != nullptr && c10::GetCPUAllocator() == CpuAllocator::made();
}

const std::set<std::size_t>* shared_sizes(const std::set<std::size_t>& sizes) {
  static std::mutex mutex;
  static auto* all = new std::set<std::set<std::size_t>>;
  std::lock_guard lock(mutex);
  return &*all->insert(sizes).first;
}

void share_tensors_of_this_pass(const std::set<std::size_t>* sizes) {
  shared_pass = {sizes, torch::autograd::get_current_graph_task_id()};
}

bool in_shared_memory(const at::Tensor& tensor) {
  return shm::Arena::instance().find(tensor.const_data_ptr(), tensor.nbytes()).segment != 0;
}

}  // namespace detail
}  // namespace lockstep
