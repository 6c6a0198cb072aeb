// bfloat16 and float16 parameters with float32 masters: bit-identical to training the masters by hand.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "optim/saved.h"
#include "support/errors.h"
#include "support/folder.h"

namespace lockstep::testing {
namespace {

using torch::Tensor;

std::vector<Tensor> parameters_of(at::ScalarType dtype) {
  std::vector<Tensor> all;
  for (std::int64_t n : {1, 7, 8, 33, 1001}) all.push_back(torch::randn({n}).to(dtype));
  all.push_back(torch::randn({64, 257}).to(dtype));
  all.push_back(torch::randn({8, 4, 3, 3}).to(dtype).contiguous(torch::MemoryFormat::ChannelsLast));
  all.push_back(torch::randn({20, 20}).to(dtype).slice(1, 0, 20, 2));  // not dense
  all.push_back(torch::randn({0}).to(dtype));
  for (auto& p : all) p = p.detach().requires_grad_();
  return all;
}

bool identical(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && torch::equal(a.detach(), b.detach());
}

template <typename Optimizer>
Tensor master_of(const Optimizer& optimizer, const Tensor& parameter) {
  return optimizer.master(parameter);
}

// Masters by hand: float32 parameters and gradients, rounded into the low-precision parameters.
template <typename Optimizer, typename Options>
void expect_what_masters_by_hand_give(Options options, at::ScalarType dtype) {
  SCOPED_TRACE(dtype);
  torch::manual_seed(4);
  auto params = parameters_of(dtype);
  std::vector<Tensor> masters;
  for (const auto& p : params) masters.push_back(p.detach().to(torch::kFloat).requires_grad_());
  auto by_hand = options;
  Optimizer plain(masters, by_hand);
  options.master_weights = true;
  Optimizer optimizer(params, options);
  for (int step = 0; step < 8; ++step) {
    for (std::size_t i = 0; i < params.size(); ++i) {
      const bool none = (step + static_cast<int>(i)) % 5 == 4;  // sometimes there is no gradient
      params[i].mutable_grad() = none ? Tensor() : torch::randn_like(params[i].detach());
      masters[i].mutable_grad() = none ? Tensor() : params[i].grad().to(torch::kFloat);
    }
    plain.step();
    optimizer.step();
    for (std::size_t i = 0; i < params.size(); ++i) {
      ASSERT_TRUE(identical(params[i], masters[i].to(dtype))) << "step " << step << ", parameter " << i;
      const auto master = optimizer.master(params[i]);
      ASSERT_TRUE(!master.defined() || identical(master, masters[i]))
          << "step " << step << ", parameter " << i;
    }
  }
}

TEST(MasterWeights, have_the_bits_of_masters_that_are_trained_by_hand) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const auto way : {Implementation::single, Implementation::fused}) {
      expect_what_masters_by_hand_give<AdamW>(
          AdamWOptions{.lr = 1e-3, .weight_decay = 0.1, .implementation = way}, dtype);
      expect_what_masters_by_hand_give<AdamW>(
          AdamWOptions{.amsgrad = true, .maximize = true, .implementation = way}, dtype);
      expect_what_masters_by_hand_give<Adam>(
          AdamOptions{.lr = 0.01, .weight_decay = 0.1, .implementation = way}, dtype);
      expect_what_masters_by_hand_give<SGD>(
          SGDOptions{.lr = 1e-3, .momentum = 0.9, .weight_decay = 0.1, .implementation = way}, dtype);
      expect_what_masters_by_hand_give<SGD>(SGDOptions{.lr = 1e-3, .implementation = way}, dtype);
    }
  }
}

// The purpose of masters: steps too small for bfloat16 accumulate.
TEST(MasterWeights, keep_what_is_too_small_for_the_parameter) {
  auto with = torch::ones({4}).to(torch::kBFloat16).requires_grad_(),
       without = with.detach().clone().requires_grad_();
  AdamW a({with}, {.lr = 1e-4, .weight_decay = 0, .master_weights = true}),
      b({without}, {.lr = 1e-4, .weight_decay = 0});
  for (int step = 0; step < 100; ++step) {
    for (auto* p : {&with, &without}) p->mutable_grad() = torch::ones_like(p->detach());
    a.step();
    b.step();
  }
  EXPECT_NEAR(with[0].item<float>(), 0.99, 0.004);
  EXPECT_EQ(without[0].item<float>(), 1);
}

