// GradScaler, Autocast and gradient clipping. tests/parity compares values with Python's.
#include <cmath>
#include <thread>

#include <ATen/autocast_mode.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using torch::Tensor;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(GradScaler, scaled_training_has_the_gradients_of_plain_training) {
  auto p = torch::ones({3}).requires_grad_();
  SGD optimizer({p}, {.lr = 1});
  GradScaler scaler({.init_scale = 1024});
  const auto loss = (p * p).sum();
  const auto scaled = scaler.scale(loss);
  EXPECT_EQ(scaled.item<float>(), 3 * 1024);
  scaled.backward();
  EXPECT_EQ(p.grad()[0].item<float>(), 2048);
  scaler.unscale_(optimizer);
  EXPECT_EQ(p.grad()[0].item<float>(), 2);
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  EXPECT_TRUE(torch::equal(p.detach(), torch::full({3}, -1.f)));
  EXPECT_EQ(scaler.current_scale(), 1024);
}

TEST(GradScaler, a_step_with_an_infinite_or_nan_gradient_is_left_out_and_lowers_the_scale) {
  for (float bad : {kInfinity, -kInfinity, NAN}) {
    auto p = torch::ones({3}).requires_grad_(), q = torch::ones({3}).requires_grad_();
    SGD optimizer({p, q}, {.lr = 1});
    GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
    auto iteration = [&](float value) {
      p.mutable_grad() = torch::ones({3});
      q.mutable_grad() = torch::full({3}, value);
      scaler.scale(torch::ones({}));
      const bool done = scaler.step(optimizer);
      scaler.update();
      return done;
    };
    EXPECT_TRUE(iteration(1));
    EXPECT_EQ(scaler.current_scale(), 1024);
    const auto before = p.detach().clone();
    EXPECT_FALSE(iteration(bad));
    EXPECT_TRUE(torch::equal(p.detach(), before));
    EXPECT_EQ(scaler.current_scale(), 512);
    EXPECT_TRUE(iteration(1));  // the count of good steps restarted
    EXPECT_EQ(scaler.current_scale(), 512);
    EXPECT_TRUE(iteration(1));
    EXPECT_EQ(scaler.current_scale(), 1024);
    scaler.scale(torch::ones({}));
    scaler.update(8);
    EXPECT_EQ(scaler.current_scale(), 8);
  }
}

TEST(GradScaler, all_ranks_leave_out_a_step_together) {
  run_threads(3, [](World& world) {
    auto p = torch::ones({2}).requires_grad_();
    SGD optimizer({p}, {.lr = 1});
    GradScaler scaler({.init_scale = 4, .group = world.group()});
    for (int step = 0; step < 6; ++step) {
      p.mutable_grad() = torch::full({2}, step % 3 == 1 && world.rank() == 1 ? NAN : 1.f);
      scaler.scale(torch::ones({}));
      EXPECT_EQ(scaler.step(optimizer), step % 3 != 1) << "rank " << world.rank() << ", step " << step;
      scaler.update();
    }
    EXPECT_EQ(scaler.current_scale(), 1);
  });
}

TEST(GradScaler, two_optimizers_share_a_scale_and_are_judged_apart) {
  auto p = torch::ones({2}).requires_grad_(), q = torch::ones({2}).requires_grad_();
  SGD a({p}), b({q});
  GradScaler scaler;
  p.mutable_grad() = torch::ones({2});
  q.mutable_grad() = torch::full({2}, kInfinity);
  scaler.scale(torch::ones({}));
  EXPECT_TRUE(scaler.step(a));
  EXPECT_FALSE(scaler.step(b));
  scaler.update();
  EXPECT_EQ(scaler.current_scale(), 32768);
}

TEST(GradScaler, misuse_is_an_error_that_says_what_to_do) {
  auto p = torch::ones({2}).requires_grad_();
  p.mutable_grad() = torch::ones({2});
  SGD optimizer({p});
  GradScaler scaler;
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.step(optimizer); }),
              HasSubstr("GradScaler::step: call scale(loss) first"));
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.update(); }),
              HasSubstr("GradScaler::update: call scale(loss) first"));
  scaler.scale(torch::ones({}));
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.update(); }), HasSubstr("call step(optimizer) first"));
  scaler.unscale_(optimizer);
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.unscale_(optimizer); }),
              HasSubstr("GradScaler::unscale_: already called"));
  scaler.step(optimizer);
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.step(optimizer); }),
              HasSubstr("GradScaler::step: already called"));
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.unscale_(optimizer); }), HasSubstr("call it before step()"));
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.update(-1); }),
              HasSubstr("expected a scale above 0, got -1"));
  scaler.update();
  auto half = torch::ones({2}, torch::kHalf).requires_grad_();
  half.mutable_grad() = torch::ones({2}, torch::kHalf);
  SGD of_half({half});
  EXPECT_THAT(error_of<ConfigError>([&] { scaler.unscale_(of_half); }), HasSubstr("float16 gradients"));
  EXPECT_THAT(error_of<ConfigError>([] { GradScaler({.growth_factor = 1}); }),
              HasSubstr("growth_factor: expected more than 1, got 1"));
  EXPECT_THAT(error_of<ConfigError>([] { GradScaler({.backoff_factor = 1}); }), HasSubstr("backoff_factor"));
  EXPECT_THAT(error_of<ConfigError>([] { GradScaler({.init_scale = NAN}); }), HasSubstr("init_scale"));
}

