// Stochastic gradient descent with PyTorch's names and defaults. On the CPU, results are bit-identical to
// Python's.
//
//   lockstep::SGD optimizer(model->parameters(), {.lr = 0.1, .momentum = 0.9});
//
// Groups, learning rates and errors as in adam.h. Supports sparse gradients.
#pragma once

#include <cstddef>
#include <vector>

#include <lockstep/optim/optimizer.h>
#include <torch/optim/optimizer.h>

namespace lockstep {

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  bool master_weights = false;  // for bfloat16 and float16 parameters; see optimizer.h
  Implementation implementation = Implementation::single;
};

class SGD : public torch::optim::Optimizer {
 public:
  explicit SGD(std::vector<at::Tensor> parameters, SGDOptions options = {});
  explicit SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, SGDOptions options = {});

  static torch::optim::OptimizerParamGroup group(std::vector<at::Tensor> parameters, SGDOptions options);
  SGDOptions options(std::size_t group = 0) const;

  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // See optimizer.h.
  at::Tensor master(const at::Tensor& parameter) const;  // undefined if there is none
  void sync_masters();
};

}  // namespace lockstep
