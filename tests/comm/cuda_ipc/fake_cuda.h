// As much of CUDA's runtime as the transport calls, in host memory: a stream is a thread that does one thing
// after another and dawdles, an event is a number. What is not ordered by events comes in the wrong order
// sooner or later.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace lockstep::fake_cuda {

void enqueue(cudaStream_t stream, std::function<void()> task);
void synchronize(cudaStream_t stream);

}  // namespace lockstep::fake_cuda
