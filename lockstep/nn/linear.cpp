#include <lockstep/nn/linear.h>

#include <ATen/ops/linear.h>

namespace lockstep::nn {

at::Tensor LinearImpl::forward(const at::Tensor& input) { return at::linear(input, weight, bias); }

std::shared_ptr<torch::nn::Module> LinearImpl::clone(const std::optional<at::Device>& device) const {
  // LibTorch's makes one of LibTorch's.
  return std::make_shared<LinearImpl>(
      dynamic_cast<const torch::nn::LinearImpl&>(*torch::nn::LinearImpl::clone(device)));
}

}  // namespace lockstep::nn
