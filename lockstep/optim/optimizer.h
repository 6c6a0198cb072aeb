// How Lockstep's optimizers, Adam, AdamW and SGD, do their work. They are torch::optim::Optimizers: parameter
// groups, zero_grad, state, LibTorch's schedulers and torch::save work as with LibTorch's own, and so does
// a cast of a group's options to torch::optim::AdamOptions, AdamWOptions or SGDOptions.
#pragma once

#include <cstdint>

namespace lockstep {

enum class Implementation : std::uint8_t {
  // The operations of Python's torch.optim, one after another: on the CPU the same bits. Where LibTorch's
  // kernels and ours agree to the bit on this machine, which is tried once, float32 parameters are updated
  // in one sweep of our own, several times faster.
  single,
  // LibTorch's fused kernels: the same within rounding; the faster one on CUDA. Adam with master_weights or
  // capturable
  // has a kernel of our own there.
  fused,
};

// master_weights: a bfloat16 or float16 parameter gets a master, its copy in float32, and state in float32.
// step() updates the master as a float32 parameter is updated, by the gradient in float32, and the parameter
// becomes the master, rounded. Parameters of other dtypes are as without it.
//
// The parameter is what counts: elements that somebody has written to since the last step, so that they are
// not their master's rounding any more, become the master. step() sees that by the parameter's version, which
// all of LibTorch's operations change; after writing in another way (tensor.data(), a pointer) or while a
// captured step is replayed, call sync_masters(). State that was saved without masters gets them from the
// parameters.
//
// capturable: step() can be captured in a CUDA graph (StepGraph does it): steps are counted on the device,
// and lr, betas, eps and weight_decay are read there. They are brought there by step(), and by StepGraph
// before each replay; whoever replays graphs of their own calls upload_options(). Needs the library's
// kernels, float32 parameters, or bfloat16 and float16 ones with master_weights; parameters on the CPU are as
// without it.

}  // namespace lockstep
