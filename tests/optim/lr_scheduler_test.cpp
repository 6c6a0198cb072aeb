// Learning-rate schedulers. tests/parity compares their values with Python's.
#include <cmath>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

struct Setting {
  torch::Tensor p = torch::ones({2}).requires_grad_(), q = torch::ones({2}).requires_grad_();
  SGD optimizer{{SGD::group({p}, {.lr = 1}), SGD::group({q}, {.lr = 0.5})}};
  double lr(std::size_t group = 0) { return optimizer.options(group).lr; }
};

std::vector<double> run(Setting& s, torch::optim::LRScheduler& scheduler, int steps) {
  std::vector<double> lrs = {s.lr()};
  for (int i = 0; i < steps; ++i) {
    scheduler.step();
    lrs.push_back(s.lr());
    EXPECT_EQ(s.lr(1) * 2, s.lr());
  }
  return lrs;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-12) << "step " << i;
}

TEST(LRScheduler, making_one_sets_the_first_rate_of_every_group) {
  Setting s;
  LinearLR scheduler(s.optimizer, {.start_factor = 0.25, .total_iters = 3});
  EXPECT_EQ(scheduler.last_epoch(), 0);
  expect_near(run(s, scheduler, 5), {0.25, 0.5, 0.75, 1, 1, 1});
  EXPECT_EQ(scheduler.last_epoch(), 5);
  EXPECT_EQ(scheduler.last_lr(), (std::vector<double>{s.lr(0), s.lr(1)}));
}

TEST(LRScheduler, constant_cosine_exponential_and_lambda) {
  Setting a, b, c, d;
  ConstantLR constant(a.optimizer, {.factor = 0.5, .total_iters = 2});
  expect_near(run(a, constant, 3), {0.5, 0.5, 1, 1});
  CosineAnnealingLR cosine(b.optimizer, {.T_max = 4});
  const double root = std::sqrt(0.5);
  expect_near(run(b, cosine, 8),
              {1, (1 + root) / 2, 0.5, (1 - root) / 2, 0, (1 - root) / 2, 0.5, (1 + root) / 2, 1});
  ExponentialLR exponential(c.optimizer, {.gamma = 0.5});
  expect_near(run(c, exponential, 3), {1, 0.5, 0.25, 0.125});
  LambdaLR lambda(d.optimizer, {[](std::int64_t step) { return 1.0 / static_cast<double>(1 + step); }});
  expect_near(run(d, lambda, 2), {1, 0.5, 1.0 / 3});
}

TEST(LRScheduler, a_warm_up_and_then_a_cosine) {
  Setting s;
  SequentialLR scheduler(
      s.optimizer,
      {LinearLROptions{.start_factor = 0.5, .total_iters = 2}, CosineAnnealingLROptions{.T_max = 2}}, {2});
  expect_near(run(s, scheduler, 4), {0.5, 0.75, 1, 0.5, 0});
}

TEST(LRScheduler, one_cycle_moves_rate_and_momentum_against_each_other) {
  Setting s;
  OneCycleLR scheduler(s.optimizer, {.max_lr = 2, .total_steps = 10});
  EXPECT_NEAR(s.lr(0), 2.0 / 25, 1e-12);
  EXPECT_EQ(s.optimizer.options(0).momentum, 0.95);
  scheduler.step();
  scheduler.step();
  EXPECT_NEAR(s.lr(1), 2, 1e-12);
  EXPECT_NEAR(s.optimizer.options(1).momentum, 0.85, 1e-12);
  for (int i = 2; i < 9; ++i) scheduler.step();
  EXPECT_NEAR(s.lr(), 2.0 / 25 / 1e4, 1e-12);
  scheduler.step();
  EXPECT_THAT(error_of<ConfigError>([&] { scheduler.step(); }), HasSubstr("beyond total_steps (10)"));
  Adam adam({s.p});
  OneCycleLR of_adam(adam, {.max_lr = 2, .total_steps = 10});
  EXPECT_EQ(adam.options().betas.first, 0.95);
  EXPECT_EQ(adam.options().betas.second, 0.999);
  torch::optim::RMSprop rmsprop({s.p});
  OneCycleLR of_rmsprop(rmsprop, {.max_lr = 2, .total_steps = 10});
  torch::optim::Adagrad adagrad({s.p});
  EXPECT_THAT(error_of<ConfigError>([&] { OneCycleLR(adagrad, {.max_lr = 2, .total_steps = 10}); }),
              HasSubstr("momentum or betas"));
  OneCycleLR of_adagrad(adagrad, {.max_lr = 2, .total_steps = 10, .cycle_momentum = false});
}

