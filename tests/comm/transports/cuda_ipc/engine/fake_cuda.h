// As much of CUDA's runtime as the transport calls, in host memory: a stream is a thread that does one thing
// after another and dawdles, an event is a number. What is not ordered by events comes in the wrong order
// sooner or later.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <future>

namespace lockstep::fake_cuda {

void enqueue(cudaStream_t stream, std::function<void()> task);
void synchronize(cudaStream_t stream);

// A stream that comes no further as long as this lives.
class Stopped {
 public:
  explicit Stopped(cudaStream_t stream);
  ~Stopped() { go_on_.set_value(); }

 private:
  std::promise<void> go_on_;
};

// Of the thread, from now on: the only device that it sees, as number 0.
void show_only(int device);
// How often memory of a device was taken.
std::size_t allocations();

}  // namespace lockstep::fake_cuda
