// Adam and AdamW with PyTorch's names and defaults. On the CPU, results are bit-identical to Python's.
//
//   lockstep::AdamW optimizer(model->parameters(), {.lr = 3e-4, .weight_decay = 0.1});
//   optimizer.zero_grad();
//   loss.backward();
//   optimizer.step();
//
// Parameter groups with their own options:
//
//   lockstep::AdamW optimizer({lockstep::AdamW::group(weights, {.lr = 3e-4}),
//                              lockstep::AdamW::group(biases, {.lr = 3e-4, .weight_decay = 0})});
//
// To change a group's learning rate, call optimizer.param_groups()[0].options().set_lr(x) or use a scheduler.
// Throws ConfigError for options out of range, no parameters, a duplicate parameter, or sparse gradients.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <lockstep/optim/optimizer.h>
#include <torch/optim/optimizer.h>

namespace lockstep {

namespace detail {
class AdamOnDevice;
}

struct AdamOptions {
  double lr = 1e-3;
  std::pair<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;  // added to the gradient (L2)
  bool amsgrad = false;
  bool maximize = false;
  bool master_weights = false;  // for bfloat16 and float16 parameters; see optimizer.h
  bool capturable = false;      // for use in a CUDA graph; see optimizer.h
  Implementation implementation = Implementation::single;
};

struct AdamWOptions {
  double lr = 1e-3;
  std::pair<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;  // subtracted from the parameter (decoupled)
  bool amsgrad = false;
  bool maximize = false;
  bool master_weights = false;  // for bfloat16 and float16 parameters; see optimizer.h
  bool capturable = false;      // for use in a CUDA graph; see optimizer.h
  Implementation implementation = Implementation::single;
};

class Adam : public torch::optim::Optimizer {
 public:
  explicit Adam(std::vector<at::Tensor> parameters, AdamOptions options = {});
  // `options` applies to groups that have none. Groups may also have LibTorch's torch::optim::AdamOptions.
  explicit Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamOptions options = {});

  static torch::optim::OptimizerParamGroup group(std::vector<at::Tensor> parameters, AdamOptions options);
  AdamOptions options(std::size_t group = 0) const;

  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // See optimizer.h.
  at::Tensor master(const at::Tensor& parameter) const;  // undefined if there is none
  void sync_masters();
  void upload_options();

 private:
  std::shared_ptr<detail::AdamOnDevice> on_device_;
};

class AdamW : public torch::optim::Optimizer {
 public:
  explicit AdamW(std::vector<at::Tensor> parameters, AdamWOptions options = {});
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions options = {});

  static torch::optim::OptimizerParamGroup group(std::vector<at::Tensor> parameters, AdamWOptions options);
  AdamWOptions options(std::size_t group = 0) const;

  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // See optimizer.h.
  at::Tensor master(const at::Tensor& parameter) const;  // undefined if there is none
  void sync_masters();
  void upload_options();

 private:
  std::shared_ptr<detail::AdamOnDevice> on_device_;
};

}  // namespace lockstep
