// What the ranks of one host share of their GPUs: memory and events that other processes open by a handle. No
// LibTorch.
//
// Nothing here is given back to CUDA before the process ends: a peer may still have it open. It is used again
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

// Throws Error with CUDA's words.
void check(cudaError_t status, const char* what);

// Of what cudaEventQuery and cudaStreamQuery say. An error is an end, too: somebody else tells of it.
bool is_done(cudaError_t asked);

// The thread's current device, for a while. Setting one makes a context on it, which takes memory, and a
// thread that has set none is on device 0: who goes back there must know what LibTorch does (backend.cpp).
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const int before_;
};

// What is put on it now is part of a CUDA graph, and runs later.
bool is_capturing(cudaStream_t stream);

// By which another process opens memory or an event.
using Handle = std::array<char, CUDA_IPC_HANDLE_SIZE>;
// A peer's, opened once in this process.
char* open_memory(const Handle& handle);
cudaEvent_t open_event(const Handle& handle);

// Which GPU it is, the same in every process.
using DeviceId = std::array<char, 16>;
DeviceId device_id(int device);
bool is_visible(const DeviceId& id);   // to this process
std::string text(const DeviceId& id);  // as nvidia-smi writes it

// Of one operation: when its tensors may be used, and when they may be used again. Events of this process
// alone.
struct Order {
  explicit Order(int its_device);
  ~Order();
  Order(const Order&) = delete;
  Order& operator=(const Order&) = delete;

  const int device;
  cudaEvent_t ready = nullptr, done = nullptr;
};

// A stream and the events that are recorded on it and on no other. So a peer that waits for an event which
// has been recorded again since waits longer than it must, and never too short.
class Track {
 public:
  static constexpr int kEvents = 8;
  static std::shared_ptr<Track> take(int device);

  cudaStream_t stream() const { return stream_; }
  const Handle& handle(int event) const { return handles_[static_cast<std::size_t>(event)]; }
  void record(int event);  // before any peer is told to wait for it
  void wait(cudaEvent_t event);
  bool is_idle() const;
  // What lies on it may never end: it is not used again.
  void lose() { lost_ = true; }

 private:
  explicit Track(int device);
  const int device_;
  cudaStream_t stream_ = nullptr;
  std::array<cudaEvent_t, kEvents> events_{};
  std::array<Handle, kEvents> handles_{};
  std::atomic<bool> lost_ = false;
};

// Memory of a device that peers can open, in large pieces.
class Arena {
 public:
  static Arena& of(int device);
  // Gives back what others keep for later, when there is no memory left; or null.
  static inline void (*make_room)() = nullptr;

  // For use on the stream; after free() it is given out again when what lies then on it, and on the stream
  // that is named there, is done.
  char* allocate(std::size_t bytes, cudaStream_t stream);
  void free(char* memory, std::optional<cudaStream_t> used_on = {}) noexcept;

  struct Place {
    const Handle* handle = nullptr;  // null: it is not in the arena
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
    std::vector<cudaEvent_t> events;  // all of them are waited for
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
