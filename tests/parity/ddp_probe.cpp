// Trains under DistributedDataParallel like ddp_test.py, and writes rank 0's parameters as raw floats.
//
//   lockstep run -n 2 ddp_probe OPTIMIZER SEED STEPS FILE
#include <fstream>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include "cmake/multicall.h"

namespace lockstep::testing::ddp_probe {

MULTICALL_MAIN(ddp_probe) {
  if (argc != 5) return 2;
  const std::string kind = argv[1];
  const int seed = std::stoi(argv[2]), steps = std::stoi(argv[3]);
  auto world = lockstep::World::from_environment();
  torch::manual_seed(seed);
  // One by one, because arguments of a call may be evaluated in any order, and these draw random numbers.
  torch::nn::Sequential model;
  model->push_back(torch::nn::Linear(12, 32));
  model->push_back(torch::nn::Tanh());
  model->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
  model->push_back(torch::nn::Linear(32, 32));
  model->push_back(torch::nn::Tanh());
  model->push_back(torch::nn::Linear(32, 4));
  lockstep::DistributedDataParallel ddp(model, world.group(),
                                        {.bucket_bytes = 2048, .first_bucket_bytes = 1024});
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (kind == "sgd")
    optimizer = std::make_unique<lockstep::SGD>(model->parameters(),
                                                lockstep::SGDOptions{.lr = 0.05, .momentum = 0.9});
  else
    optimizer = std::make_unique<lockstep::Adam>(model->parameters(), lockstep::AdamOptions{.lr = 0.01});
  torch::manual_seed(1000 * seed + world.rank());
  for (int step = 0; step < steps; ++step) {
    const auto x = torch::randn({16, 12}), y = torch::randn({16, 4});
    optimizer->zero_grad();
    torch::mse_loss(ddp(x), y).backward();
    optimizer->step();
  }
  if (!world.is_main()) return 0;
  std::ofstream file(argv[4], std::ios::binary);
  for (const auto& parameter : model->parameters()) {
    const auto values = parameter.detach().contiguous();
    file.write(static_cast<const char*>(values.const_data_ptr()),
               static_cast<std::streamsize>(values.nbytes()));
  }
  return 0;
}

}  // namespace lockstep::testing::ddp_probe
