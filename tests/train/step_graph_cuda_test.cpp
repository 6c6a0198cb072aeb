// StepGraph on CUDA: replayed steps train like plain steps, and what cannot be captured runs eagerly.
#include <lockstep/kernels/kernels.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "support/errors.h"
#include "support/folder.h"

namespace lockstep::testing {
namespace {

using torch::Tensor;

class StepGraphCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
    if (!kernels::available()) GTEST_SKIP() << "this build has no CUDA kernels";
  }
};

Tensor input(int step, std::int64_t rows = 8) {
  torch::manual_seed(100 + step);
  return torch::randn({rows, 16}).to(torch::kCUDA);
}

torch::nn::Sequential model_of(at::ScalarType dtype = torch::kFloat) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(), torch::nn::Linear(64, 16));
  model->to(at::kCUDA, dtype);
  return model;
}

std::vector<Tensor> values_of(torch::nn::Sequential& model) {
  std::vector<Tensor> values;
  for (const auto& p : model->parameters()) values.push_back(p.detach().to(torch::kCPU, torch::kFloat));
  return values;
}

void expect_close(const std::vector<Tensor>& a, const std::vector<Tensor>& b, double tolerance) {
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(torch::allclose(a[i], b[i], tolerance, tolerance))
        << i << ": " << (a[i] - b[i]).abs().max().item<float>();
}

// Returns a step for a model and an optimizer.
auto one_step_of(torch::nn::Sequential& model, AdamW& optimizer, bool to_none = true) {
  return [&model, &optimizer, to_none](const Tensor& x) {
    optimizer.zero_grad(to_none);
    const auto loss = (model->forward(x) - x).square().mean();
    loss.backward();
    optimizer.step();
    return loss.detach();
  };
}

// A changing learning rate, both ways of clearing gradients, float32, and bfloat16 with masters.
std::vector<Tensor> trained(bool graph, bool to_none, at::ScalarType dtype, std::vector<float>& losses) {
  auto model = model_of(dtype);
  AdamW optimizer(
      model->parameters(),
      {.lr = 1e-2, .master_weights = true, .capturable = true, .implementation = Implementation::fused});
  LinearLR scheduler(optimizer, {.start_factor = 0.1, .total_iters = 8});
  StepGraph step(one_step_of(model, optimizer, to_none), {.enabled = graph});
  for (int i = 0; i < 12; ++i) {
    losses.push_back(step.run(input(i).to(dtype)).item<float>());
    scheduler.step();
    EXPECT_EQ(step.captured(), graph && i >= 3) << i << ": " << step.reason();
  }
  EXPECT_EQ(step.replays(), graph ? 9 : 0) << step.reason();
  return values_of(model);
}

TEST_F(StepGraphCuda, replayed_steps_learn_what_plain_steps_learn) {
  for (const bool to_none : {true, false})
    for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
      std::vector<float> with, without;
      const auto a = trained(true, to_none, dtype, with), b = trained(false, to_none, dtype, without);
      expect_close(a, b, dtype == torch::kFloat ? 1e-4 : 1e-2);
      for (std::size_t i = 0; i < with.size(); ++i) EXPECT_NEAR(with[i], without[i], 1e-2) << i;
    }
}

TEST_F(StepGraphCuda, an_optimizer_that_is_not_capturable_is_the_reason) {
  auto model = model_of();
  AdamW optimizer(model->parameters());
  StepGraph step([&](const Tensor& x) {
    optimizer.zero_grad();
    const auto loss = model->forward(x).square().mean();
    loss.backward();
    optimizer.step();
    return loss.detach();
  });
  for (int i = 0; i < 6; ++i) EXPECT_GT(step.run(input(i)).item<float>(), 0);
  EXPECT_FALSE(step.captured());
  EXPECT_THAT(step.reason(), HasSubstr("set .capturable = true"));
  SGD sgd(model->parameters());
  StepGraph other([&](const Tensor& x) {
    sgd.zero_grad();
    model->forward(x).square().mean().backward();
    sgd.step();
  });
  for (int i = 0; i < 6; ++i) other.run(input(i));
  EXPECT_THAT(other.reason(), HasSubstr("SGD in a CUDA graph"));
}

