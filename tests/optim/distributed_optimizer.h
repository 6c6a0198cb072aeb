// Helpers shared by the tests of DistributedOptimizer.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <string>

#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {

inline at::Tensor features_of(int rank, int step) { return numbers(9000 + 100 * step + rank, {4, 20}); }

// Trains with the plain optimizer and with the distributed one, and compares.
template <typename Inner, typename Model, typename Options, typename Step>
void expect_the_same_bits(World& world, const Options& options, const Step& step, DdpOptions ddp_options = {},
                          DistributedOptimizerOptions sharding = {}) {
  Model plain_model, model;
  DistributedDataParallel plain_ddp(plain_model, world.group(), ddp_options),
      ddp(model, world.group(), ddp_options);
  Inner plain(plain_model->parameters(), options);
  DistributedOptimizer<Inner> optimizer(ddp, options, sharding);
  for (int i = 0; i < 5; ++i) {
    step(plain_ddp, plain, i);
    step(ddp, optimizer, i);
    ASSERT_TRUE(same_bits(values_of(*plain_model), values_of(*model))) << "step " << i;
  }
  check_replicas(*model, world.group());
}

inline constexpr auto kStep = [](auto& ddp, auto& optimizer, const at::Tensor& input) {
  optimizer.zero_grad();
  ddp(input).square().mean().backward();
  optimizer.step();
};

// A path known to all ranks and unique to this job.
inline std::string common_path(World& world, const std::string& name) {
  auto path = world.is_main() ? (std::filesystem::temp_directory_path() /
                                 fmt::format("lockstep-{}-{}-{}.safetensors", name, ::getpid(), world.size()))
                                    .string()
                              : "";
  return world.group().broadcast_value(std::string_view(path));
}

}  // namespace lockstep::testing
