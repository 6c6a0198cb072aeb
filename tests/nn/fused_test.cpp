// Layers and losses with CUDA kernels, against LibTorch's operators in double precision. The same cases run
// on the CPU through LibTorch's operators; those on CUDA are skipped without a GPU.
#include <lockstep/base/error.h>
#include <lockstep/nn/attention.h>
#include <lockstep/nn/cross_entropy.h>
#include <lockstep/nn/layer_norm.h>
#include <lockstep/nn/linear.h>
#include <torch/torch.h>

#include <cmath>
#include "nn/fused.h"

namespace lockstep::testing {
namespace {

TEST_P(Fused, linear_is_libtorchs) {
  for (const bool bias : {true, false})
    for (const std::int64_t columns : {8, 264, 1000, 13})  // 13: LibTorch's operator
      for (const bool three : {false, true}) {
        Tensors inputs = {three ? numbers({3, 17, 24}) : numbers({300, 24}), numbers({columns, 24})};
        if (bias) inputs.push_back(numbers({columns}));
        compare(
            inputs, [](const Tensors& t) { return Tensors{nn::linear(t[0], t[1], optional_at(t, 2))}; },
            [](const Tensors& t) { return Tensors{at::linear(t[0], t[1], optional_at(t, 2))}; });
      }
}

TEST_P(Fused, linear_gelu_is_libtorchs) {
  for (const bool bias : {true, false})
    for (const std::int64_t columns : {8, 264, 3072, 13}) {
      Tensors inputs = {numbers({2, 70, 24}), numbers({columns, 24})};
      if (bias) inputs.push_back(numbers({columns}));
      compare(
          inputs, [](const Tensors& t) { return Tensors{nn::linear_gelu(t[0], t[1], optional_at(t, 2))}; },
          [](const Tensors& t) {
            return Tensors{at::gelu(at::linear(t[0], t[1], optional_at(t, 2)), "tanh")};
          });
    }
}

TEST_P(Fused, linear_of_frozen_parameters_and_strided_input) {
  Tensors inputs = {numbers({24, 40}), numbers({16, 24}).detach(), numbers({16})};
  compare(
      inputs, [](const Tensors& t) { return Tensors{nn::linear_gelu(t[0].t(), t[1], t[2])}; },
      [](const Tensors& t) { return Tensors{at::gelu(at::linear(t[0].t(), t[1], t[2]), "tanh")}; });
  inputs = {numbers({40, 24}).detach(), numbers({16, 24}), numbers({16}).detach()};
  compare(
      inputs, [](const Tensors& t) { return Tensors{nn::linear(t[0], t[1], t[2])}; },
      [](const Tensors& t) { return Tensors{at::linear(t[0], t[1], t[2])}; });
}

TEST_P(Fused, layer_norm_is_libtorchs) {
  for (const std::int64_t columns : {8, 96, 768, 1600, 8192, 8200, 30}) {  // last two: LibTorch's
    nn::LayerNorm norm(torch::nn::LayerNormOptions({columns}).eps(1e-5));
    const auto plain = [&](const Tensor& x, const Tensor& w, const Tensor& b) {
      return at::layer_norm(x, {columns}, w, b, 1e-5);
    };
    compare(
        {numbers({5, 31, columns}), numbers({columns}), numbers({columns})},
        [&](const Tensors& t) {
          norm->weight = t[1], norm->bias = t[2];
          return Tensors{norm(t[0])};
        },
        [&](const Tensors& t) { return Tensors{plain(t[0], t[1], t[2])}; });
    // The sum is rounded to this type before it is normalised, so round it in the reference, too.
    const auto rounded = [&](const Tensor& sum) { return sum.to(GetParam().type).to(at::kDouble); };
    for (const int used : {0, 1, 2})  // use the sum, the normalised sum, both
      compare(
          {numbers({40, columns}), numbers({40, columns}), numbers({columns}), numbers({columns})},
          [&](const Tensors& t) {
            norm->weight = t[2], norm->bias = t[3];
            const auto [sum, y] = norm->add(t[0], t[1]);
            return used == 0 ? Tensors{sum} : used == 1 ? Tensors{y} : Tensors{sum, y};
          },
          [&](const Tensors& t) {
            const auto sum = rounded(t[0] + t[1]);
            const auto y = plain(sum, t[2], t[3]);
            return used == 0 ? Tensors{sum} : used == 1 ? Tensors{y} : Tensors{sum, y};
          });
  }
}

TEST_P(Fused, layer_norm_without_weights) {
  nn::LayerNorm norm(torch::nn::LayerNormOptions({64}).elementwise_affine(false));
  compare(
      {numbers({7, 64}), numbers({7, 64})},
      [&](const Tensors& t) { return Tensors{norm->add(t[0], t[1]).second}; },
      [&](const Tensors& t) {
        return Tensors{at::layer_norm((t[0] + t[1]).to(GetParam().type).to(at::kDouble), {64})};
      });
}

TEST_P(Fused, cross_entropy_is_libtorchs) {
  // Rows that fit into shared memory, rows that do not, and numbers of classes without a kernel.
  for (const std::int64_t classes : {8, 1000, 50304, 70000, 33})
    for (const bool mean : {true, false})
      for (const double smoothing : {0.0, 0.1}) {
        const auto logits = numbers({3, 5, classes});
        auto targets = targets_of(logits, classes);
        targets.select(0, 1).fill_(-100);
        compare(
            {logits},
            [&](const Tensors& t) {
              return Tensors{nn::cross_entropy(t[0], targets, {.label_smoothing = smoothing, .mean = mean})};
            },
            [&](const Tensors& t) {
              return Tensors{at::cross_entropy_loss(t[0].view({-1, classes}), targets.cpu().view(-1), {},
                                                    mean ? at::Reduction::Mean : at::Reduction::Sum, -100,
                                                    smoothing)};
            });
      }
}

TEST_P(Fused, linear_cross_entropy_is_both) {
  // One chunk, and chunks of 128 rows with a smaller last one.
  for (const std::int64_t bytes : {1 << 30, 1})
    for (const bool mean : {true, false}) {
      const auto hidden = numbers({2, 150, 40}),
                 weight = (numbers({264, 40}) * 0.1).detach().requires_grad_();
      auto targets = targets_of(hidden, 264);
      targets.view(-1).slice(0, 0, 300, 7).fill_(3);
      targets.view(-1).slice(0, 0, 300, 11).fill_(-1);
      const nn::CrossEntropyOptions options{.ignore_index = -1, .mean = mean, .chunk_bytes = bytes};
      compare(
          {hidden, weight},
          [&](const Tensors& t) { return Tensors{nn::linear_cross_entropy(t[0], t[1], targets, options)}; },
          [&](const Tensors& t) {
            return Tensors{at::cross_entropy_loss(at::linear(t[0], t[1]).view({-1, 264}),
                                                  targets.cpu().view(-1), {},
                                                  mean ? at::Reduction::Mean : at::Reduction::Sum, -1)};
          });
    }
}

TEST_P(Fused, linear_cross_entropy_backward_twice_and_without_gradients) {
  const auto hidden = numbers({140, 16}), weight = numbers({24, 16});
  const auto targets = targets_of(hidden, 24);
  const auto loss = nn::linear_cross_entropy(hidden, weight, targets, {.chunk_bytes = 1});
  loss.backward({}, /*retain_graph=*/true);
  const auto once = hidden.grad().clone(), once_weight = weight.grad().clone();
  (3 * loss).backward();
  expect_close(hidden.grad(), once * 4, "hidden");
  expect_close(weight.grad(), once_weight * 4, "weight");
  at::NoGradGuard no_grad;
  expect_close(nn::linear_cross_entropy(hidden, weight, targets), loss, "loss");
}

TEST_P(Fused, attention_is_libtorchs) {
  for (const bool causal : {true, false})
    for (const std::optional<double> scale : {std::optional<double>(), std::optional<double>(0.3)})
      for (const std::int64_t size : {64, 16, 20})  // 20: LibTorch pads it
        compare(
            {numbers({2, 48, 3 * 4 * size})},
            [&](const Tensors& t) {
              return Tensors{nn::attention(t[0], {.heads = 4, .causal = causal, .scale = scale})};
            },
            [&](const Tensors& t) {
              const auto parts = t[0].view({2, 48, 3, 4, size}).permute({2, 0, 3, 1, 4}).unbind();
              return Tensors{
                  at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, causal, scale)
                      .transpose(1, 2)
                      .flatten(2)};
            });
}

TEST_P(Fused, the_same_bits_twice) {
  const auto x = numbers({700, 768}), residual = numbers({700, 768}), weight = numbers({512, 768}),
             bias = numbers({512});
  const auto targets = targets_of(x, 512);
  nn::LayerNorm norm(torch::nn::LayerNormOptions({768}));
  norm->to(GetParam().device, GetParam().type);
  Tensors first;
  for (int round = 0; round < 3; ++round) {
    for (const auto& each : {x, residual, weight, bias, norm->weight, norm->bias})
      each.mutable_grad().reset();
    const auto [sum, y] = norm->add(x, residual);
    (nn::linear_cross_entropy(y, weight, targets, {.chunk_bytes = 1}) +
     nn::linear_gelu(sum, weight, bias).sum())
        .backward();
    Tensors now;
    for (const auto& each : {x, residual, weight, bias, norm->weight, norm->bias})
      now.push_back(each.grad().clone());
    if (round == 0) first = now;
    for (std::size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(at::equal(now[i], first[i])) << i;
  }
}

TEST_P(Fused, a_second_derivative_of_linear_and_of_nothing_else) {
  const auto small = [&](at::IntArrayRef sizes) {  // third powers, squared, must fit float16
    return (numbers(sizes) * 0.25).detach().requires_grad_();
  };
  const auto x = small({16, 16}), weight = small({16, 16}), bias = small({16});
  const auto second = [&](const auto& layer) {
    const auto first =
        torch::autograd::grad({layer(x).pow(3).sum()}, {x, bias}, {}, true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].pow(2).sum() + first[1].pow(2).sum()}, {weight})[0];
  };
  const auto plain = second([&](const Tensor& t) { return at::linear(t, weight, bias); });
  expect_close(second([&](const Tensor& t) { return nn::linear(t, weight, bias); }), plain,
               "second derivative");
  const auto gelu = [&](const Tensor& t) { return nn::linear_gelu(t, weight, bias); };
  if (cuda()) {
    EXPECT_THROW(second(gelu), std::exception);
  }
}

