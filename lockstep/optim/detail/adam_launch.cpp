#include <lockstep/optim/detail/adam_launch.h>

#include <cstring>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <lockstep/base/error.h>
#include <lockstep/nn/detail/fused.h>
#include <lockstep/optim/detail/cuda_graph.h>

namespace lockstep::detail {
namespace {

using nn::detail::number_of;
using nn::detail::stream_of;

kernels::AdamSettings for_device(const AdamSettings& s) {
  return {s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.decoupled};
}

bool same(const kernels::AdamSettings& a, const kernels::AdamSettings& b) {
  return a.lr == b.lr && a.beta1 == b.beta1 && a.beta2 == b.beta2 && a.eps == b.eps &&
         a.weight_decay == b.weight_decay && a.decoupled == b.decoupled;
}

kernels::AdamFactors plain(const AdamFactors& f) {
  return {f.first_weight, f.second_keep, f.second_weight, f.step_size, f.root_divisor, f.eps, f.shrink, f.l2};
}

// Returns the gradient with the parameter's memory layout, so that elements correspond by address.
at::Tensor laid_out_as(const at::Tensor& parameter, const at::Tensor& gradient) {
  const bool number =
      gradient.scalar_type() == parameter.scalar_type() || gradient.scalar_type() == at::kFloat;
  if (number && gradient.strides() == parameter.strides() && !gradient.is_neg()) return gradient;
  return at::empty_like(parameter, gradient.options().dtype(number ? gradient.scalar_type() : at::kFloat))
      .copy_(gradient);
}

template <typename T>
T* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<T>() : nullptr;
}

}  // namespace

void AdamOnDevice::put(std::size_t group, at::Device device, const AdamSettings& settings) {
  const auto found = blocks_.find({group, device.index()});
  const auto wanted = for_device(settings);
  if (found != blocks_.end() && same(found->second.there, wanted)) return;
  if (capturing(device)) {
    if (found != blocks_.end()) return;  // uploaded before the replay
    throw ConfigError(
        "a capturable optimizer was captured before its first step; run one step before you capture");
  }
  const auto memory = found != blocks_.end() ? found->second.memory
                                             : at::empty({static_cast<std::int64_t>(sizeof(wanted))},
                                                         at::TensorOptions(at::kByte).device(device));
  const c10::DeviceGuard guard(device);
  kernels::put_adam_settings(wanted, static_cast<kernels::AdamSettings*>(memory.mutable_data_ptr()),
                             stream_of(memory));
  blocks_[{group, device.index()}] = {memory, wanted};
}

const kernels::AdamSettings* AdamOnDevice::find(std::size_t group, at::Device device) const {
  return static_cast<const kernels::AdamSettings*>(
      blocks_.at({group, device.index()}).memory.const_data_ptr());
}

bool AdamLaunches::takes(const at::Tensor& parameter) {
  return parameter.is_cuda() && parameter.is_non_overlapping_and_dense() && kernels::available();
}

void AdamLaunches::add(AdamRow row, bool maximize, const kernels::AdamFactors& factors,
                       const kernels::AdamSettings* settings) {
  if (row.parameter.numel() == 0) return;
  row.gradient = laid_out_as(row.parameter, row.gradient);
  const kernels::AdamCall call{.parameter = number_of(row.parameter),
                               .gradient = number_of(row.gradient),
                               .amsgrad = row.max_exp_avg_sq.defined(),
                               .maximize = maximize,
                               .factors = factors,
                               .settings = settings,
                               .scratch = nullptr};
  for (auto& batch : batches_)
    if (batch.device == row.parameter.device() && batch.call.parameter == call.parameter &&
        batch.call.gradient == call.gradient && batch.call.amsgrad == call.amsgrad &&
        batch.call.maximize == call.maximize && batch.call.settings == call.settings &&
        std::memcmp(&batch.call.factors, &factors, sizeof(factors)) == 0) {
      batch.rows.push_back(std::move(row));
      return;
    }
  const auto device = row.parameter.device();
  batches_.push_back({device, call, {std::move(row)}, {}});
}

void AdamLaunches::add(AdamRow row, bool maximize, const AdamFactors& factors) {
  add(std::move(row), maximize, plain(factors), nullptr);
}

void AdamLaunches::add_capturable(AdamRow row, bool maximize, const kernels::AdamSettings* settings) {
  add(std::move(row), maximize, {}, settings);
}

void AdamLaunches::run() {
  for (auto& [device, call, rows, scratch] : batches_)  // allocate first, because this may fail
    if (call.settings != nullptr) {
      scratch = at::empty({static_cast<std::int64_t>(rows.size() * sizeof(kernels::AdamFactors))},
                          at::TensorOptions(at::kByte).device(device));
      call.scratch = static_cast<kernels::AdamFactors*>(scratch.mutable_data_ptr());
    }
  for (const auto& [device, call, rows, scratch] : batches_) {
    const c10::DeviceGuard guard(device);
    std::vector<kernels::AdamTensor> tensors;
    tensors.reserve(rows.size());
    for (const auto& row : rows)
      tensors.push_back({.parameter = row.parameter.mutable_data_ptr(),
                         .gradient = row.gradient.const_data_ptr(),
                         .master = row.master.mutable_data_ptr<float>(),
                         .exp_avg = row.exp_avg.mutable_data_ptr<float>(),
                         .exp_avg_sq = row.exp_avg_sq.mutable_data_ptr<float>(),
                         .max_exp_avg_sq = data_or_null<float>(row.max_exp_avg_sq),
                         .step = data_or_null<std::int64_t>(row.device_step),
                         .count = row.parameter.numel()});
    kernels::adam(call, tensors, stream_of(rows[0].parameter));
    for (const auto& row : rows) row.parameter.unsafeGetTensorImpl()->bump_version();
  }
  batches_.clear();
}

}  // namespace lockstep::detail
