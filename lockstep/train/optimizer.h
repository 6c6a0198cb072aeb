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
  // LibTorch's fused kernels: the same within rounding; the faster one on CUDA.
  fused,
};

}  // namespace lockstep
