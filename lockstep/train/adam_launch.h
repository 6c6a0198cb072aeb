// Adam's updates on CUDA by our own kernel (kernels/adam.cu): gathered over a group's parameters, then
// launched.
#pragma once

#include <map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/kernels/kernels.h>
#include <lockstep/train/update.h>

namespace lockstep::detail {

// A group's options on the devices of its parameters, where steps that are replayed find them: `capturable`.
class AdamOnDevice {
 public:
  // Options that have changed since are brought there. While a graph is captured nothing is: that would be
  // replayed too, and what is not there yet is a ConfigError.
  void put(std::size_t group, at::Device device, const AdamSettings& settings);
  // For each group that has been put: settings_of(group).
  template <typename SettingsOf>
  void put_again(SettingsOf settings_of) {
    for (auto& [key, block] : blocks_) put(key.first, block.memory.device(), settings_of(key.first));
  }
  const kernels::AdamSettings* find(std::size_t group, at::Device device) const;

 private:
  struct Block {
    at::Tensor memory;
    kernels::AdamSettings there;
  };
  std::map<std::pair<std::size_t, int>, Block> blocks_;  // by group and device
};

// One parameter's tensors, of one layout. master: the parameter itself where that is float32.
struct AdamRow {
  at::Tensor parameter, gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq, device_step;
};

// One group's.
class AdamLaunches {
 public:
  void begin(bool maximize) { maximize_ = maximize; }
  // Whether the kernel can do it: on CUDA, the library has kernels, the parameter has no holes.
  static bool takes(const at::Tensor& parameter);

  void add(AdamRow row, const AdamFactors& factors);  // the host counts
  void add_capturable(AdamRow row);
  void run(std::size_t group, const AdamOnDevice& on_device);

 private:
  struct Batch {
    at::Device device;
    kernels::AdamCall call;
    std::vector<AdamRow> rows;
  };
  Batch& batch_for(const AdamRow& row, const kernels::AdamFactors& factors);
  std::vector<Batch> batches_;
  bool maximize_ = false;
};

}  // namespace lockstep::detail
