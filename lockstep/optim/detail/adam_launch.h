// Adam's updates on CUDA by our own kernel (kernels/adam.cu): gathered over a step's parameters, then
// launched.
#pragma once

#include <map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/kernels/kernels.h>
#include <lockstep/optim/update/update.h>

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

class AdamLaunches {
 public:
  // Whether the kernel can do it: on CUDA, the library has kernels, the parameter has no holes.
  static bool takes(const at::Tensor& parameter);

  void add(AdamRow row, bool maximize, const AdamFactors& factors);  // the host counts
  void add_capturable(AdamRow row, bool maximize, const kernels::AdamSettings* settings);
  void run();

 private:
  struct Batch {
    at::Device device;
    kernels::AdamCall call;
    std::vector<AdamRow> rows;
    at::Tensor scratch;
  };
  void add(AdamRow row, bool maximize, const kernels::AdamFactors& factors,
           const kernels::AdamSettings* settings);
  std::vector<Batch> batches_;
};

}  // namespace lockstep::detail