TEST_P(Fused, results_can_be_changed_in_place) {
  for (const bool three : {false, true}) {
    const auto x = three ? numbers({2, 8, 16}) : numbers({8, 16});
    const auto weight = numbers({16, 16});
    nn::linear(x, weight, {}).relu_().sum().backward();
    nn::linear_gelu(x, weight, {}).add_(1).sum().backward();
  }
  // Backward needs attention's result, so changing it is an error as in LibTorch, not a wrong gradient.
  const auto qkv = numbers({2, 8, 96});
  const auto changed = nn::attention(qkv, {.heads = 2}).mul_(5).sum();
  EXPECT_THAT([&] { changed.backward(); },
              ::testing::ThrowsMessage<c10::Error>(::testing::HasSubstr("modified by an inplace operation")));
}

// Views of one buffer with rows that are not aligned to 16 bytes.
TEST_P(Fused, memory_that_is_not_aligned) {
  const auto odd = [&](at::IntArrayRef sizes) {
    const auto count = c10::multiply_integers(sizes);
    return at::randn({count + 1}).to(options()).narrow(0, 1, count).view(sizes).requires_grad_();
  };
  nn::LayerNorm norm(torch::nn::LayerNormOptions({64}));
  compare(
      {odd({10, 64}), odd({10, 64}), odd({64}), odd({64})},
      [&](const Tensors& t) {
        norm->weight = t[2], norm->bias = t[3];
        return Tensors{norm->add(t[0], t[1]).second};
      },
      [&](const Tensors& t) {
        return Tensors{at::layer_norm((t[0] + t[1]).to(GetParam().type).to(at::kDouble), {64}, t[2], t[3])};
      });
  compare(
      {odd({10, 64}), odd({32, 64}), odd({32})},
      [](const Tensors& t) { return Tensors{nn::linear_gelu(t[0], t[1], t[2])}; },
      [](const Tensors& t) { return Tensors{at::gelu(at::linear(t[0], t[1], t[2]), "tanh")}; });
  const auto logits = odd({10, 64});
  const auto targets = targets_of(logits, 64);
  compare(
      {logits}, [&](const Tensors& t) { return Tensors{nn::cross_entropy(t[0], targets)}; },
      [&](const Tensors& t) { return Tensors{at::cross_entropy_loss(t[0], targets.cpu())}; });
  compare(
      {odd({2, 16, 96})},
      [](const Tensors& t) { return Tensors{nn::attention(t[0], {.heads = 2, .causal = true})}; },
      [](const Tensors& t) {
        const auto parts = t[0].view({2, 16, 3, 2, 16}).permute({2, 0, 3, 1, 4}).unbind();
        return Tensors{at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true)
                           .transpose(1, 2)
                           .flatten(2)};
      });
}

