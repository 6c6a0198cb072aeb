// Behaviour common to Lockstep's optimizers: Adam, AdamW and SGD. They are torch::optim::Optimizers:
// parameter groups, zero_grad, state, LibTorch's schedulers and torch::save work as with LibTorch's own, and
// a group's options can be cast to torch::optim::AdamOptions, AdamWOptions or SGDOptions.
#pragma once

#include <cstdint>

namespace lockstep {

enum class Implementation : std::uint8_t {
  // The operations of Python's torch.optim, one after another; on the CPU with the same bits. If Lockstep's
  // kernels agree with LibTorch's to the bit on this machine (tested once), float32 parameters are updated in
  // a single pass, several times faster.
  single,
  // LibTorch's fused kernels: equal up to rounding, and faster on CUDA. On CUDA, Adam with master_weights or
  // capturable uses Lockstep's kernel instead.
  fused,
};

// master_weights: each bfloat16 or float16 parameter gets a float32 copy, its master, and float32 state.
// step() updates the master like a float32 parameter, with the gradient converted to float32, and rounds it
// into the parameter. Parameters of other dtypes are not affected.
//
// The parameter takes precedence: elements modified since the last step, which no longer equal their rounded
// master, are copied to the master. step() detects this by the parameter's version counter, which all of
// LibTorch's operations update. Call sync_masters() after writing in another way (tensor.data(), a pointer),
// and after any write while a captured step is being replayed. State saved without masters gets them from
// the parameters.
//
// capturable: step() can be captured in a CUDA graph (StepGraph does that). Steps are then counted on the
// device, and lr, betas, eps and weight_decay are read there. step() uploads them, and so does StepGraph
// before each replay; if you replay graphs yourself, call upload_options() first. Requires Lockstep's kernels
// and float32 parameters, or bfloat16 and float16 ones with master_weights. CPU parameters are not affected.

}  // namespace lockstep
