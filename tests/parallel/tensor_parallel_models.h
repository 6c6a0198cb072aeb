// Helpers shared by the tests of tensor parallelism.
#pragma once

#include <lockstep/parallel/tensor_parallel.h>

#include "parallel/models.h"

namespace lockstep::testing {

inline at::Tensor doubles(std::uint64_t seed, at::IntArrayRef sizes) {
  return numbers(seed, sizes).to(at::kDouble);
}

// Copies values and dtype from a whole module.
inline void take(torch::nn::Module& module, torch::nn::Module& whole) {
  module.to(whole.parameters()[0].scalar_type());
  load_full_state(module, full_state(whole));
}

// The gradient of each parameter, with slices joined.
inline std::vector<at::Tensor> full_gradients(torch::nn::Module& module) {
  std::vector<at::Tensor> gradients;
  const auto shards = tensor_shards(module);
  for (const auto& parameter : module.parameters()) {
    auto gradient = parameter.grad().defined() ? parameter.grad().clone() : at::Tensor();
    for (const auto& shard : shards)
      if (gradient.defined() && shard.parameter.is_same(parameter))
        gradient =
            detail::joined(gradient.unflatten(shard.dim, {shard.parts, -1}), shard.group, shard.dim + 1)
                .flatten(shard.dim, shard.dim + 1);
    gradients.push_back(gradient);
  }
  return gradients;
}

}  // namespace lockstep::testing
