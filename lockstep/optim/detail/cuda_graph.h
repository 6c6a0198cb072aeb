// CUDA functions used by optimizers and StepGraph. cuda_graph.cpp is built if LibTorch has CUDA,
// no_cuda_graph.cpp otherwise.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace lockstep::detail {

// True if the device's current stream is capturing a graph; always false without CUDA.
bool capturing(at::Device device);

// A captured step.
class CudaGraph {
 public:
  virtual ~CudaGraph() = default;
  virtual void replay() = 0;  // on the current stream
};

// Reason why graphs cannot be used here; empty if they can. current_device: the current one, with an index.
std::string no_graph_because();
at::Device current_device();

// Runs `work` on a separate stream, as a capture requires. It starts after the work enqueued on the current
// stream, which then waits for it.
void on_side_stream(at::Device device, const std::function<void()>& work);

// Makes that stream the current one until the returned object is destroyed.
std::shared_ptr<void> stay_on_side_stream(at::Device device);

// Captures the work that `work` enqueues on that stream, without running it. If `work` throws or does
// something that cannot be captured, throws, with streams, allocator and generators restored.
std::unique_ptr<CudaGraph> capture(at::Device device, const std::vector<at::Generator>& generators,
                                   const std::function<void()>& work);

}  // namespace lockstep::detail