TEST(GradScaler, one_that_is_not_enabled_only_steps) {
  auto p = torch::ones({2}).requires_grad_();
  p.mutable_grad() = torch::ones({2});
  SGD optimizer({p}, {.lr = 1});
  GradScaler scaler({.enabled = false});
  const auto loss = torch::ones({});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(p[0].item<float>(), 0);
  EXPECT_TRUE(scaler.state().empty());
}

TEST(GradScaler, its_state_goes_on_in_another_one) {
  auto p = torch::ones({2}).requires_grad_();
  SGD optimizer({p});
  GradScaler scaler({.init_scale = 64, .growth_interval = 3});
  auto iteration = [&](GradScaler& each) {
    p.mutable_grad() = torch::ones({2});
    each.scale(torch::ones({}));
    each.step(optimizer);
    each.update();
  };
  iteration(scaler);
  iteration(scaler);
  GradScaler fresh, used;
  iteration(used);
  for (auto* other : {&fresh, &used}) {
    other->load_state(scaler.state());
    iteration(*other);  // the third good step in a row
    EXPECT_EQ(other->current_scale(), 128);
  }
  auto damaged = scaler.state();
  damaged["growth_interval"] = 0.5;
  EXPECT_THAT(error_of<ConfigError>([&] { fresh.load_state(damaged); }),
              HasSubstr("invalid growth_interval = 0.5"));
  EXPECT_THAT(error_of<ConfigError>([&] { fresh.load_state({}); }), HasSubstr("disabled GradScaler"));
  EXPECT_EQ(fresh.current_scale(), 128);
}