TEST_F(StepGraphCuda, a_step_that_waits_for_the_device_runs_as_it_is) {
  auto model = model_of();
  AdamW optimizer(model->parameters(), {.lr = 1e-2, .capturable = true});
  int steps = 0;
  StepGraph step([&](const Tensor& x) {
    optimizer.zero_grad();
    const auto loss = torch::dropout(model->forward(x), 0.1, true).square().mean();
    loss.backward();
    if (loss.item<float>() > -1) optimizer.step();
    ++steps;
    return loss.detach();
  });
  for (int i = 0; i < 8; ++i) EXPECT_GT(step.run(input(i)).item<float>(), 0) << i;
  EXPECT_THAT(step.reason(), HasSubstr("cannot be captured"));
  EXPECT_EQ(steps, 8);
  // The allocator and generator are restored, so that other graphs can be captured.
  Tensor x = torch::zeros({4}, torch::kCUDA);
  StepGraph next([&](const Tensor& y) { return torch::dropout(x + y, 0.5, true); });
  for (int i = 0; i < 6; ++i) next.run(torch::ones({4}, torch::kCUDA));
  EXPECT_TRUE(next.captured()) << next.reason();
}

// After a failed capture, earlier graphs still use the generators: a new seed reaches them.
TEST_F(StepGraphCuda, a_seed_reaches_graphs_from_before_a_capture_that_failed) {
  const auto ones = torch::ones({1000}, torch::kCUDA);
  StepGraph draws([](const Tensor& x) { return torch::dropout(x, 0.5, true); });
  for (int i = 0; i < 5; ++i) draws.run(ones);
  ASSERT_TRUE(draws.captured()) << draws.reason();
  StepGraph waits([](const Tensor& x) {
    const auto y = torch::dropout(x, 0.5, true);
    return y * y.sum().item<float>();
  });
  for (int i = 0; i < 5; ++i) waits.run(ones);
  ASSERT_FALSE(waits.reason().empty());
  torch::manual_seed(7);
  const auto replayed = draws.run(ones).clone(), eager = torch::dropout(ones, 0.5, true);
  torch::manual_seed(7);
  EXPECT_TRUE(torch::equal(draws.run(ones), replayed));
  EXPECT_TRUE(torch::equal(torch::dropout(ones, 0.5, true), eager));
  EXPECT_FALSE(torch::equal(eager, replayed));
}

TEST_F(StepGraphCuda, random_numbers_are_new_in_every_replay) {
  StepGraph step([](const Tensor& x) { return torch::dropout(x, 0.5, true); });
  std::vector<Tensor> masks;
  for (int i = 0; i < 8; ++i) masks.push_back(step.run(torch::ones({1000}, torch::kCUDA)).clone());
  ASSERT_TRUE(step.captured()) << step.reason();
  for (std::size_t i = 1; i < masks.size(); ++i) EXPECT_FALSE(torch::equal(masks[i], masks[i - 1])) << i;
}

TEST_F(StepGraphCuda, other_shapes_run_as_they_are_or_get_a_graph_of_their_own) {
  auto body = [](const Tensor& x) { return x.sum(); };
  StepGraph one(body), two(body, {.max_graphs = 2});
  for (int i = 0; i < 10; ++i) {
    const auto x = input(i, i % 2 ? 4 : 8);
    EXPECT_NEAR(one.run(x).item<float>(), x.sum().item<float>(), 1e-3);
    EXPECT_NEAR(two.run(x).item<float>(), x.sum().item<float>(), 1e-3);
  }
  EXPECT_THAT(one.reason(), HasSubstr("max_graphs (1) reached: no graph for inputs of Float [4, 16]"));
  EXPECT_EQ(one.replays(), 2);
  EXPECT_EQ(two.replays(), 4);
  one.run(input(0).cpu());
  EXPECT_THAT(one.reason(), HasSubstr("input 0 is on cpu"));
}

TEST_F(StepGraphCuda, a_checkpoint_that_is_loaded_between_replays_counts) {
  const Folder folder;
  const auto path = (folder / "run.safetensors").string();
  auto model = model_of();
  AdamW optimizer(model->parameters(), {.lr = 1e-2, .capturable = true});
  StepGraph step(one_step_of(model, optimizer));
  for (int i = 0; i < 6; ++i) step.run(input(i));
  // Also if a step of another shape, which runs eagerly, sees the loaded state before the graph does.
  for (const bool another_shape : {false, true}) {
    const auto go_on = [&] {
      if (another_shape) step.run(input(50, 4));
      for (int i = 6; i < 12; ++i) step.run(input(i));
      return values_of(model);
    };
    save(path, {.model = model, .optimizer = optimizer});
    const auto first = go_on();
    load(path, {.model = model, .optimizer = optimizer});
    expect_close(first, go_on(), 1e-4);
    EXPECT_TRUE(step.captured()) << step.reason();
  }
}

