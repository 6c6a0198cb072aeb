// Rare and error-prone cases: unusual memory layouts, large numbers, targets that do not count, in-place
// changes; and whether the kernels are used at all.
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/kernels/architectures.h>
#include <lockstep/nn/attention.h>
#include <lockstep/nn/cross_entropy.h>
#include <lockstep/nn/layer_norm.h>
#include <lockstep/nn/linear.h>

#include <cmath>

#include "nn/fused.h"

namespace lockstep::testing {
namespace {

class FusedEdges : public Fused {
 protected:
  nn::LayerNorm norm_of(std::int64_t columns) const {
    nn::LayerNorm norm(torch::nn::LayerNormOptions({columns}));
    norm->to(GetParam().device, GetParam().type);
    return norm;
  }
};

Tensor plain_attention(const Tensor& qkv, std::int64_t heads, bool causal) {
  const auto parts = qkv.view({qkv.size(0), qkv.size(1), 3, heads, -1}).permute({2, 0, 3, 1, 4}).unbind();
  return at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, causal)
      .transpose(1, 2)
      .flatten(2);
}

TEST_P(FusedEdges, kernels_are_used) {
  const auto used = [](const Tensor& result) {
    return result.grad_fn()->name().find("Fused") != std::string::npos;
  };
  const auto x = numbers({2, 8, 96}), weight = numbers({64, 96}), bias = numbers({64});
  auto norm = norm_of(96);
  EXPECT_EQ(used(nn::linear(x, weight, bias)), cuda());
  EXPECT_EQ(used(nn::linear_gelu(x, weight, bias)), cuda());
  EXPECT_EQ(used(norm(x)), cuda());
  EXPECT_EQ(used(norm->add(x, x).first), cuda());
  EXPECT_EQ(used(norm->add(x, x).second), cuda());
  // LibTorch has its own kernel for float32, and Lockstep has none for the surrounding steps.
  EXPECT_EQ(used(nn::attention(x, {.heads = 2})), cuda() && GetParam().type != at::kFloat);
  const auto targets = targets_of(x, 60);
  EXPECT_EQ(used(nn::cross_entropy(x, targets)), cuda());
  EXPECT_EQ(used(nn::linear_cross_entropy(x, weight, targets)), cuda());
  EXPECT_EQ(used(nn::linear_cross_entropy(x, numbers({61, 96}), targets)), cuda());
}

TEST(Architectures, that_code_runs_on) {
  using kernels::runs_on;
  EXPECT_TRUE(runs_on("90", 9, 0));
  EXPECT_TRUE(runs_on("90", 10, 0));  // PTX, compiled at load time
  EXPECT_FALSE(runs_on("90", 8, 9));
  EXPECT_TRUE(runs_on("90-real", 9, 0));
  EXPECT_FALSE(runs_on("90-real", 10, 0));
  EXPECT_TRUE(runs_on("80-real,90-virtual", 8, 6));
  EXPECT_TRUE(runs_on("80-real,90-virtual", 12, 0));
  EXPECT_FALSE(runs_on("86-real,100-real", 8, 0));
  EXPECT_FALSE(runs_on("86-real,100-real", 9, 0));
  EXPECT_TRUE(runs_on("90a", 9, 0));
  EXPECT_FALSE(runs_on("90a", 10, 0));
  EXPECT_TRUE(runs_on("100f-real", 10, 3));
  EXPECT_FALSE(runs_on("100f", 12, 0));
  EXPECT_TRUE(runs_on("all-major", 12, 0));
}

TEST_P(FusedEdges, attention_sees_everything_unless_asked) {
  compare(
      {numbers({2, 16, 96})}, [](const Tensors& t) { return Tensors{nn::attention(t[0], {.heads = 2})}; },
      [](const Tensors& t) { return Tensors{plain_attention(t[0], 2, false)}; });
}

// Backward of cat returns views that begin at an unaligned address.
TEST_P(FusedEdges, gradients_that_are_not_aligned) {
  const auto after_one = [](const Tensor& result) {
    return Tensors{at::cat({at::ones({1}, result.options()), result.flatten()})};
  };
  compare(
      {numbers({2, 16, 96})},
      [&](const Tensors& t) { return after_one(nn::attention(t[0], {.heads = 2, .causal = true})); },
      [&](const Tensors& t) { return after_one(plain_attention(t[0], 2, true)); });
  compare(
      {numbers({8, 16}), numbers({16, 16}), numbers({16})},
      [&](const Tensors& t) { return after_one(nn::linear(t[0], t[1], t[2])); },
      [&](const Tensors& t) { return after_one(at::linear(t[0], t[1], t[2])); });
  compare(
      {numbers({8, 16}), numbers({16, 16}), numbers({16})},
      [&](const Tensors& t) { return after_one(nn::linear_gelu(t[0], t[1], t[2])); },
      [&](const Tensors& t) { return after_one(at::gelu(at::linear(t[0], t[1], t[2]), "tanh")); });
  auto norm = norm_of(64);
  compare(
      {numbers({8, 64})}, [&](const Tensors& t) { return after_one(norm(t[0])); },
      [&](const Tensors& t) { return after_one(at::layer_norm(t[0], {64})); });
}

TEST_P(FusedEdges, negated_views) {
  auto norm = norm_of(64);
  compare(
      {numbers({8, 64}), numbers({8, 64})},
      [&](const Tensors& t) { return Tensors{norm->add(t[0], at::_neg_view(t[1])).first}; },
      [](const Tensors& t) { return Tensors{t[0] - t[1]}; });
  const auto x = numbers({2, 16, 96}), weight = numbers({96, 96}), bias = numbers({96});
  auto wide = norm_of(96);
  const std::vector<std::function<Tensor()>> layers = {
      [&] { return nn::linear(x, weight, bias); }, [&] { return nn::linear_gelu(x, weight, bias); },
      [&] { return wide(x); }, [&] { return nn::attention(x, {.heads = 2}); }};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto one = layers[i](), other = layers[i]();
    const auto gradient = at::randn(one.sizes()).to(options());
    expect_close(torch::autograd::grad({one}, {x}, {at::_neg_view(gradient)})[0],
                 torch::autograd::grad({other}, {x}, {-gradient})[0], ("layer " + std::to_string(i)).c_str());
  }
}

