// What optimizers and StepGraph need of CUDA. cuda_graph.cpp is built where LibTorch has CUDA,
// no_cuda_graph.cpp elsewhere.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace lockstep::detail {

// Whether the device's current stream is capturing a graph; false where there is no CUDA.
bool capturing(at::Device device);

// A step as a CUDA graph.
class CudaGraph {
 public:
  virtual ~CudaGraph() = default;
  virtual void replay() = 0;  // on the current stream
};

// Why there can be no graph here; empty: there can. device: the current one where it has no index.
std::string no_graph_because();
at::Device current_device();

// Runs work on a stream of its own, as a capture needs it, which begins after what the current stream has
// been given and which the current stream then waits for.
void on_side_stream(at::Device device, const std::function<void()>& work);

// Makes that stream the current one for as long as what it returns lives.
std::shared_ptr<void> stay_on_side_stream(at::Device device);

// Captures what work gives to that stream, without running it. Where work throws, or does what cannot be
// captured, the exception says so, and streams, allocator and generators are as before.
std::unique_ptr<CudaGraph> capture(at::Device device, const std::vector<at::Generator>& generators,
                                   const std::function<void()>& work);

}  // namespace lockstep::detail
