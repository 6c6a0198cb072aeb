// A rank of a pipeline of three whose second rank is killed in the middle of a schedule. The other ranks
// write the error that they get to FOLDER/RANK.
//
//   lockstep run -n 3 pipeline_victim FOLDER 1f1b backward
#include <signal.h>

#include <chrono>
#include <fstream>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include "cmake/multicall.h"

namespace lockstep::testing::pipeline_victim {

namespace {

struct StageImpl : torch::nn::Module {
  StageImpl() { register_module("linear", linear); }
  at::Tensor forward(const at::Tensor& x) {
    const bool now = ++calls == 11;  // In the third micro-batch of the third step.
    if (dies == "forward" && now) ::raise(SIGKILL);
    auto y = linear(x);
    if (dies == "backward" && now)
      y.register_hook([](const at::Tensor& gradient) {
        ::raise(SIGKILL);
        return gradient;
      });
    return y;
  }
  torch::nn::Linear linear{4, 4};
  std::string dies;
  int calls = 0;
};
TORCH_MODULE(Stage);

}  // namespace

MULTICALL_MAIN(pipeline_victim) {
  auto world = lockstep::World::from_environment();
  std::vector<Stage> stages(3);
  if (world.rank() == 1) stages[1]->dies = argv[3];
  lockstep::Pipeline pipeline({stages[0], stages[1], stages[2]}, world.group(),
                              lockstep::ScheduleNamed{argv[2], 4});
  try {
    for (int step = 0; step < 4; ++step)
      pipeline.step(
          torch::ones({8, 4}), torch::ones({8, 4}),
          [](const at::Tensor& output, const at::Tensor& target) { return torch::mse_loss(output, target); });
  } catch (const lockstep::CommError& error) {
    std::ofstream(argv[1] + std::string("/") + std::to_string(world.rank())) << error.what();
    throw;
  }
  return 0;
}

}  // namespace lockstep::testing::pipeline_victim
