// The part of CUDA's runtime that the transport calls, simulated in host memory: a stream is a thread that
// executes its work in order, with random delays, and an event is a number. Work that is not ordered by
// events runs in the wrong order sooner or later.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <future>

namespace lockstep::fake_cuda {

void enqueue(cudaStream_t stream, std::function<void()> task);
void synchronize(cudaStream_t stream);

// Stops a stream while this object lives.
class Stopped {
 public:
  explicit Stopped(cudaStream_t stream);
  ~Stopped() { go_on_.set_value(); }

 private:
  std::promise<void> go_on_;
};

// From here on this thread sees only that device, as number 0.
void show_only(int device);
// Number of allocations of device memory.
std::size_t allocations();

}  // namespace lockstep::fake_cuda
