// Gradients of a model that two ranks share, for comparison with PyTorch's in model_parallel_test.py. Prints
// a line for each weight on the rank that has it, "name sum weighted-sum", and the loss.
//
//   lockstep run -n 2 --prefix never model_parallel_probe pipeline 1f1b
//   lockstep run -n 2 --prefix never model_parallel_probe tensor sequence
//
// With "tensor", the weights are whole, after a step of SGD.
#include <cstdio>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include "cmake/multicall.h"

namespace lockstep::testing::model_parallel_probe {

namespace {

using namespace lockstep;

void show(const std::string& name, const at::Tensor& gradient) {
  const auto values = gradient.to(at::kDouble).flatten();
  const auto weights = torch::arange(values.numel(), at::kDouble).remainder(7).add(1);
  const double sum = values.sum().item<double>(), weighted = values.dot(weights).item<double>();
  std::printf("%s %.17g %.17g\n", name.c_str(), sum, weighted);
}

int pipeline(World& world, const std::string& name) {
  torch::manual_seed(3);
  const int stages = make_schedule(name, {.ranks = 2, .microbatches = 4}).num_stages();
  std::vector<PipelineStage> pieces;
  for (int i = 0; i < stages; ++i) {
    torch::nn::Sequential stage;
    stage->push_back(torch::nn::Linear(8, 16));
    stage->push_back(torch::nn::Tanh());
    stage->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
    stage->push_back(torch::nn::Linear(16, 8));
    stage->to(at::kDouble);
    pieces.emplace_back(stage);
  }
  torch::manual_seed(4);
  const auto inputs = torch::randn({16, 8}, at::kDouble), targets = torch::randn({16, 8}, at::kDouble);
  Pipeline pipe(pieces, world.group(), ScheduleNamed{name, 4});
  pipe.step(inputs, targets, [](const at::Tensor& output, const at::Tensor& target) {
    return torch::mse_loss(output, target);
  });
  for (const auto& item : pipe.module()->named_parameters()) show(item.key(), item.value().grad());
  if (pipe.is_last()) std::printf("loss %.17g 0\n", pipe.loss().item<double>());
  if (!pipe.is_last()) pipe.loss();
  return 0;
}

struct NetImpl : torch::nn::Module {
  NetImpl() : embed(16, 8), norm(torch::nn::LayerNormOptions({8})), up(8, 32), down(32, 8), head(8, 16) {
    register_module("embed", embed);
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    register_module("head", head);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const auto x = embed(tokens);
    return head(x + down(torch::gelu(up(norm(x)))));
  }
  Unit<torch::nn::Embedding> embed;
  Unit<torch::nn::LayerNorm> norm;
  Unit<torch::nn::Linear> up, down, head;
};
TORCH_MODULE(Net);

int tensor(World& world, const std::string& name) {
  torch::manual_seed(5);
  Net model;
  auto group = world.group();
  if (name == "plain")
    parallelize_module(*model, group,
                       {{"embed", Rowwise{}},
                        {"up", Colwise{}},
                        {"down", Rowwise{}},
                        {"head", Colwise{.gather_output = true}}});
  else
    parallelize_module(*model, group,
                       {{"embed", Rowwise{.sequence_dim = 1}},
                        {"norm", SequenceParallel{}},
                        {"up", Colwise{.sequence_dim = 1}},
                        {"down", Rowwise{.sequence_dim = 1}},
                        {"head", Colwise{.gather_output = true, .sequence_dim = 1}}});
  SGD optimizer(model->parameters(), {.lr = 1});
  const auto tokens = torch::arange(24).mul(5).remainder(16).view({3, 8}), targets = tokens.roll({1}, {1});
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    const auto loss = at::cross_entropy_loss(model(tokens).flatten(0, 1), targets.flatten());
    loss.backward();
    optimizer.step();
    if (world.is_main()) show("loss" + std::to_string(step), loss.detach());
  }
  for (const auto& [key, value] : full_state(*model))
    if (world.is_main()) show(key, value);
  return 0;
}

}  // namespace

MULTICALL_MAIN(model_parallel_probe) {
  if (argc != 3) return 2;
  at::set_num_threads(1);
  auto world = World::from_environment();
  const std::string kind = argv[1], name = argv[2];
  return kind == "pipeline" ? pipeline(world, name) : kind == "tensor" ? tensor(world, name) : 2;
}

}  // namespace lockstep::testing::model_parallel_probe
