#include <lockstep/train/adam_launch.h>

#include <cstring>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <lockstep/base/error.h>
#include <lockstep/train/cuda_graph.h>

namespace lockstep::detail {
namespace {

kernels::Number number_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16: return kernels::Number::bfloat16;
    case at::kHalf: return kernels::Number::float16;
    default: return kernels::Number::float32;
  }
}

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

// Element by element at the same places in memory.
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
    if (found != blocks_.end()) return;  // before the replay somebody brings them there
    throw ConfigError(
        "a capturable optimizer was captured before its first step: run a step, then capture one");
  }
  auto& block = blocks_[{group, device.index()}];
  if (!block.memory.defined())
    block.memory =
        at::empty({static_cast<std::int64_t>(sizeof(wanted))}, at::TensorOptions(at::kByte).device(device));
  const c10::DeviceGuard guard(device);
  kernels::put_adam_settings(wanted, static_cast<kernels::AdamSettings*>(block.memory.mutable_data_ptr()),
                             current_stream(device));
  block.there = wanted;
}

const kernels::AdamSettings* AdamOnDevice::find(std::size_t group, at::Device device) const {
  return static_cast<const kernels::AdamSettings*>(
      blocks_.at({group, device.index()}).memory.const_data_ptr());
}

bool AdamLaunches::takes(const at::Tensor& parameter) {
  return parameter.is_cuda() && parameter.is_non_overlapping_and_dense() && kernels::available();
}

AdamLaunches::Batch& AdamLaunches::batch_for(const AdamRow& row, const kernels::AdamFactors& factors) {
  const kernels::AdamCall call{.parameter = number_of(row.parameter),
                               .gradient = number_of(row.gradient),
                               .amsgrad = row.max_exp_avg_sq.defined(),
                               .maximize = maximize_,
                               .factors = factors,
                               .settings = nullptr,
                               .scratch = nullptr};
  for (auto& batch : batches_)
    if (batch.device == row.parameter.device() && batch.call.parameter == call.parameter &&
        batch.call.gradient == call.gradient &&
        std::memcmp(&batch.call.factors, &factors, sizeof(factors)) == 0)
      return batch;
  return batches_.emplace_back(Batch{row.parameter.device(), call, {}});
}

void AdamLaunches::add(AdamRow row, const AdamFactors& factors) {
  if (row.parameter.numel() == 0) return;
  row.gradient = laid_out_as(row.parameter, row.gradient);
  auto& batch = batch_for(row, plain(factors));
  batch.rows.push_back(std::move(row));
}

void AdamLaunches::add_capturable(AdamRow row) {
  if (row.parameter.numel() == 0) return;
  row.gradient = laid_out_as(row.parameter, row.gradient);
  auto& batch = batch_for(row, {});
  batch.rows.push_back(std::move(row));
}

void AdamLaunches::run(std::size_t group, const AdamOnDevice& on_device) {
  for (auto& [device, call, rows] : batches_) {
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
    at::Tensor scratch;
    if (rows[0].device_step.defined()) {
      scratch = at::empty({static_cast<std::int64_t>(rows.size() * sizeof(kernels::AdamFactors))},
                          at::TensorOptions(at::kByte).device(device));
      call.settings = on_device.find(group, device);
      call.scratch = static_cast<kernels::AdamFactors*>(scratch.mutable_data_ptr());
    }
    kernels::adam(call, tensors, current_stream(device));
    for (const auto& row : rows) row.parameter.unsafeGetTensorImpl()->bump_version();
  }
  batches_.clear();
}

}  // namespace lockstep::detail