TEST_P(FusedEdges, the_weight_may_change_where_only_its_own_gradient_is_wanted) {
  for (const bool gelu : {false, true}) {
    const auto x = numbers({8, 16}).detach(), weight = numbers({16, 16}), bias = numbers({16});
    const auto layer = [&] {
      return (gelu ? nn::linear_gelu(x, weight, bias) : nn::linear(x, weight, bias)).pow(2).sum();
    };
    const auto wanted = torch::autograd::grad({layer()}, {weight, bias});
    const auto loss = layer();
    {
      at::NoGradGuard no_grad;
      weight.mul_(2);
    }
    const auto got = torch::autograd::grad({loss}, {weight, bias});
    for (std::size_t i = 0; i < got.size(); ++i) expect_close(got[i], wanted[i], "gradient");
  }
}

TEST_P(FusedEdges, layer_norm_of_a_sum_with_nothing_is_refused) {
  using ::testing::HasSubstr;
  using ::testing::ThrowsMessage;
  auto norm = norm_of(64);
  const auto x = numbers({8, 64});
  EXPECT_THAT([&] { norm->add(x, Tensor()); },
              ThrowsMessage<ConfigError>(HasSubstr("the residual is undefined")));
  EXPECT_THAT([&] { norm->add(Tensor(), x); },
              ThrowsMessage<ConfigError>(HasSubstr("the input is undefined")));
}