TEST(Autocast, casts_inside_its_scope_alone) {
  const auto a = torch::randn({4, 4}), b = torch::randn({4, 4});
  {
    Autocast guard(at::kCPU, at::kBFloat16);
    EXPECT_EQ(torch::mm(a, b).scalar_type(), at::kBFloat16);
    EXPECT_EQ(torch::mse_loss(torch::mm(a, b), torch::mm(a, b)).scalar_type(), at::kFloat);
    {
      Autocast off(at::kCPU, {}, {.enabled = false});
      EXPECT_EQ(torch::mm(a, b).scalar_type(), at::kFloat);
    }
    {
      Autocast half(at::kCPU, at::kHalf);
      EXPECT_EQ(torch::mm(a, b).scalar_type(), at::kHalf);
    }
    EXPECT_EQ(torch::mm(a, b).scalar_type(), at::kBFloat16);
    std::thread([&] { EXPECT_EQ(torch::mm(a, b).scalar_type(), at::kFloat); }).join();
  }
  EXPECT_EQ(torch::mm(a, b).scalar_type(), at::kFloat);
  try {
    Autocast guard(at::kCPU);
    EXPECT_EQ(torch::mm(a, b).scalar_type(), at::kBFloat16);  // LibTorch's default
    throw std::runtime_error("out");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(torch::mm(a, b).scalar_type(), at::kFloat);
}

TEST(Autocast, weights_that_were_updated_are_cast_anew_in_the_next_scope) {
  auto weight = torch::ones({4, 4}).requires_grad_();
  const auto x = torch::ones({1, 4});
  auto forward = [&] {
    Autocast guard(at::kCPU, at::kBFloat16);
    return torch::mm(x, weight).sum();
  };
  auto loss = forward();
  EXPECT_EQ(loss.item<float>(), 16);
  loss.backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  SGD({weight}, {.lr = 0.5}).step();
  EXPECT_EQ(forward().item<float>(), 8);
}

TEST(Autocast, what_libtorch_cannot_cast_to_is_an_error) {
  EXPECT_THAT(error_of<ConfigError>([] { Autocast guard(at::kCPU, at::kInt); }),
              HasSubstr("dtype: expected BFloat16 or Half, got Int"));
  EXPECT_THAT(error_of<ConfigError>([] { Autocast guard(at::kMeta); }),
              HasSubstr("device: expected cpu or cuda, got meta"));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

std::vector<Tensor> with_gradients(std::initializer_list<Tensor> gradients) {
  std::vector<Tensor> parameters;
  for (const auto& g : gradients) {
    parameters.push_back(torch::zeros_like(g).requires_grad_());
    parameters.back().mutable_grad() = g;
  }
  return parameters;
}

TEST(ClipGrad, long_gradients_are_shortened_and_short_ones_stay) {
  auto ps = with_gradients({torch::full({3}, 2.f), torch::full({1}, 2.f)});
  ps.push_back(torch::zeros({2}).requires_grad_());  // without a gradient
  EXPECT_FLOAT_EQ(clip_grad_norm(ps, 10).item<float>(), 4);
  EXPECT_EQ(ps[0].grad()[0].item<float>(), 2);
  EXPECT_FLOAT_EQ(clip_grad_norm(ps, 1).item<float>(), 4);
  EXPECT_NEAR(ps[0].grad()[0].item<float>(), 0.5, 1e-6);
  EXPECT_NEAR(clip_grad_norm(ps, 1, {.norm_type = INFINITY}).item<float>(), 0.5, 1e-6);
  EXPECT_NEAR(clip_grad_norm(ps, 1, {.norm_type = 1}).item<float>(), 2, 1e-5);
  clip_grad_value(ps, 0.125);
  EXPECT_EQ(ps[1].grad()[0].item<float>(), 0.125);
  EXPECT_EQ(clip_grad_norm({}, 1).item<float>(), 0);
}

TEST(ClipGrad, a_norm_that_is_no_number_can_be_an_error) {
  auto ps = with_gradients({torch::tensor({1.f, NAN})});
  EXPECT_THAT(error_of<Error>([&] { clip_grad_norm(ps, 1, {.error_if_nonfinite = true}); }),
              HasSubstr("the gradients' norm of order 2 is nan"));
  EXPECT_EQ(ps[0].grad()[0].item<float>(), 1);
  clip_grad_norm(ps, 1);
  EXPECT_TRUE(std::isnan(ps[0].grad()[0].item<float>()));
  EXPECT_THAT(error_of<ConfigError>([&] { clip_grad_norm(ps, 1, {.norm_type = NAN}); }),
              HasSubstr("norm_type"));
  EXPECT_THAT(error_of<ConfigError>([&] { clip_grad_value(ps, -1); }),
              HasSubstr("clip_value: expected 0 or more, got -1"));
}

TEST(ClipGrad, parameters_spread_over_ranks_are_clipped_by_the_norm_of_all) {
  for (double norm_type : {2.0, 1.0, 3.0, static_cast<double>(INFINITY)})
    for (int ranks : {1, 2, 3, 4, 5}) {
      torch::manual_seed(ranks);
      const auto whole = torch::randn({ranks * 7});
      auto all = with_gradients({whole.clone()});
      const auto norm = clip_grad_norm(all, 0.5, {.norm_type = norm_type});
      std::vector<float> norms(static_cast<std::size_t>(ranks));
      run_threads(ranks, [&](World& world) {
        auto own = with_gradients({whole.slice(0, world.rank() * 7, world.rank() * 7 + 7).clone()});
        const auto found = clip_grad_norm(own, 0.5, {.norm_type = norm_type, .group = world.group()});
        EXPECT_TRUE(torch::allclose(found, norm, 1e-6));
        norms[static_cast<std::size_t>(world.rank())] = found.item<float>();
        const auto expected = all[0].grad().slice(0, world.rank() * 7, world.rank() * 7 + 7);
        EXPECT_TRUE(torch::allclose(own[0].grad(), expected, 1e-5, 1e-7));
      });
      for (float each : norms) EXPECT_EQ(each, norms[0]);  // bit-identical
    }
}

TEST(ClipGrad, a_rank_without_gradients_takes_part) {
  run_threads(2, [](World& world) {
    auto ps = world.rank() == 0 ? with_gradients({torch::full({4}, 3.f)}) : std::vector<Tensor>{};
    EXPECT_FLOAT_EQ(clip_grad_norm(ps, 1, {.group = world.group()}).item<float>(), 6);
  });
  run_threads(1, [](World& world) {
    EXPECT_THAT(
        error_of<ConfigError>([&] { clip_grad_norm({}, 1, {.norm_type = 0, .group = world.group()}); }),
        HasSubstr("expected a number above 0 with a group"));
  });
}

}  // namespace
}  // namespace lockstep::testing
