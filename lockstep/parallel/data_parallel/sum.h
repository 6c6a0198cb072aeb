// Sums gradients over replicas. The order is fixed, the aligned tree ((0+1)+(2+3))+..., so that the result
// depends on the gradients only. Internal to DataParallel.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

class GradientSums {
 public:
  // Adds one parameter's gradients, in the order of the replicas, all on one device. Undefined ones are
  // skipped.
  void add(std::vector<at::Tensor> gradients);
  std::size_t bytes() const { return bytes_; }  // Total size of the gradients.
  // Computes one share of all sums. Different threads may compute different shares. Reads each gradient once.
  void do_share(std::size_t share, std::size_t shares);
  std::vector<at::Tensor> take();  // One sum per add(); undefined if there was no gradient.

 private:
  struct Sum {
    std::vector<at::Tensor> gradients;
    at::Tensor result;
    bool dense = false;  // True if all have the same dense layout: shares are then ranges of elements.
  };
  std::vector<Sum> sums_;
  std::size_t bytes_ = 0;
};

}  // namespace lockstep::detail
