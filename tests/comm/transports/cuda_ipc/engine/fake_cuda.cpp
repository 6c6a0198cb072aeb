#include "comm/transports/cuda_ipc/engine/fake_cuda.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <lockstep/comm/reduce/kernels.h>
#include <lockstep/comm/transports/cuda_ipc/engine/device.h>
#include <lockstep/comm/transports/cuda_ipc/engine/fold.h>

namespace {

std::mutex mutex;                 // guards everything
std::condition_variable changed;  // an event was reached, or a stream is idle

struct Event {
  std::uint64_t recorded = 0, reached = 0;
};

struct Stream {
  std::deque<std::function<void()>> tasks;
  std::condition_variable given;
  bool busy = false;
  Stream() {
    std::thread([this] { work(); }).detach();  // streams are never destroyed
  }
  void work() {
    std::minstd_rand random(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(this) >> 4));
    std::unique_lock lock(mutex);
    for (;;) {
      given.wait(lock, [&] { return !tasks.empty(); });
      auto task = std::move(tasks.front());
      tasks.pop_front();
      busy = true;
      lock.unlock();
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      task();
      lock.lock();
      busy = false;
      if (tasks.empty()) changed.notify_all();
    }
  }
};

Event& of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }
Stream& of(cudaStream_t stream) { return *reinterpret_cast<Stream*>(stream); }

void put(cudaStream_t stream, std::function<void()> task) {
  std::lock_guard lock(mutex);
  of(stream).tasks.push_back(std::move(task));
  of(stream).given.notify_one();
}

template <typename Handle>
Handle handle_of(void* pointer) {
  Handle handle{};
  std::memcpy(&handle, &pointer, sizeof pointer);
  return handle;
}

thread_local int current_device = 0;
thread_local int first_device = 0, devices = 8;
std::atomic<std::size_t> allocated = 0;

}  // namespace

namespace lockstep::fake_cuda {

void enqueue(cudaStream_t stream, std::function<void()> task) { put(stream, std::move(task)); }
void synchronize(cudaStream_t stream) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return of(stream).tasks.empty() && !of(stream).busy; });
}

Stopped::Stopped(cudaStream_t stream) {
  put(stream, [until = go_on_.get_future().share()] { until.wait(); });
}

void show_only(int device) { first_device = device, devices = 1; }
std::size_t allocations() { return allocated; }

}  // namespace lockstep::fake_cuda

namespace lockstep::cuda_ipc {

OnDevice::OnDevice(int device) : before_(std::exchange(current_device, device)) {}
OnDevice::~OnDevice() { current_device = before_; }

}  // namespace lockstep::cuda_ipc

namespace lockstep::kernels {

bool fold(detail::Number number, detail::Fold fold, const detail::FoldJob& job, Stream stream) {
  const std::vector<const void*> inputs(job.inputs, job.inputs + job.input_count);
  const std::vector<void*> outputs(job.outputs, job.outputs + job.output_count);
  put(static_cast<cudaStream_t>(stream), [=] {
    auto own = job;
    own.inputs = inputs.data();
    own.outputs = outputs.data();
    detail::fold_portable(number, fold, own);
  });
  return true;
}

}  // namespace lockstep::kernels

extern "C" {

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfATest"; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = devices, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  device += first_device;
  std::memcpy(&properties->uuid, &device, sizeof device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = *greatest = 0, cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::lock_guard lock(mutex);
  return of(stream).tasks.empty() && !of(stream).busy ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  std::uint64_t number = 0;
  {
    std::lock_guard lock(mutex);
    number = ++of(event).recorded;
  }
  put(stream, [event, number] {
    std::lock_guard lock(mutex);
    of(event).reached = std::max(of(event).reached, number);
    changed.notify_all();
  });
  return cudaSuccess;
}
// Waits for what was recorded before this call, and nothing later.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::uint64_t number = 0;
  {
    std::lock_guard lock(mutex);
    number = of(event).recorded;
  }
  put(stream, [event, number] {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return of(event).reached >= number; });
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard lock(mutex);
  return of(event).reached >= of(event).recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  ++allocated;
  *memory = std::aligned_alloc(std::size_t{2} << 20, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  put(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  return *handle = handle_of<cudaIpcMemHandle_t>(memory), cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  return std::memcpy(memory, &handle, sizeof *memory), cudaSuccess;
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  return *handle = handle_of<cudaIpcEventHandle_t>(event), cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  return std::memcpy(event, &handle, sizeof *event), cudaSuccess;
}

}  // extern "C"