TEST_F(StepGraphCuda, state_that_is_replaced_before_the_capture_is_warmed_up_again) {
  const Folder folder;
  const auto path = (folder / "run.safetensors").string();
  auto model = model_of(), plain = model_of();
  AdamW optimizer(model->parameters(), {.lr = 1e-2, .capturable = true}),
      other(plain->parameters(), {.lr = 1e-2, .capturable = true});
  StepGraph step(one_step_of(model, optimizer));
  for (int i = 0; i < 3; ++i) step.run(input(i));
  save(path, {.model = model, .optimizer = optimizer});
  load(path, {.model = model, .optimizer = optimizer});
  for (int i = 3; i < 8; ++i) {
    step.run(input(i));
    EXPECT_EQ(step.captured(), i >= 6) << i << ": " << step.reason();
    EXPECT_EQ(step.reason(), "") << i;
  }
  for (int i = 0; i < 8; ++i) {
    other.zero_grad();
    (plain->forward(input(i)) - input(i)).square().mean().backward();
    other.step();
  }
  expect_close(values_of(model), values_of(plain), 1e-4);

  // LibTorch's own state with the same moments: the optimizer must recover the step count.
  for (int i = 8; i < 10; ++i) step.run(input(i));
  for (auto& [key, state] : optimizer.state()) {
    const auto& given = static_cast<const torch::optim::AdamWParamState&>(*state);
    state = std::make_unique<torch::optim::AdamWParamState>(given);
  }
  step.run(input(10));
  EXPECT_FALSE(step.captured());
  for (int i = 11; i < 14; ++i) step.run(input(i));
  EXPECT_TRUE(step.captured()) << step.reason();
}

TEST_F(StepGraphCuda, state_that_is_replaced_before_every_step_is_the_reason) {
  auto model = model_of();
  AdamW optimizer(model->parameters(), {.lr = 1e-2, .capturable = true});
  int steps = 0;
  StepGraph step([&](const Tensor& x) {
    ++steps;
    optimizer.zero_grad();
    model->forward(x).square().mean().backward();
    optimizer.step();
  });
  for (int i = 0; i < 9; ++i) {
    optimizer.state().clear();
    step.run(input(i));
    EXPECT_EQ(step.reason().empty(), i < 6) << i << ": " << step.reason();
  }
  EXPECT_THAT(step.reason(), HasSubstr("an optimizer's state was replaced before each capture"));
  EXPECT_EQ(steps, 9);
}

TEST_F(StepGraphCuda, inputs_on_another_device_are_others) {
  if (torch::cuda::device_count() < 2) GTEST_SKIP() << "one CUDA device";
  auto body = [](const Tensor& x) { return x * 2; };
  StepGraph one(body), two(body, {.max_graphs = 2});
  for (int i = 0; i < 10; ++i) {
    const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(i % 2));
    const auto x = input(i).to(device);
    for (const auto& y : {one.run(x), two.run(x)}) {
      EXPECT_EQ(y.device(), device);
      EXPECT_TRUE(torch::equal(y, x * 2)) << i;
    }
  }
  EXPECT_THAT(one.reason(), HasSubstr("no graph for inputs of Float [8, 16] on cuda:1"));
  EXPECT_EQ(one.replays(), 2);
  EXPECT_EQ(two.replays(), 4);
}

// The replay used for comparison must leave no trace: a run with check equals a run without it.
TEST_F(StepGraphCuda, check_brings_back_buffers_and_generators) {
  auto trained = [](bool check, std::vector<Tensor>& buffers) {
    torch::manual_seed(1);
    auto model = torch::nn::Sequential(torch::nn::Linear(16, 16), torch::nn::BatchNorm1d(16));
    model->to(at::kCUDA);
    AdamW optimizer(model->parameters(), {.lr = 1e-2, .capturable = true});
    auto generator = at::globalContext().defaultGenerator(at::Device(at::kCUDA, 0)).clone();
    generator.set_current_seed(7);
    StepGraph step(
        [&](const Tensor& x) {
          optimizer.zero_grad();
          const auto noise = torch::empty_like(x).uniform_(0, 1, generator);
          const auto loss = (model->forward(x + noise) - x).square().mean();
          loss.backward();
          optimizer.step();
          return noise;
        },
        {.check = check, .tolerance = 1e-3, .generators = {generator}, .state = model->buffers()});
    std::vector<Tensor> drawn;
    for (int i = 0; i < 7; ++i) drawn.push_back(step.run(input(i)).clone());
    EXPECT_TRUE(step.captured()) << step.reason();
    for (const auto& buffer : model->buffers()) buffers.push_back(buffer.clone());
    return drawn;
  };
  std::vector<Tensor> with, without;
  const auto a = trained(true, with), b = trained(false, without);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
  for (std::size_t i = 0; i < with.size(); ++i) {
    if (with[i].is_floating_point())
      EXPECT_TRUE(torch::allclose(with[i], without[i], 1e-4, 1e-5)) << i;
    else
      EXPECT_TRUE(torch::equal(with[i], without[i])) << i << ": " << with[i] << without[i];
  }
}

