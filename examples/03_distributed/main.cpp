// Distributed training of a small model: the third example of the article, with averaged gradients.
//
//   lockstep run -n 2 03_distributed --seed 1
//
// Rank 0 prints the same lines as the Python version (DistributedDataParallel, DistributedSampler). With
// --forget-ddp it does what the article does: it trains two models that do not communicate, and reports that.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
namespace ls = lockstep;

struct SimpleModelImpl : torch::nn::Module {
  SimpleModelImpl() { register_module("linear", linear); }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x); }
  torch::nn::Linear linear{10, 1};
};
TORCH_MODULE(SimpleModel);

int main(int argc, char** argv) {
  unsigned long seed = 0;
  bool forget_ddp = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      seed = std::strtoul(argv[++i], nullptr, 10);
    } else if (std::strcmp(argv[i], "--forget-ddp") == 0) {
      forget_ddp = true;
    } else {
      std::fprintf(stderr, "usage: %s [--seed S] [--forget-ddp]\n", argv[0]);
      return 2;
    }
  }
  torch::manual_seed(seed);
  auto world = ls::World::from_environment();

  auto X = torch::randn({1000, 10});
  auto y = torch::randn({1000, 1});
  ls::TensorDataset dataset(X, y);
  ls::DistributedSampler sampler(dataset.size(), world.group());
  ls::DataLoader loader(dataset, sampler, {.batch_size = 32});

  SimpleModel model;
  std::optional<ls::DistributedDataParallel<SimpleModel>> ddp;
  if (!forget_ddp) ddp.emplace(model, world.group());
  ls::Adam optimizer(model->parameters(), {.lr = 0.001});

  for (int epoch = 0; epoch < 10; ++epoch) {
    sampler.set_epoch(epoch);
    int step = 0;
    for (auto& [inputs, labels] : loader) {
      optimizer.zero_grad();
      auto outputs = ddp ? (*ddp)(inputs) : model(inputs);
      auto loss = torch::mse_loss(outputs, labels);
      loss.backward();
      optimizer.step();
      ++step;
      if (world.is_main())
        std::printf("Epoch [%d/10], Step [%d/%ld], Loss: %.4f\n", epoch + 1, step,
                    static_cast<long>(loader.size()), loss.item<float>());
    }
    try {
      ls::check_replicas(*model, world.group());
    } catch (const ls::DriftError& error) {
      if (world.is_main()) std::printf("after epoch %d: %s\n", epoch + 1, error.what());
      return 1;
    }
  }
}
