// Batch normalisation over all ranks' batches: N ranks normalise like one rank with the global batch.
//
//   lockstep::SyncBatchNorm2d norm(torch::nn::BatchNorm2dOptions(16), world.group());
//   lockstep::convert_sync_batchnorm(*model, world.group());   // every BatchNorm in a Unit or a Sequential
//
// Forward in training and backward communicate: every rank must call them equally often and in the same
// order. Batches may differ in size and may be empty. In evaluation, and on one rank, it is BatchNorm. If
// DistributedDataParallel uses find_unused_parameters, give it a group of its own (group.split(0)), as
// convert_sync_batchnorm does.
#pragma once

#include <concepts>
#include <memory>
#include <optional>
#include <utility>

#include <lockstep/comm/group.h>
#include <lockstep/modules/unit.h>
#include <torch/nn/modules/batchnorm.h>

namespace lockstep {
namespace detail {

struct BatchNormState {
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;
  torch::nn::BatchNormOptions options;
  bool training;
  int dims;  // 1, 2 or 3.
};
at::Tensor sync_batch_norm(const at::Tensor& input, const BatchNormState& state, Group& group);

template <int D, typename Base>
class SyncBatchNormImpl : public Base, public CommunicatesInForward {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& given, Group group)
      : Base(given), group_(std::move(group)) {}

  at::Tensor forward(const at::Tensor& input) { return sync_batch_norm(input, state(), group_); }
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override;
  void pretty_print(std::ostream& stream) const override;

  // Shares the parameters and statistics of another module with the same options; does not copy them.
  void share(const Base& other);

 private:
  BatchNormState state() {
    return {this->weight,
            this->bias,
            this->running_mean,
            this->running_var,
            this->num_batches_tracked,
            this->options,
            this->is_training(),
            D};
  }
  Group group_;
};

}  // namespace detail

class SyncBatchNorm1dImpl : public detail::SyncBatchNormImpl<1, torch::nn::BatchNorm1dImpl> {
  using SyncBatchNormImpl::SyncBatchNormImpl;
};
class SyncBatchNorm2dImpl : public detail::SyncBatchNormImpl<2, torch::nn::BatchNorm2dImpl> {
  using SyncBatchNormImpl::SyncBatchNormImpl;
};
class SyncBatchNorm3dImpl : public detail::SyncBatchNormImpl<3, torch::nn::BatchNorm3dImpl> {
  using SyncBatchNormImpl::SyncBatchNormImpl;
};

namespace detail {

// As TORCH_MODULE makes it, and errors name the line that makes the layer.
template <typename Given>
class SyncBatchNormHolder : public torch::nn::ModuleHolder<Given> {
 public:
  using Impl = Given;
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
  template <std::convertible_to<torch::nn::BatchNormOptions> Options>
  SyncBatchNormHolder(Options&& options, Group group, Site site = Site::current())
      : torch::nn::ModuleHolder<Impl>(
            std::make_shared<Impl>(std::forward<Options>(options), group.called_at(site))) {}
};

}  // namespace detail

class SyncBatchNorm1d : public detail::SyncBatchNormHolder<SyncBatchNorm1dImpl> {
  using SyncBatchNormHolder::SyncBatchNormHolder;
};
class SyncBatchNorm2d : public detail::SyncBatchNormHolder<SyncBatchNorm2dImpl> {
  using SyncBatchNormHolder::SyncBatchNormHolder;
};
class SyncBatchNorm3d : public detail::SyncBatchNormHolder<SyncBatchNorm3dImpl> {
  using SyncBatchNormHolder::SyncBatchNormHolder;
};

// Converts every BatchNorm1d, 2d and 3d of the module and its submodules; the parameters stay the same
// tensors. Collective: every rank must call it. Returns the number of converted layers. Throws ConfigError,
// which lists layers held as plain members, because C++ calls of those cannot be intercepted; the module is
// then unchanged.
int convert_sync_batchnorm(torch::nn::Module& module, Group group, Site site = Site::current());

}  // namespace lockstep
