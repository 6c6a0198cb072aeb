// Adam's updates on CUDA with Lockstep's kernel (kernels/adam.cu): collected over the parameters of a step,
// then launched together.
#pragma once

#include <map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/kernels/kernels.h>
#include <lockstep/optim/update/update.h>

namespace lockstep::detail {

// A group's options in device memory, where replayed steps read them (`capturable`).
class AdamOnDevice {
 public:
  // Uploads options that have changed. Uploads nothing during a capture, because replays would repeat it;
  // throws ConfigError then if the options are not on the device yet.
  void put(std::size_t group, at::Device device, const AdamSettings& settings);
  // Calls put() for each uploaded group, with settings_of(group).
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
  std::map<std::pair<std::size_t, int>, Block> blocks_;  // keyed by group and device
};

// The tensors of one parameter, all with the same layout. `master` is the parameter itself if that is
// float32.
struct AdamRow {
  at::Tensor parameter, gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq, device_step;
};

class AdamLaunches {
 public:
  // True if the kernel can update it: on CUDA, in a build with kernels, and dense in memory.
  static bool takes(const at::Tensor& parameter);

  void add(AdamRow row, bool maximize, const AdamFactors& factors);  // steps are counted on the host
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