TEST_F(StepGraphCuda, check_compares_what_is_given_as_state) {
  auto buffer = torch::zeros({4}, torch::kCUDA);
  int calls = 0;
  StepGraph step(
      [&](const Tensor& x) {
        buffer.add_(x, ++calls);
        return x + 1;
      },
      {.check = true, .tolerance = 1e-3, .state = {buffer}});
  for (int i = 0; i < 6; ++i) step.run(torch::ones({4}, torch::kCUDA));
  EXPECT_THAT(step.reason(), HasSubstr("replay differs from the step: tensor of .state 0 differs"));
}

TEST_F(StepGraphCuda, check_compares_the_first_replay_with_the_step) {
  auto model = model_of();
  AdamW optimizer(model->parameters(), {.lr = 1e-2, .capturable = true});
  double factor = 1;  // a value on the host: a replay does not see it change
  StepGraph step(
      [&](const Tensor& x) {
        optimizer.zero_grad();
        const auto loss = torch::dropout(model->forward(x) - x, 0.2, true).square().mean() * factor;
        loss.backward();
        optimizer.step();
        return loss.detach();
      },
      {.check = true, .tolerance = 1e-3});
  for (int i = 0; i < 6; ++i) step.run(input(i));
  EXPECT_TRUE(step.captured()) << step.reason();

  int calls = 0;
  StepGraph other([&](const Tensor& x) { return x * ++calls; }, {.check = true});
  for (int i = 0; i < 6; ++i) other.run(torch::ones({4}, torch::kCUDA));
  EXPECT_THAT(other.reason(), HasSubstr("replay differs from the step: returned tensor 0 differs"));
}

TEST_F(StepGraphCuda, masters_follow_a_model_that_is_written_to_between_replays) {
  auto model = model_of(torch::kBFloat16);
  AdamW optimizer(model->parameters(),
                  {.lr = 0, .weight_decay = 0, .master_weights = true, .capturable = true});
  StepGraph step([&](const Tensor& x) {
    optimizer.zero_grad();
    model->forward(x).square().mean().backward();
    optimizer.step();
  });
  for (int i = 0; i < 5; ++i) step.run(input(i).to(torch::kBFloat16));
  ASSERT_TRUE(step.captured()) << step.reason();
  {
    torch::NoGradGuard no_grad;
    model->parameters()[0].fill_(0.5);
  }
  optimizer.sync_masters();
  step.run(input(9).to(torch::kBFloat16));
  ASSERT_TRUE(step.captured()) << step.reason();
  EXPECT_EQ(model->parameters()[0][0][0].item<float>(), 0.5);
}

// DistributedDataParallel in a world of one rank; its hooks run in the captured backward.
TEST_F(StepGraphCuda, ddp_of_one_rank_can_be_captured) {
  auto world = World::from_environment();
  const GraphStream stream;
  auto model = model_of(), plain = model_of();
  DistributedDataParallel ddp(model, world.group());
  AdamW optimizer(model->parameters(), {.capturable = true}),
      other(plain->parameters(), {.capturable = true});
  StepGraph step([&](const Tensor& x) {
    optimizer.zero_grad();
    const auto loss = (ddp(x) - x).square().mean();
    loss.backward();
    optimizer.step();
    return loss.detach();
  });
  for (int i = 0; i < 8; ++i) {
    step.run(input(i));
    other.zero_grad();
    (plain->forward(input(i)) - input(i)).square().mean().backward();
    other.step();
  }
  expect_close(values_of(model), values_of(plain), 1e-4);
  EXPECT_TRUE(step.captured()) << step.reason();
}

}  // namespace
}  // namespace lockstep::testing
