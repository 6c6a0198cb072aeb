// Handwritten digits: trains a small convolutional network with BatchNorm and augmentation, on any number of
// ranks.
//
//   lockstep run -n 2 04_digits
//   lockstep run -n 2 --max-restarts 1 04_digits --save digits.safetensors   # resumes if it is killed
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "progress.h"

namespace ls = lockstep;
namespace fs = std::filesystem;

struct Options {
  std::string data = {}, save = {};
  int epochs = 20, batch_size = 64, save_every = 10;
  std::uint64_t seed = 1;
};

struct NetImpl : torch::nn::Module {
  NetImpl() { register_module("features", features), register_module("classes", classes); }
  torch::Tensor forward(const torch::Tensor& x) { return classes(features->forward(x).flatten(1)); }
  static torch::nn::Conv2dOptions conv(int in, int out) {
    return torch::nn::Conv2dOptions(in, out, 3).padding(1).bias(false);
  }
  torch::nn::Sequential features{torch::nn::Conv2d(conv(1, 24)),
                                 torch::nn::BatchNorm2d(24),
                                 torch::nn::ReLU(),
                                 torch::nn::Conv2d(conv(24, 48)),
                                 torch::nn::BatchNorm2d(48),
                                 torch::nn::ReLU(),
                                 torch::nn::MaxPool2d(2),
                                 torch::nn::Conv2d(conv(48, 48)),
                                 torch::nn::BatchNorm2d(48),
                                 torch::nn::ReLU()};
  torch::nn::Linear classes{48 * 4 * 4, 10};
};
TORCH_MODULE(Net);

// Shifts images by up to one pixel and adds a little noise. The random numbers depend only on seed, step and
// rank, so a run that resumes after a restart draws the same.
torch::Tensor augmented(const torch::Tensor& images, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto padded = torch::constant_pad_nd(images, {1, 1, 1, 1});
  const auto shifts = at::randint(0, 3, {images.size(0), 2}, generator);
  const auto moves = shifts.accessor<std::int64_t, 2>();
  std::vector<torch::Tensor> moved;
  for (std::int64_t i = 0; i < images.size(0); ++i)
    moved.push_back(padded[i].narrow(1, moves[i][0], 8).narrow(2, moves[i][1], 8));
  return torch::stack(moved) + 0.03 * at::randn(images.sizes(), generator);
}

// The percentage of correct answers. Counts each sample once, for any number of ranks.
template <typename Dataset>
double accuracy(Net& model, const Dataset& dataset, ls::Group group) {
  torch::NoGradGuard no_grad;
  model->eval();
  ls::DistributedSampler sampler(dataset.size(), group, {.shuffle = false, .exact = true});
  ls::DataLoader loader(dataset, sampler, {.batch_size = 128});
  auto counts = torch::zeros({2}, torch::kInt64);
  for (auto& [images, labels] : loader) {
    counts[0] += (model(images).argmax(1) == labels).sum();
    counts[1] += labels.size(0);
  }
  group.all_reduce(counts).wait();
  model->train();
  return 100.0 * counts[0].item<double>() / counts[1].item<double>();
}

Options parse(int argc, char** argv) {
  Options options{.data = fs::path(argv[0]).parent_path() / "../digits"};
  const auto usage = [&] {
    std::fprintf(stderr,
                 "usage: %s [--data DIR] [--save FILE] [--save-every STEPS] [--epochs N] [--batch-size N] "
                 "[--seed S]\n",
                 argv[0]);
    std::exit(2);
  };
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) usage();
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--data")
      options.data = value;
    else if (name == "--save")
      options.save = value;
    else if (name == "--save-every")
      options.save_every = std::stoi(value);
    else if (name == "--epochs")
      options.epochs = std::stoi(value);
    else if (name == "--batch-size")
      options.batch_size = std::stoi(value);
    else if (name == "--seed")
      options.seed = std::stoull(value);
    else
      usage();
  }
  return options;
}

int main(int argc, char** argv) {
  const auto options = parse(argc, argv);
  auto world = ls::World::from_environment();
  auto group = world.group();
  torch::manual_seed(options.seed);

  // Trains on five of six samples and tests on the sixth.
  const auto images = ls::read_npy(options.data + "/images.npy").unsqueeze(1),
             labels = ls::read_npy(options.data + "/labels.npy");
  const auto tested = torch::arange(images.size(0)) % 6 == 5;
  ls::TensorDataset train(images.index({~tested}), labels.index({~tested})),
      test(images.index({tested}), labels.index({tested}));

  Net model;
  ls::DistributedDataParallel ddp(model, group);
  ls::AdamW optimizer(model->parameters(), {.lr = 3e-3, .weight_decay = 0.05});
  ls::DistributedSampler sampler(train.size(), group, {.seed = static_cast<std::int64_t>(options.seed)});
  ls::DataLoader loader(train, sampler, {.batch_size = options.batch_size / world.size()});
  ls::CosineAnnealingLR schedule(optimizer, {.T_max = options.epochs});

  std::int64_t step = 0;  // Counts over the whole training, across restarts.
  if (!options.save.empty() && fs::exists(options.save))
    step = ls::load(options.save, {.model = model,
                                   .optimizer = optimizer,
                                   .scheduler = schedule,
                                   .sampler = sampler,
                                   .group = group})
               .integer("step");

  Progress progress(options.epochs * train.size(), sampler.epoch() * train.size() + sampler.position(),
                    !world.is_main());
  double last = 0;
  for (auto epoch = sampler.epoch(); epoch < options.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& [inputs, targets] : loader) {
      const auto draw = static_cast<std::uint64_t>(epoch * train.size() + sampler.position());
      optimizer.zero_grad();
      auto loss = torch::cross_entropy_loss(ddp(augmented(inputs, options.seed + 1000 * draw + world.rank())),
                                            targets);
      loss.backward();
      optimizer.step();
      world.step(++step);
      last = loss.item<double>();
      progress.add(inputs.size(0) * world.size(), last);
      const bool stop = world.stop_requested();
      if (!options.save.empty() && (stop || step % options.save_every == 0))
        ls::save(options.save, {.model = model,
                                .optimizer = optimizer,
                                .scheduler = schedule,
                                .sampler = sampler,
                                .values = {{"step", step}},
                                .group = group});
      if (stop) return 0;
    }
    schedule.step();
    ddp.sync_buffers();
    char text[80];
    std::snprintf(text, sizeof text, "epoch %2d/%d  loss %.4f  test %.2f %%", static_cast<int>(epoch) + 1,
                  options.epochs, last, accuracy(model, test, group));
    progress.line(text);
  }
  std::string bytes;
  for (const auto& parameter : model->parameters())
    bytes.append(static_cast<const char*>(parameter.const_data_ptr()), parameter.nbytes());
  if (world.is_main()) std::printf("weights %016zx\n", std::hash<std::string>()(bytes));
}
