// Layers that LibTorch's C++ API lacks or implements differently: counter-based dropout, Linear, RMSNorm.
#include <thread>

#include <lockstep/nn/detail/philox.h>
#include <lockstep/nn/dropout.h>
#include <lockstep/nn/linear.h>
#include <lockstep/nn/rms_norm.h>

#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

TEST(Philox, gives_the_published_words) {
  struct Known {
    std::array<std::uint32_t, 4> counter;
    std::array<std::uint32_t, 2> key;
    std::array<std::uint32_t, 4> words;
  };
  const std::uint32_t ones = 0xffffffff;
  for (const auto& known :
       {Known{{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        Known{{ones, ones, ones, ones}, {ones, ones}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        Known{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
              {0xa4093822, 0x299f31d0},
              {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}}) {
    nn::detail::PhiloxBlocks blocks;
    for (std::size_t word = 0; word < 4; ++word) blocks.words[word].fill(known.counter[word]);
    nn::detail::philox(blocks, known.key[0], known.key[1]);
    for (std::size_t word = 0; word < 4; ++word)
      for (const auto value : blocks.words[word]) EXPECT_EQ(value, known.words[word]);
  }
}

TEST(Dropout, the_mask_of_a_slice_is_the_slice_of_the_mask) {
  const nn::DropoutScope scope({.seed = 3, .step = 11});
  for (const auto& sizes :
       {std::vector<std::int64_t>{6, 4, 8}, {6, 4, 12, 6}, {2, 1, 4}, {12, 20}, {4, 4, 4, 148}}) {
    const auto x = at::ones(sizes);
    const auto whole = nn::dropout(x, 0.3, "layer");
    for (std::int64_t dim = 0; dim < x.dim(); ++dim)
      for (const int count : {1, 2, 4}) {
        if (sizes[static_cast<std::size_t>(dim)] % count != 0) continue;
        std::vector<at::Tensor> slices;
        for (int index = 0; index < count; ++index)
          slices.push_back(nn::dropout(x.chunk(count, dim)[static_cast<std::size_t>(index)], 0.3, "layer",
                                       nn::Shard{index % 2 ? dim - x.dim() : dim, index, count}));
        EXPECT_TRUE(at::equal(at::cat(slices, dim), whole)) << dim << " of " << count;
      }
    // Slices of samples, set by the scope; also of unequal size.
    const auto first = nn::dropout(x.narrow(0, 0, 1), 0.3, "layer");
    const auto shifted = nn::shift_samples(1);
    EXPECT_EQ(nn::dropout_step()->first_sample, 1);
    EXPECT_TRUE(at::equal(at::cat({first, nn::dropout(x.narrow(0, 1, sizes[0] - 1), 0.3, "layer")}), whole));
  }
  EXPECT_EQ(nn::dropout_step()->first_sample, 0);
  // Contiguous or strided memory makes no difference, and neither does the dtype.
  const auto x = at::ones({5, 6, 7});
  const auto whole = nn::dropout(x, 0.5, "layer");
  EXPECT_TRUE(at::equal(nn::dropout(at::ones({7, 6, 5}).permute({2, 1, 0}), 0.5, "layer"), whole));
  EXPECT_TRUE(at::equal(nn::dropout(x.to(at::kBFloat16), 0.5, "layer").to(at::kFloat), whole));
  EXPECT_TRUE(at::equal(nn::dropout(x.to(at::kDouble), 0.5, "layer"), whole.to(at::kDouble)));
}

TEST(Dropout, masks_differ_by_seed_step_layer_and_sample_and_drop_the_share_asked_for) {
  const auto x = at::ones({64, 64});
  const auto mask = [&](nn::DropoutStep step, const char* key = "a") {
    const nn::DropoutScope scope(step);
    return nn::dropout(x, 0.25, key);
  };
  const auto base = mask({.seed = 1, .step = 1});
  EXPECT_TRUE(at::equal(base, mask({.seed = 1, .step = 1})));
  // With p = 1/4, an element of two independent masks agrees with probability 10/16.
  for (const auto& other :
       {mask({.seed = 2, .step = 1}), mask({.seed = 1, .step = 2}), mask({.seed = 1, .step = 1}, "b"),
        mask({.seed = 1, .step = 1, .first_sample = 64})})
    EXPECT_NEAR((base == other).to(at::kFloat).mean().item<float>(), 0.625, 0.04);
  const nn::DropoutScope scope({.seed = 5});
  for (const double p : {0.1, 0.5, 0.9}) {
    const auto dropped = nn::dropout(at::ones({100, 1000}), p, "share");
    EXPECT_NEAR((dropped == 0).to(at::kDouble).mean().item<double>(), p, 0.01);
    EXPECT_NEAR(dropped.max().item<double>(), 1 / (1 - p), 1e-5);
    EXPECT_NEAR(dropped.mean().item<double>(), 1.0, 0.05);
  }
  EXPECT_EQ(nn::dropout(x, 1.0, "all").abs().sum().item<float>(), 0);
  EXPECT_TRUE(nn::dropout(x, 0.0, "none").is_same(x));
  EXPECT_EQ(nn::dropout(at::ones({0, 4}), 0.5, "empty").size(0), 0);
}

TEST(Dropout, backward_makes_the_mask_again_outside_the_scope_and_on_any_thread) {
  auto x = numbers(1, {8, 40}).requires_grad_();
  at::Tensor y, expected;
  {
    const nn::DropoutScope scope({.seed = 9, .step = 4, .first_sample = 24});
    y = nn::dropout(x, 0.4, "layer", nn::Shard{1, 1, 2});
    expected = nn::dropout(at::ones({8, 40}), 0.4, "layer", nn::Shard{1, 1, 2});
  }
  const nn::DropoutScope other({.seed = 1});
  auto gradient = torch::autograd::grad({y.pow(2).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
  EXPECT_TRUE(at::allclose(gradient, 2 * x * expected.square()));
  gradient.sum().backward();  // the gradient has the second derivative
  EXPECT_TRUE(at::allclose(x.grad(), 2 * expected.square()));
}

TEST(Dropout, layers_have_their_names_for_keys_and_without_scope_or_key_they_say_so) {
  struct Net : torch::nn::Module {
    nn::Dropout plain{0.5}, named{nn::DropoutOptions{.p = 0.5, .key = "mine"}};
    Unit<nn::Dropout> unit{0.5};
    torch::nn::Sequential rest{torch::nn::Linear(2, 2), nn::Dropout(0.5)};
    Net() {
      register_module("plain", plain), register_module("named", named), register_module("unit", unit);
      register_module("rest", rest);
    }
  } net;
  const auto x = at::ones({2, 2});
  {
    const nn::DropoutScope scope({});
    EXPECT_THAT(error_of<ConfigError>([&] { net.plain(x); }), HasSubstr("name_layers"));
  }
  EXPECT_EQ(nn::name_layers(net, "stage1"), 3);
  EXPECT_EQ(nn::name_layers(net), 0);
  EXPECT_EQ(net.plain->options.key, "stage1.plain");
  EXPECT_EQ(net.unit->options.key, "stage1.unit");
  EXPECT_EQ(net.rest->ptr(1)->as<nn::DropoutImpl>()->options.key, "stage1.rest.1");
  EXPECT_EQ(net.named->options.key, "mine");
  EXPECT_THAT(error_of<ConfigError>([&] { net.plain(x); }),
              AllOf(HasSubstr("'stage1.plain'"), HasSubstr("DropoutScope")));
  EXPECT_THAT(error_of<ConfigError>([&] { (void)nn::shift_samples(1); }), HasSubstr("DropoutScope"));
  const nn::DropoutScope scope({});
  EXPECT_FALSE(net.unit(at::ones({9, 9})).equal(at::ones({9, 9})));
  auto copy = std::dynamic_pointer_cast<nn::DropoutImpl>(net.plain->clone());
  EXPECT_TRUE(at::equal(copy->forward(x), net.plain(x)));
  std::thread([&] { EXPECT_FALSE(nn::dropout_step()); }).join();  // each thread has its own scope
  net.eval();
  EXPECT_TRUE(net.plain(x).is_same(x));
  EXPECT_THAT(error_of<ConfigError>([] { nn::Dropout wrong(1.5); }), HasSubstr("from 0 to 1, got 1.5"));
  EXPECT_THAT(error_of<ConfigError>([&] { nn::dropout(x, -0.1, "k"); }), HasSubstr("-0.1"));
  EXPECT_THAT(error_of<ConfigError>([&] { nn::dropout(x, 0.1, "k", nn::Shard{2, 0, 2}); }),
              AllOf(HasSubstr("'k'"), HasSubstr("[2, 2]")));
  EXPECT_THAT(error_of<ConfigError>([&] { nn::dropout(x.to(at::kLong), 0.1, "k"); }), HasSubstr("Long"));
}

TEST(Linear, it_is_libtorchs_in_values_names_and_copies) {
  if (num_ranks() > 1 && ranks_are_threads()) return;  // ranks that are threads share one global generator
  torch::manual_seed(4);
  torch::nn::Linear theirs(6, 5);
  torch::manual_seed(4);
  Unit<nn::Linear> ours(6, 5);
  EXPECT_TRUE(at::equal(ours->weight, theirs->weight));
  EXPECT_TRUE(at::equal(ours->bias, theirs->bias));
  EXPECT_EQ(ours->named_parameters().keys(), theirs->named_parameters().keys());
  for (const auto& x : {numbers(1, {3, 6}), numbers(2, {2, 3, 6}), numbers(3, {6})})
    EXPECT_TRUE(at::allclose(ours(x), theirs(x), 1e-5, 1e-6));
  nn::Linear none(torch::nn::LinearOptions(6, 5).bias(false));
  EXPECT_EQ(none(numbers(1, {3, 6})).size(1), 5);
  auto copy = std::dynamic_pointer_cast<nn::LinearImpl>(ours->clone());
  ASSERT_TRUE(copy);
  EXPECT_TRUE(at::equal(copy->weight, ours->weight));
  EXPECT_FALSE(copy->weight.is_same(ours->weight));
  EXPECT_TRUE(copy->parameters()[0].is_same(copy->weight));
  EXPECT_TRUE(detail::slot_of(copy.get()));  // in a Unit, like the original
}

TEST(RMSNorm, it_divides_by_the_root_of_the_mean_square) {
  nn::RMSNorm norm({8}, 1e-6);
  fill_parameters(*norm, 5);
  const auto x = numbers(6, {3, 8});
  const auto expected = x / (x.square().mean(-1, true) + 1e-6).sqrt() * norm->weight;
  EXPECT_TRUE(at::allclose(norm(x), expected, 1e-5, 1e-6));
  EXPECT_EQ(norm->clone()->parameters().size(), 1U);
}

}  // namespace
}  // namespace lockstep::testing