TEST(LRScheduler, libtorchs_optimizers_take_them) {
  auto p = torch::ones({2}).requires_grad_();
  torch::optim::AdamW adamw({p}, torch::optim::AdamWOptions(1));
  CosineAnnealingLR scheduler(adamw, {.T_max = 2, .eta_min = 0.5});
  scheduler.step();
  EXPECT_EQ(static_cast<torch::optim::AdamWOptions&>(adamw.param_groups()[0].options()).lr(), 0.75);
}

TEST(LRScheduler, its_state_and_the_optimizers_rates_go_on_in_another_one) {
  auto make = [](Setting& s) {
    return SequentialLR(s.optimizer,
                        {ConstantLROptions{.factor = 0.1, .total_iters = 3},
                         LinearLROptions{.start_factor = 0.2, .total_iters = 5},
                         CosineAnnealingLROptions{.T_max = 7, .eta_min = 0.01}},
                        {4, 9});
  };
  for (int cut = 0; cut < 14; ++cut) {
    Setting a, b;
    auto first = make(a), second = make(b);
    for (int i = 0; i < cut; ++i) first.step();
    second.load_state(first.state());
    for (std::size_t g : {0, 1}) b.optimizer.param_groups()[g].options().set_lr(a.lr(g));
    for (int i = cut; i < 20; ++i) {
      first.step();
      second.step();
      EXPECT_EQ(a.lr(0), b.lr(0)) << "cut at " << cut << ", step " << i;
      EXPECT_EQ(a.lr(1), b.lr(1));
    }
    EXPECT_EQ(second.last_epoch(), 20);
  }
}

TEST(LRScheduler, states_of_another_scheduler_are_refused_and_change_nothing) {
  Setting s;
  LinearLR scheduler(s.optimizer);
  auto state = scheduler.state();
  state["last_epoch"] = -1;
  EXPECT_THAT(error_of<ConfigError>([&] { scheduler.load_state(state); }),
              HasSubstr("invalid last_epoch = -1"));
  state = scheduler.state();
  state.erase("base_lr.1");
  EXPECT_THAT(error_of<ConfigError>([&] { scheduler.load_state(state); }),
              HasSubstr("expected 2 parameter groups, got 1"));
  state = scheduler.state();
  state["base_lr.2"] = 1;
  EXPECT_THAT(error_of<ConfigError>([&] { scheduler.load_state(state); }),
              HasSubstr("expected 2 parameter groups"));
  EXPECT_THAT(error_of<ConfigError>([&] { scheduler.load_state({}); }),
              HasSubstr("missing 'step_in_schedule'"));
  EXPECT_EQ(scheduler.last_epoch(), 0);
}

TEST(LRScheduler, what_cannot_be_meant_is_an_error) {
  Setting s;
  EXPECT_THAT(error_of<ConfigError>([&] { LinearLR(s.optimizer, {.start_factor = 0}); }),
              HasSubstr("start_factor: expected a number above 0 and up to 1, got 0"));
  EXPECT_THAT(error_of<ConfigError>([&] { LinearLR(s.optimizer, {.total_iters = 0}); }),
              HasSubstr("total_iters: expected at least 1, got 0"));
  EXPECT_THAT(error_of<ConfigError>([&] { ConstantLR(s.optimizer, {.factor = 2}); }),
              HasSubstr("factor: expected 0 to 1, got 2"));
  EXPECT_THAT(error_of<ConfigError>([&] { CosineAnnealingLR(s.optimizer, {.T_max = 0}); }),
              HasSubstr("T_max"));
  EXPECT_THAT(error_of<ConfigError>([&] { LambdaLR(s.optimizer, {}); }),
              HasSubstr("lr_lambda: expected a function"));
  EXPECT_THAT(error_of<ConfigError>([&] { SequentialLR(s.optimizer, {LinearLROptions{}}, {3}); }),
              HasSubstr("1 schedules and 1 milestones"));
  EXPECT_THAT(error_of<ConfigError>([&] {
                SequentialLR(s.optimizer, {LinearLROptions{}, LinearLROptions{}, LinearLROptions{}}, {5, 3});
              }),
              HasSubstr("increasing order"));
  EXPECT_THAT(error_of<ConfigError>([&] { OneCycleLR(s.optimizer, {.max_lr = 1, .total_steps = 0}); }),
              HasSubstr("total_steps: expected at least 1, got 0"));
  EXPECT_EQ(s.lr(), 1);
}

}  // namespace
}  // namespace lockstep::testing
