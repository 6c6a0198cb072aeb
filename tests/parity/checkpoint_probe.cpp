// The C++ side of tests/parity/checkpoint_test.py.
//
//   checkpoint_probe write FILE RAW   trains a little, saves everything to FILE and the parameters' bytes to
// RAW
//   checkpoint_probe read FILE RAW    loads the model from FILE, which Python wrote, and writes its bytes to
// RAW
#include <fstream>
#include <iostream>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include "cmake/multicall.h"

namespace lockstep::testing::checkpoint_probe {

namespace {

torch::nn::Sequential make_model() {
  torch::nn::Sequential model(torch::nn::Linear(6, 16), torch::nn::BatchNorm1d(16), torch::nn::ReLU(),
                              torch::nn::Linear(16, 3));
  model[3]->to(torch::kBFloat16);
  model->register_buffer("flags", torch::tensor({true, false, true}));
  model->register_buffer("counts", torch::tensor({1, -2, 3}, torch::kShort));
  return model;
}

void write_raw(const torch::nn::Sequential& model, const std::string& path) {
  std::ofstream out(path, std::ios::binary);
  for (const auto& list : {model->named_parameters(), model->named_buffers()})
    for (const auto& item : list) {
      const auto values = item.value().detach().contiguous();
      out.write(static_cast<const char*>(values.data_ptr()), static_cast<std::streamsize>(values.nbytes()));
    }
}

}  // namespace

MULTICALL_MAIN(checkpoint_probe) {
  if (argc != 4) return 2;
  const std::string what = argv[1], file = argv[2], raw = argv[3];
  auto model = make_model();
  if (what == "read") {
    lockstep::load(file, {.model = model});
    write_raw(model, raw);
    return 0;
  }
  torch::manual_seed(5);
  lockstep::AdamW optimizer(model->parameters(), {.lr = 0.25, .betas = {0.9, 0.95}});
  lockstep::CosineAnnealingLR scheduler(optimizer, {.T_max = 10});
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    auto hidden = model[0]->as<torch::nn::Linear>()->forward(torch::randn({8, 6}));
    hidden = torch::relu(model[1]->as<torch::nn::BatchNorm1d>()->forward(hidden));
    model[3]->as<torch::nn::Linear>()->forward(hidden.to(torch::kBFloat16)).square().sum().backward();
    optimizer.step();
    scheduler.step();
  }
  lockstep::save(file, {.model = model,
                        .optimizer = optimizer,
                        .scheduler = scheduler,
                        .rng = true,
                        .values = {{"epoch", 3}, {"note", "from C++"}}});
  write_raw(model, raw);
  return 0;
}

}  // namespace lockstep::testing::checkpoint_probe