// Values far to the left are small but not zero.
TEST_P(Fused, gelu_far_on_the_left) {
  const auto weight = at::eye(8).to(options()), x = at::full({8, 8}, -3.5).to(options());
  const auto got = nn::linear_gelu(x, weight, {}).cpu().to(at::kDouble)[0][0].item<double>();
  const auto wanted = at::gelu(at::full({1}, -3.5, at::kDouble), "tanh").item<double>();
  EXPECT_NEAR(got, wanted, std::abs(wanted) * (GetParam().type == at::kFloat ? 1e-4 : 8e-3));
}

// Each row's share of a mean over many rows is below float16's minimum until the scaler has raised it.
TEST_P(Fused, linear_cross_entropy_of_many_rows_in_float16) {
  const auto hidden = (numbers({4096, 16}) * 0.1).detach().requires_grad_(),
             weight = (numbers({4096, 16}) * 0.1).detach().requires_grad_();
  const auto targets = targets_of(hidden, 4096);
  (nn::linear_cross_entropy(hidden, weight, targets) * 1024).backward();
  auto h = hidden.detach().cpu().to(at::kDouble).requires_grad_(), w = weight.detach().cpu().to(at::kDouble);
  (at::cross_entropy_loss(at::linear(h, w), targets.cpu()) * 1024).backward();
  expect_close(hidden.grad(), h.grad(), "hidden");
}