TEST(MasterWeights, parameters_of_other_dtypes_are_as_without) {
  torch::manual_seed(1);
  auto p = torch::randn({33}).requires_grad_(), q = p.detach().clone().requires_grad_();
  auto d = torch::randn({5}, torch::kDouble).requires_grad_(), e = d.detach().clone().requires_grad_();
  AdamW a({p, d}, {.master_weights = true}), b({q, e});
  for (int step = 0; step < 3; ++step) {
    p.mutable_grad() = torch::randn({33}), q.mutable_grad() = p.grad();
    d.mutable_grad() = torch::randn({5}, torch::kDouble), e.mutable_grad() = d.grad();
    a.step();
    b.step();
  }
  EXPECT_TRUE(identical(p, q) && identical(d, e));
}

void step_with(torch::optim::Optimizer& optimizer, const std::vector<Tensor>& params, int seed) {
  torch::manual_seed(seed);
  for (auto p : params) p.mutable_grad() = torch::randn_like(p.detach());
  optimizer.step();
}

TEST(MasterWeights, follow_parameters_that_somebody_else_has_written_to) {
  torch::manual_seed(1);
  auto p = torch::randn({64}).to(torch::kBFloat16).requires_grad_();
  AdamW optimizer({p}, {.lr = 1e-3, .master_weights = true});
  step_with(optimizer, {p}, 1);
  const auto before = master_of(optimizer, p).clone();
  const auto rounded = p.detach().clone();
  {
    torch::NoGradGuard no_grad;
    p[3] = 5;  // one element; the masters of the others keep their extra precision
  }
  p.mutable_grad() = torch::zeros_like(p.detach());
  // With a learning rate of 0 the parameters show the masters.
  for (auto& group : optimizer.param_groups()) group.options().set_lr(0);
  optimizer.step();
  const auto after = master_of(optimizer, p);
  EXPECT_EQ(after[3].item<float>(), 5);
  EXPECT_TRUE(identical(after.slice(0, 4), before.slice(0, 4)));
  EXPECT_FALSE(identical(before.slice(0, 4), rounded.slice(0, 4).to(torch::kFloat)));

  p.detach().copy_(torch::full({64}, 2).to(torch::kBFloat16));  // like lockstep::load
  optimizer.step();
  EXPECT_TRUE(identical(master_of(optimizer, p), torch::full({64}, 2.f)));
}

TEST(MasterWeights, sync_masters_finds_what_no_version_tells_of) {
  auto p = torch::ones({8}).to(torch::kBFloat16).requires_grad_();
  AdamW optimizer({p}, {.lr = 0, .master_weights = true});
  step_with(optimizer, {p}, 1);
  p.mutable_data_ptr<at::BFloat16>()[2] = 4;
  optimizer.sync_masters();
  EXPECT_EQ(master_of(optimizer, p)[2].item<float>(), 4);
  EXPECT_EQ(master_of(optimizer, p)[1].item<float>(), 1);
}

TEST(MasterWeights, torch_save_carries_them_over) {
  torch::manual_seed(2);
  auto params = parameters_of(torch::kBFloat16);
  AdamW from(params, {.lr = 1e-3, .master_weights = true});
  for (int i = 0; i < 3; ++i) step_with(from, params, i);
  std::vector<Tensor> others;
  for (const auto& p : params) others.push_back(p.detach().clone().requires_grad_());
  AdamW to(others, {.master_weights = true});
  std::istringstream in(saved(from));
  torch::load(to, in);
  EXPECT_TRUE(to.options().master_weights);
  for (int i = 3; i < 6; ++i) {
    step_with(from, params, i);
    step_with(to, others, i);
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(identical(params[i], others[i])) << i;
    EXPECT_TRUE(identical(master_of(from, params[i]), master_of(to, others[i]))) << i;
  }
}

torch::nn::Sequential model_of(int seed) {
  torch::manual_seed(seed);
  torch::nn::Sequential model(torch::nn::Linear(6, 16), torch::nn::ReLU(), torch::nn::Linear(16, 3));
  model->to(torch::kBFloat16);
  return model;
}

TEST(MasterWeights, a_checkpoint_has_them_and_the_run_goes_on_with_its_bits) {
  const Folder folder;
  const auto path = (folder / "run.safetensors").string();
  auto model = model_of(1), other = model_of(2);
  AdamW optimizer(model->parameters(), {.lr = 1e-2, .master_weights = true});
  for (int i = 0; i < 3; ++i) step_with(optimizer, model->parameters(), i);
  save(path, {.model = model, .optimizer = optimizer});
  AdamW loaded(other->parameters(), {.master_weights = true});
  load(path, {.model = other, .optimizer = loaded});
  for (int i = 3; i < 6; ++i) {
    step_with(optimizer, model->parameters(), i);
    step_with(loaded, other->parameters(), i);
  }
  for (std::size_t i = 0; i < model->parameters().size(); ++i) {
    EXPECT_TRUE(identical(model->parameters()[i], other->parameters()[i])) << i;
    EXPECT_TRUE(
        identical(master_of(optimizer, model->parameters()[i]), master_of(loaded, other->parameters()[i])))
        << i;
  }
}

