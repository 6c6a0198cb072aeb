// What the ranks of one host share on their GPUs: memory and events that other processes open by a handle.
// Does not use LibTorch.
//
// Nothing is returned to CUDA before the process ends, because a peer may still have it open. It is reused
// instead.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/memory/heap.h>

namespace lockstep::cuda_ipc {

// Throws Error with CUDA's message.
void check(cudaError_t status, const char* what);

// Interprets the result of cudaEventQuery or cudaStreamQuery. An error counts as done: another call reports
// it.
bool is_done(cudaError_t asked);

// Sets the thread's current device for a scope. Setting a device creates a context on it, which takes memory,
// and a thread that has set none is on device 0: to restore that state one must know what LibTorch does (see
// backend.cpp).
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const int before_;
};

// True while work on the stream is captured for a CUDA graph, to run later.
bool is_capturing(cudaStream_t stream);

// Handle by which another process opens memory or an event.
using Handle = std::array<char, CUDA_IPC_HANDLE_SIZE>;
// Opens a peer's memory or event, once per process.
char* open_memory(const Handle& handle);
cudaEvent_t open_event(const Handle& handle);

// Identifies a GPU, with the same value in every process.
using DeviceId = std::array<char, 16>;
DeviceId device_id(int device);
bool is_visible(const DeviceId& id);   // to this process
std::string text(const DeviceId& id);  // in the format of nvidia-smi

// For one operation: when its tensors may be used, and when they may be reused. The events are private to
// this process.
struct Order {
  explicit Order(int its_device);
  ~Order();
  Order(const Order&) = delete;
  Order& operator=(const Order&) = delete;

  const int device;
  cudaEvent_t ready = nullptr, done = nullptr;
};

// A stream and the events that are recorded only on it. If an event was recorded again, a peer that waits for
// it waits longer than necessary, but never too short.
class Track {
 public:
  static constexpr int kEvents = 8;
  static std::shared_ptr<Track> take(int device);

  cudaStream_t stream() const { return stream_; }
  const Handle& handle(int event) const { return handles_[static_cast<std::size_t>(event)]; }
  void record(int event);  // call before a peer learns about the event
  void wait(cudaEvent_t event);
  bool is_idle() const;
  // Marks the stream as possibly stuck, so that it is not reused.
  void lose() { lost_ = true; }

 private:
  explicit Track(int device);
  const int device_;
  cudaStream_t stream_ = nullptr;
  std::array<cudaEvent_t, kEvents> events_{};
  std::array<Handle, kEvents> handles_{};
  std::atomic<bool> lost_ = false;
};

// Device memory that peers can open, in large pieces.
class Arena {
 public:
  static Arena& of(int device);
  // Releases memory that caches hold, when none is left; or null.
  static inline void (*make_room)() = nullptr;

  // Memory for use on the stream. After free() it is reused once everything that is on that stream by then,
  // and on used_on, is done.
  char* allocate(std::size_t bytes, cudaStream_t stream);
  void free(char* memory, std::optional<cudaStream_t> used_on = {}) noexcept;

  struct Place {
    const Handle* handle = nullptr;  // null: not in the arena
    std::size_t offset = 0;
  };
  Place find(const void* pointer, std::size_t bytes);

 private:
  explicit Arena(int device) : device_(device) {}
  struct Piece {
    std::size_t size = 0;
    Handle handle{};
  };
  struct Freed {
    char* memory;
    std::vector<cudaEvent_t> events;  // reusable once all are done
  };
  void grow(std::size_t bytes);
  void collect();

  const int device_;
  std::mutex mutex_;
  memory::Heap heap_;
  std::map<const char*, Piece> pieces_;
  std::map<const char*, cudaStream_t> taken_;
  std::list<Freed> freed_;
};

}  // namespace lockstep::cuda_ipc
