// A backward pass in two parts: what the stage before waits for, and what nobody waits for.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace lockstep::detail {

// LibTorch warns where cuBLAS is the first that a thread calls of CUDA, because no context is current there. After
// this one is. Nothing on other devices.
void make_context_current(at::Device device);

// Of what one forward left. Gradients are added to .grad() by autograd's own accumulators, so that hooks on
// them see all. Outputs that have no gradient (undefined) are passed over.
class PipelineBackward {
 public:
  PipelineBackward() = default;
  PipelineBackward(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients,
                   std::vector<at::Tensor> inputs);

  void whole();
  // The inputs' gradients; then, any time later, everything else's. What input_part() passes on the way to
  // the inputs is not computed again: where a weight's gradient branches off, weight_part() goes on with what
  // came there.
  void input_part();
  void weight_part();

 private:
  using NodePointer = decltype(torch::autograd::Edge::function);
  // Where the way to some weights leaves the way to the inputs.
  struct Branch {
    NodePointer node;
    std::vector<at::Tensor> arrived = {};  // by the node's inputs
    bool hooked = false;                   // the node's hooks have had it
    torch::autograd::edge_list weights = {};
  };
  void find_branches();

  torch::autograd::edge_list roots_;
  std::vector<at::Tensor> gradients_;
  std::vector<at::Tensor> inputs_;
  bool split_ = false;  // input_part() has done its part
  std::vector<Branch> branches_;
  torch::autograd::edge_list
      early_;  // weights that are reached in several ways: theirs come with the inputs'
};

}  // namespace lockstep::detail
