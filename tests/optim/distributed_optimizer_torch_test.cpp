// DistributedOptimizer with LibTorch's optimizers, and with one that a user declares element-wise.
#include "optim/distributed_optimizer.h"

namespace lockstep::testing {
namespace {

struct SignDescentOptions : torch::optim::OptimizerCloneableOptions<SignDescentOptions> {
  SignDescentOptions() = default;
  explicit SignDescentOptions(double given) : lr(given) {}
  double lr = 0.01;
};

// A user-defined optimizer: follows the sign of each gradient and keeps a count per element.
class SignDescent : public torch::optim::Optimizer {
 public:
  explicit SignDescent(std::vector<torch::optim::OptimizerParamGroup> groups, SignDescentOptions options = {})
      : Optimizer(std::move(groups), std::make_unique<SignDescentOptions>(options)) {}
  explicit SignDescent(std::vector<at::Tensor> parameters, SignDescentOptions options = {})
      : SignDescent({torch::optim::OptimizerParamGroup(std::move(parameters))}, options) {}
  at::Tensor step(LossClosure = nullptr) override {
    at::NoGradGuard no_grad;
    for (auto& group : param_groups())
      for (auto& parameter : group.params())
        if (parameter.grad().defined())
          parameter.sub_(parameter.grad().sign(), static_cast<SignDescentOptions&>(group.options()).lr);
    return {};
  }
};

}  // namespace
}  // namespace lockstep::testing

template <>
struct lockstep::ElementwiseOptimizer<lockstep::testing::SignDescent> : std::true_type {
  using Options = lockstep::testing::SignDescentOptions;
};

namespace lockstep::testing {
namespace {

constexpr auto kTorchStep = [](auto& ddp, auto& optimizer, int i) {
  kStep(ddp, optimizer, features_of(0, i));
};

TEST(DistributedOptimizerOfTorch, has_the_bits_of_the_plain_one) {
  on_every_rank([](World& world) {
    namespace optim = torch::optim;
    const auto step = [&](auto& ddp, auto& optimizer, int i) {
      kStep(ddp, optimizer, features_of(world.rank(), i));
    };
    expect_the_same_bits<optim::AdamW, Wide>(world, optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(true),
                                             step);
    expect_the_same_bits<optim::Adam, Wide>(world, optim::AdamOptions(1e-2).weight_decay(0.1), step);
    expect_the_same_bits<optim::SGD, Wide>(world, optim::SGDOptions(0.1).momentum(0.9).nesterov(true), step);
    expect_the_same_bits<optim::Adagrad, Wide>(world, optim::AdagradOptions(1e-2).lr_decay(0.1), step);
    expect_the_same_bits<optim::RMSprop, Wide>(
        world, optim::RMSpropOptions(1e-3).momentum(0.9).centered(true), step);
    expect_the_same_bits<SignDescent, Wide>(world, SignDescentOptions(0.02), step);
  });
}

// Saves halfway with Lockstep and with LibTorch; training resumes in a distributed and in a plain optimizer.
template <typename Inner, typename Options>
void expect_to_go_on(World& world, const Options& options) {
  const auto path = common_path(world, "torch-optimizer");
  const auto train = [](auto& ddp, auto& optimizer, int from, int to) {
    for (int i = from; i < to; ++i) kTorchStep(ddp, optimizer, i);
  };
  Wide model;
  DistributedDataParallel ddp(model, world.group());
  DistributedOptimizer<Inner> optimizer(ddp, Options(0.5));
  auto& given = static_cast<Options&>(optimizer.param_groups()[0].options());
  given = options;  // differs from the defaults now
  train(ddp, optimizer, 0, 3);
  save(path, {.model = model, .optimizer = optimizer, .group = world.group()});
  std::stringstream archived;
  torch::serialize::OutputArchive out;
  optimizer.save(out);
  out.save_to(archived);
  train(ddp, optimizer, 3, 5);
  const auto expected = values_of(*model);

  const auto expect_same_end = [&](const char* what, const auto& make, const auto& load_into) {
    Wide other;
    DistributedDataParallel other_ddp(other, world.group());
    const auto resumed = make(other_ddp);
    load_into(other, *resumed);
    train(other_ddp, *resumed, 3, 5);
    EXPECT_TRUE(same_bits(values_of(*other), expected)) << what;
  };
  const auto distributed = [](auto& other) {
    return std::make_unique<DistributedOptimizer<Inner>>(other, Options(0.5));
  };
  const auto plain = [](auto& other) { return std::make_unique<Inner>(other.parameters(), Options(0.5)); };
  const auto from_file = [&](auto& other, auto& resumed) {
    load(path, {.model = other, .optimizer = resumed, .group = world.group()});
  };
  const auto from_archive = [&](auto& other, auto& resumed) {
    load(path, {.model = other, .group = world.group()});
    std::stringstream copy(archived.str());
    torch::serialize::InputArchive in;
    in.load_from(copy);
    resumed.load(in);
  };
  expect_same_end("distributed, from a checkpoint", distributed, from_file);
  expect_same_end("plain, from a checkpoint", plain, from_file);
  expect_same_end("distributed, from an archive", distributed, from_archive);
  world.group().barrier().wait();
  if (world.is_main()) std::filesystem::remove(path);
}

TEST(DistributedOptimizerOfTorch, is_saved_whole_and_goes_on) {
  on_every_rank([](World& world) {
    namespace optim = torch::optim;
    expect_to_go_on<optim::AdamW>(world, optim::AdamWOptions(1e-2).amsgrad(true));
    expect_to_go_on<optim::SGD>(world, optim::SGDOptions(0.1).momentum(0.9));
    expect_to_go_on<optim::Adagrad>(world, optim::AdagradOptions(1e-2).lr_decay(0.1));
    expect_to_go_on<optim::RMSprop>(world, optim::RMSpropOptions(1e-3).momentum(0.9).centered(true));
  });
}

TEST(DistributedOptimizerOfTorch, state_of_a_users_own_is_refused_on_every_rank) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    DistributedOptimizer<SignDescent> optimizer(ddp);
    kStep(ddp, optimizer, numbers(1, {4, 6}));
    EXPECT_THAT(error_of<ConfigError>([&] {
                  save(common_path(world, "refused"),
                       {.model = model, .optimizer = optimizer, .group = world.group()});
                }),
                AllOf(HasSubstr("cannot save or load its state"), HasSubstr("torch::optim's Adam")));
  });
}

}  // namespace
}  // namespace lockstep::testing