TEST(MasterWeights, checkpoints_without_them_load_into_optimizers_with_them_and_the_reverse) {
  const Folder folder;
  const auto path = (folder / "run.safetensors").string();
  for (const bool had : {false, true}) {
    auto model = model_of(1), other = model_of(2);
    AdamW optimizer(model->parameters(), {.lr = 1e-2, .master_weights = had});
    for (int i = 0; i < 3; ++i) step_with(optimizer, model->parameters(), i);
    save(path, {.model = model, .optimizer = optimizer});
    AdamW loaded(other->parameters(), {.master_weights = !had});
    load(path, {.model = other, .optimizer = loaded});
    for (auto& group : loaded.param_groups()) group.options().set_lr(0);
    static_cast<torch::optim::AdamWOptions&>(loaded.param_groups()[0].options()).weight_decay(0);
    step_with(loaded, other->parameters(), 9);
    for (std::size_t i = 0; i < model->parameters().size(); ++i) {
      const auto p = model->parameters()[i], q = other->parameters()[i];
      EXPECT_TRUE(identical(p, q)) << i;
      EXPECT_TRUE(had || identical(master_of(loaded, q), p.detach().to(torch::kFloat))) << i;
      auto& state = static_cast<torch::optim::AdamWParamState&>(*loaded.state().at(q.unsafeGetTensorImpl()));
      EXPECT_EQ(state.step(), 4);
      EXPECT_EQ(state.exp_avg().scalar_type(), had ? torch::kBFloat16 : torch::kFloat);
    }
  }
}

TEST(MasterWeights, clipping_takes_bfloat16_gradients) {
  auto p = torch::zeros({3}).to(torch::kBFloat16).requires_grad_(), q = torch::zeros({4}).requires_grad_();
  p.mutable_grad() = torch::full({3}, 2).to(torch::kBFloat16);
  q.mutable_grad() = torch::full({4}, 1.f);
  const auto norm = clip_grad_norm({p, q}, 1.0);
  // As in Python, the norm of each tensor has its dtype: 3.469 instead of sqrt(12).
  EXPECT_NEAR(norm.item<float>(), 4, 0.01);
  EXPECT_EQ(p.grad()[0].item<float>(), 0.5);
  EXPECT_NEAR(q.grad()[0].item<float>(), 0.25, 1e-3);
}

TEST(MasterWeights, a_grad_scaler_takes_bfloat16_gradients_and_refuses_float16) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    auto p = torch::ones({3}).to(dtype).requires_grad_();
    AdamW optimizer({p}, {.lr = 0.25, .weight_decay = 0, .master_weights = true});
    GradScaler scaler({.init_scale = 1024});
    scaler.scale(p.sum()).backward();
    if (dtype == at::kHalf) {
      EXPECT_THAT(error_of<ConfigError>([&] { scaler.unscale_(optimizer); }), HasSubstr("float16 gradients"));
      continue;
    }
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_EQ(p.grad()[0].item<float>(), 1);
    EXPECT_EQ(p[0].item<float>(), 0.75);
  }
}

TEST(MasterWeights, what_cannot_have_them_is_refused_by_name) {
  auto weight = torch::ones({5, 2}).to(torch::kBFloat16).requires_grad_();
  torch::embedding(weight, torch::tensor({1, 3}), -1, false, /*sparse=*/true).sum().backward();
  SGD optimizer({weight}, {.master_weights = true});
  EXPECT_THAT(error_of<ConfigError>([&] { optimizer.step(); }),
              HasSubstr("master_weights does not support sparse"));
}

TEST(MasterWeights, capturable_changes_nothing_on_the_cpu) {
  torch::manual_seed(1);
  auto p = torch::randn({33}).requires_grad_(), q = p.detach().clone().requires_grad_();
  AdamW a({p}, {.capturable = true}), b({q});
  for (int i = 0; i < 3; ++i) step_with(a, {p}, i), step_with(b, {q}, i);
  a.upload_options();
  EXPECT_TRUE(identical(p, q));
  EXPECT_TRUE(a.options().capturable);
}

}  // namespace
}  // namespace lockstep::testing
