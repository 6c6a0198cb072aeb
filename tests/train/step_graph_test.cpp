// StepGraph where nothing can be captured: every run is the step itself, and reason() says why.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using torch::Tensor;

TEST(StepGraph, on_the_cpu_every_run_is_the_step_itself) {
  auto train = [](bool graph) {
    torch::manual_seed(1);
    torch::nn::Linear model(4, 2);
    AdamW optimizer(model->parameters(), {.lr = 1e-2, .capturable = true});
    auto body = [&](const Tensor& x, const Tensor& y) {
      optimizer.zero_grad();
      const auto loss = (model(x) - y).square().mean();
      loss.backward();
      optimizer.step();
      return loss.detach();
    };
    StepGraph step(body, {.warmup = 1});
    std::vector<float> losses;
    for (int i = 0; i < 6; ++i) {
      torch::manual_seed(100 + i);
      const auto x = torch::randn({8, 4}), y = torch::randn({8, 2});
      losses.push_back((graph ? step.run(x, y) : body(x, y)).item<float>());
    }
    EXPECT_FALSE(step.captured());
    EXPECT_EQ(step.replays(), 0);
    EXPECT_EQ(step.reason(), graph ? "input 0 is on cpu; expected CUDA" : "");
    return losses;
  };
  EXPECT_EQ(train(true), train(false));
}

TEST(StepGraph, a_step_may_return_a_tensor_several_or_nothing_and_take_none) {
  int calls = 0;
  StepGraph one([&](const Tensor& x) { return x + 1; });
  EXPECT_EQ(one.run(torch::ones({})).item<float>(), 2);
  StepGraph several([&](const Tensor& x, const Tensor& y) { return std::vector<Tensor>{y, x}; });
  EXPECT_EQ(several.run(torch::ones({}), torch::zeros({})).at(0).item<float>(), 0);
  StepGraph none([&] { ++calls; });
  none.run();
  none.run();
  EXPECT_EQ(calls, 2);
}

TEST(StepGraph, says_why_there_is_no_graph) {
  StepGraph step([](const Tensor& x) { return x; }, {.enabled = false});
  step.run(torch::ones({2}));
  EXPECT_EQ(step.reason(), "disabled by {.enabled = false}");
  StepGraph none([] {});
  none.run();
  EXPECT_TRUE(torch::cuda::is_available() || none.reason().find("CUDA") != std::string::npos)
      << none.reason();
  step.reset();
  EXPECT_EQ(step.reason(), "");
}

TEST(StepGraph, logs_the_reason_once) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  StepGraph step([](const Tensor& x) { return x; });
  for (int i = 0; i < 3; ++i) step.run(torch::ones({2}));
  set_log_sink(nullptr);
  ASSERT_EQ(lines.size(), 1);
  EXPECT_THAT(lines[0], HasSubstr("StepGraph: steps are not captured: input 0 is on cpu"));
}

TEST(StepGraph, what_the_step_throws_is_the_callers) {
  StepGraph step([](const Tensor& x) -> Tensor {
    if (x.numel() == 2) throw std::runtime_error("of the step");
    return x;
  });
  EXPECT_THAT(error_of<std::runtime_error>([&] { step.run(torch::ones({2})); }), HasSubstr("of the step"));
  EXPECT_EQ(step.run(torch::ones({3})).numel(), 3);
}

TEST(StepGraph, can_be_moved) {
  const GraphStream nothing_here(at::kCPU);
  StepGraph first([](const Tensor& x) { return x * 2; });
  first.run(torch::ones({}));
  auto second = std::move(first);
  EXPECT_EQ(second.run(torch::ones({})).item<float>(), 2);
}

TEST(StepGraph, options_out_of_range_are_errors) {
  auto step = [](const Tensor& x) { return x; };
  EXPECT_THAT(error_of<ConfigError>([&] { StepGraph(step, {.warmup = 0}); }),
              HasSubstr("warmup: expected at least 1"));
  EXPECT_THAT(error_of<ConfigError>([&] { StepGraph(step, {.max_graphs = 0}); }),
              HasSubstr("max_graphs: expected at least 1, got 0"));
  EXPECT_THAT(error_of<ConfigError>([&] { StepGraph(step, {.tolerance = -1}); }),
              HasSubstr("tolerance: expected 0 or more, got -1"));
}

}  // namespace
}  // namespace lockstep::testing
