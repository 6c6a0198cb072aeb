// Sums of gradients over replicas. Their order is fixed, the aligned tree ((0+1)+(2+3))+..., so that the bits
// depend on the gradients alone. Internal to DataParallel.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

class GradientSums {
 public:
  // One parameter's gradients in the order of the replicas, all on one device; undefined ones are left out.
  void add(std::vector<at::Tensor> gradients);
  std::size_t bytes() const { return bytes_; }  // to be read
  // Several threads may each do one. Reads each gradient once and writes once.
  void do_share(std::size_t share, std::size_t shares);
  std::vector<at::Tensor> take();  // one for each add(); undefined where there was no gradient

 private:
  struct Sum {
    std::vector<at::Tensor> gradients;
    at::Tensor result;
    bool dense = false;  // all in memory of one layout: shares are ranges of it
  };
  std::vector<Sum> sums_;
  std::size_t bytes_ = 0;
};

}  // namespace lockstep::detail