// A row's probabilities depend on differences only, so an offset common to all logits must not matter.
TEST_P(FusedEdges, logits_far_from_zero) {
  std::vector<double> offsets = {100, -3000, 1e4, 5e4};
  if (GetParam().type != at::kHalf) offsets.insert(offsets.end(), {1e5, 1e6, -1e6, -1e9});
  for (const double offset : offsets)
    for (const double spread : {0.0, 1.0, 100.0})
      for (const double smoothing : {0.0, 0.1}) {
        SCOPED_TRACE(fmt::format("offset {}, spread {}, smoothing {}", offset, spread, smoothing));
        const auto logits = (at::randn({5, 104}) * spread + offset).to(options()).requires_grad_();
        const auto targets = targets_of(logits, 104);
        compare(
            {logits},
            [&](const Tensors& t) {
              return Tensors{nn::cross_entropy(t[0], targets, {.label_smoothing = smoothing})};
            },
            [&](const Tensors& t) {
              return Tensors{
                  at::cross_entropy_loss(t[0], targets.cpu(), {}, at::Reduction::Mean, -100, smoothing)};
            });
      }
}

TEST_P(FusedEdges, no_target_that_counts) {
  for (const std::int64_t classes : {24, 61})
    for (const double smoothing : {0.0, 0.1}) {
      const auto hidden = numbers({12, 16}), weight = numbers({classes, 16});
      const auto targets = at::full({12}, -100).to(GetParam().device);
      const auto loss = nn::linear_cross_entropy(hidden, weight, targets, {.label_smoothing = smoothing});
      const auto same =
          nn::cross_entropy(at::linear(hidden, weight), targets, {.label_smoothing = smoothing});
      EXPECT_TRUE(std::isnan(loss.item<double>()));
      EXPECT_TRUE(std::isnan(same.item<double>()));
      for (const auto& each : {loss, same})
        for (const auto& gradient : torch::autograd::grad({each}, {hidden, weight}))
          EXPECT_EQ(gradient.ne(0).sum().item<std::int64_t>(), 0);
      const auto sum = nn::linear_cross_entropy(hidden, weight, targets, {.mean = false});
      EXPECT_EQ(sum.item<double>(), 0);
    }
}

// Rows of logits are then padded beyond the number of classes.
TEST_P(FusedEdges, linear_cross_entropy_of_any_number_of_classes) {
  for (const std::int64_t classes : {3, 7, 261, 50257})
    for (const std::int64_t bytes : {1 << 30, 1})
      for (const double smoothing : {0.0, 0.1}) {
        SCOPED_TRACE(fmt::format("{} classes, {} bytes, smoothing {}", classes, bytes, smoothing));
        const auto hidden = numbers({150, 16}),
                   weight = (numbers({classes, 16}) * 0.1).detach().requires_grad_();
        auto targets = targets_of(hidden, classes);
        targets.slice(0, 0, 150, 11).fill_(-100);
        const nn::CrossEntropyOptions options{.label_smoothing = smoothing, .chunk_bytes = bytes};
        compare(
            {hidden, weight},
            [&](const Tensors& t) { return Tensors{nn::linear_cross_entropy(t[0], t[1], targets, options)}; },
            [&](const Tensors& t) {
              return Tensors{at::cross_entropy_loss(at::linear(t[0], t[1]), targets.cpu(), {},
                                                    at::Reduction::Mean, -100, smoothing)};
            });
      }
  if (!cuda()) return;
  const auto hidden = numbers({4, 16}), weight = numbers({61, 16});
  auto targets = targets_of(hidden, 61);
  targets[2] = 61;  // within the padded row but not a class
  EXPECT_TRUE(std::isnan(nn::linear_cross_entropy(hidden, weight, targets).item<double>()));
}

INSTANTIATE_TEST_SUITE_P(Everywhere, FusedEdges, places(), name_of_place);

}  // namespace
}  // namespace lockstep::testing
