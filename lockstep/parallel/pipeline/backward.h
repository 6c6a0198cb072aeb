// A backward pass in two parts: first the gradients that the previous stage waits for, then those of the
// weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace lockstep::detail {

// Makes a CUDA context current on this thread. Without one, LibTorch warns if cuBLAS is the first CUDA library
// that the thread calls. A no-op on other devices.
void make_context_current(at::Device device);

// The backward pass of one forward. Gradients are added to .grad() by autograd's own accumulators, so that
// hooks on them run as usual. Outputs with an undefined gradient are skipped.
class PipelineBackward {
 public:
  PipelineBackward() = default;
  PipelineBackward(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients,
                   std::vector<at::Tensor> inputs);

  void whole();
  // input_part() computes the inputs' gradients; weight_part(), at any later time, everything else. Nothing
  // is computed twice: where the path to a weight branches off the path to the inputs, input_part() saves the
  // gradients and weight_part() continues from them.
  void input_part();
  void weight_part();

 private:
  using NodePointer = decltype(torch::autograd::Edge::function);
  // A node at which paths to weights branch off the path to the inputs.
  struct Branch {
    NodePointer node;
    std::vector<at::Tensor> arrived = {};  // Gradients that reached the node, by input number.
    bool hooked = false;                   // True if the node's hooks have already run for them.
    torch::autograd::edge_list weights = {};
  };
  void find_branches();

  torch::autograd::edge_list roots_;
  std::vector<at::Tensor> gradients_;
  std::vector<at::Tensor> inputs_;
  bool split_ = false;  // True once input_part() has run.
  std::vector<Branch> branches_;
  // Weights reached from several branches: computed with the inputs.
  torch::autograd::edge_list early_;
};

}  // namespace lockstep::detail
