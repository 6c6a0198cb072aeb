// The model and the text of examples/05_gpt.
#include <set>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "../examples/05_gpt/model.h"
#include "../examples/05_gpt/text.h"
#include "support/errors.h"

namespace lockstep::testing {
namespace {

using gpt::Gpt;

const gpt::Config kSmall{.layers = 2, .heads = 4, .width = 32, .context = 16};

Gpt made(gpt::Config config = kSmall) {
  torch::manual_seed(3);
  Gpt model(config);
  model->to(torch::kDouble);
  return model;
}

at::Tensor some_tokens(std::int64_t count = 3) {
  return gpt::batch(gpt::synthetic_text(1, 4096), {.seed = 1, .count = count, .context = 15});
}

TEST(Gpt, is_the_sequence_of_its_pieces) {
  auto model = made();
  auto x = some_tokens();
  const auto whole = model(x);
  std::set<std::string> names;
  for (auto& piece : model->pieces()) {
    x = piece({x}).at(0);
    for (const auto& item : piece.module()->named_parameters())
      names.insert(piece.name()->empty() ? item.key() : *piece.name() + "." + item.key());
  }
  EXPECT_TRUE(at::equal(x, whole));
  EXPECT_EQ(whole.sizes(), (at::IntArrayRef{3, 16, 256}));
  const auto keys = model->named_parameters().keys();
  EXPECT_EQ(names, std::set<std::string>(keys.begin(), keys.end()));
  for (const char* name :
       {"tokens.weight", "positions.weight", "blocks.0.attn.qkv.weight", "blocks.1.attn.out.bias",
        "blocks.0.mlp.up.bias", "blocks.1.mlp.down.weight", "norm.weight", "head.weight"})
    EXPECT_TRUE(names.contains(name)) << name;
}

TEST(Gpt, a_tied_weight_is_one_parameter_with_two_names) {
  auto tied = made();
  const auto named = tied->named_parameters();
  EXPECT_TRUE(named["head.weight"].is_same(named["tokens.weight"]));
  EXPECT_TRUE(tied->output->head->weight.is_same(tied->input->tokens->weight));
  EXPECT_EQ(tied->parameters().size() + 1, named.size());
  auto config = kSmall;
  config.tied = false;
  EXPECT_EQ(made(config)->parameters().size(), named.size());
  AdamW optimizer(tied->parameters());  // which refuses a parameter that is given twice
}

TEST(Gpt, a_token_depends_on_no_later_one) {
  auto model = made();
  auto tokens = some_tokens();
  const auto before = model(tokens).narrow(1, 0, 10).clone();
  tokens.narrow(1, 10, 6).fill_(7);
  EXPECT_TRUE(at::equal(model(tokens).narrow(1, 0, 10), before));
}

// Half of the heads at a time, as two ranks of tensor parallelism have them: each of q, k and v is split.
TEST(Gpt, attention_has_the_heads_that_qkv_gives) {
  torch::NoGradGuard no_grad;
  auto model = made();
  auto attention = model->blocks[0]->attn;
  const auto x = torch::randn({2, 5, kSmall.width}, torch::kDouble);
  const auto whole = attention(x);
  auto& qkv = *attention->qkv;
  auto& out = *attention->out;
  const auto width = kSmall.width;
  const auto weight = qkv.weight.view({3, width, width}), bias = qkv.bias.view({3, width}), last = out.weight,
             added = out.bias;
  auto sum = torch::zeros_like(whole);
  for (const int half : {0, 1}) {
    const auto begin = half * width / 2;
    qkv.weight = weight.narrow(1, begin, width / 2).reshape({-1, width});
    qkv.bias = bias.narrow(1, begin, width / 2).flatten();
    out.weight = last.narrow(1, begin, width / 2);
    out.bias = half == 0 ? added : torch::zeros_like(added);
    sum += attention(x);
  }
  EXPECT_TRUE(at::allclose(sum, whole, 1e-12, 1e-12));
}

TEST(Gpt, refuses_what_cannot_be) {
  const auto text_of = [](gpt::Config config) { return error_of<ConfigError>([&] { Gpt model(config); }); };
  EXPECT_THAT(text_of({.heads = 3, .width = 32}), HasSubstr("width 32 cannot be divided among 3 heads"));
  EXPECT_THAT(text_of({.layers = 0}), HasSubstr("layers: expected at least 1, got 0"));
  EXPECT_THAT(text_of({.dropout = 1}), HasSubstr("dropout: expected at least 0 and below 1, got 1"));
}

TEST(GptText, is_the_same_everywhere) {
  const auto text = gpt::synthetic_text(0, 4096);
  EXPECT_EQ(text.substr(0, 52), "Ada has the coin. Felix has the ring. Klara has the ");
  EXPECT_EQ(gpt::synthetic_text(0, 100), text.substr(0, 100));
  EXPECT_NE(gpt::synthetic_text(1, 100), text.substr(0, 100));
}

TEST(GptText, any_part_of_a_batch_is_that_part) {
  const auto whole = some_tokens(8), text = gpt::batch(gpt::synthetic_text(1, 4096), {.seed = 1, .count = 8});
  EXPECT_EQ(text.sizes(), (at::IntArrayRef{8, 65}));
  for (std::int64_t first = 0; first < 8; first += 2)
    EXPECT_TRUE(at::equal(
        gpt::batch(gpt::synthetic_text(1, 4096), {.seed = 1, .first = first, .count = 2, .context = 15}),
        whole.narrow(0, first, 2)));
  // The shortest text has one place.
  EXPECT_TRUE(
      at::equal(gpt::batch("abcd", {.step = 5, .context = 3}), torch::tensor({{97L, 98L, 99L, 100L}})));
  EXPECT_THAT(error_of<ConfigError>([] { gpt::batch("abc", {.context = 3}); }),
              HasSubstr("the text has 3 bytes, but a context of 3 needs 4"));
  EXPECT_THAT(error_of<ConfigError>([] { gpt::read_text("/nowhere"); }),
              HasSubstr("/nowhere: cannot be read"));
  EXPECT_THAT(error_of<ConfigError>([] { gpt::read_text("/"); }), HasSubstr("/: cannot be read"));
}

}  // namespace
}  // namespace lockstep::testing