TEST_P(Fused, targets_that_are_no_class) {
  if (!cuda()) GTEST_SKIP() << "LibTorch reports it on the CPU";
  const auto logits = numbers({4, 16});
  auto targets = targets_of(logits, 16);
  targets[2] = 16;
  EXPECT_TRUE(std::isnan(nn::cross_entropy(logits, targets).item<double>()));
}

TEST_P(Fused, bad_input_is_refused) {
  using ::testing::HasSubstr;
  using ::testing::ThrowsMessage;
  const auto logits = numbers({4, 16});
  const auto targets = targets_of(logits, 16);
  EXPECT_THAT([&] { nn::cross_entropy(logits, targets.narrow(0, 0, 3)); },
              ThrowsMessage<ConfigError>(HasSubstr("got logits [4, 16] and targets Long [3]")));
  EXPECT_THAT([&] { nn::cross_entropy(logits, targets.to(at::kInt)); },
              ThrowsMessage<ConfigError>(HasSubstr("expected one int64 target for each row")));
  EXPECT_THAT([&] { nn::cross_entropy(logits, targets, {.label_smoothing = 2}); },
              ThrowsMessage<ConfigError>(HasSubstr("label_smoothing: expected 0 to 1, got 2")));
  EXPECT_THAT([&] { nn::linear_cross_entropy(logits, numbers({5, 15}), targets); },
              ThrowsMessage<ConfigError>(HasSubstr("expected [classes, 16] for hidden [4, 16], got [5")));
  EXPECT_THAT([&] { nn::linear_cross_entropy(logits, numbers({5, 16}), targets, {.chunk_bytes = 0}); },
              ThrowsMessage<ConfigError>(HasSubstr("chunk_bytes: expected at least 1, got 0")));
  EXPECT_THAT([&] { nn::attention(numbers({2, 8, 50}), {.heads = 2}); },
              ThrowsMessage<ConfigError>(HasSubstr("[batch, length, 3 * 2 * size], got [2, 8, 50]")));
  EXPECT_THAT([&] { nn::attention(numbers({2, 8, 48}), {.heads = 0}); },
              ThrowsMessage<ConfigError>(HasSubstr("heads: expected at least 1, got 0")));
}

TEST_P(Fused, modules_are_libtorchs_to_others) {
  nn::LinearGELU up(8, 16);
  EXPECT_NE(up->as<torch::nn::Linear>(), nullptr);
  const auto copy = up->clone();
  ASSERT_NE(dynamic_cast<nn::LinearGELUImpl*>(copy.get()), nullptr);
  EXPECT_FALSE(copy->parameters()[0].is_same(up->weight));
  nn::LayerNorm norm(torch::nn::LayerNormOptions({8}));
  ASSERT_NE(dynamic_cast<nn::LayerNormImpl*>(norm->clone().get()), nullptr);
  torch::nn::Sequential both(up, torch::nn::Linear(16, 8), norm);
  both->to(GetParam().device, GetParam().type);
  EXPECT_EQ(both->forward(numbers({3, 8})).sizes(), (std::vector<std::int64_t>{3, 8}));
}

INSTANTIATE_TEST_SUITE_P(Everywhere, Fused, places(), name_of_place);

}  // namespace
}  // namespace lockstep::testing
