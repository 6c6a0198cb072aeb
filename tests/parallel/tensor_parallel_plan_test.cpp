// parallelize_module: models compared with one rank's, errors, and the state of split modules.
#include <lockstep/nn/dropout.h>
#include <lockstep/nn/linear.h>
#include <lockstep/parallel/tensor/plan.h>
#include <lockstep/parallel/tensor_parallel.h>

#include "parallel/models.h"
#include "parallel/tensor_parallel_models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

constexpr std::int64_t kWidth = 16, kHead = 4, kWords = 24, kLength = 8;

struct AttentionImpl : torch::nn::Module {
  Unit<nn::Linear> qkv{kWidth, 3 * kWidth};
  Unit<torch::nn::Linear> out{kWidth, kWidth};
  AttentionImpl() { register_module("qkv", qkv), register_module("out", out); }
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [](const at::Tensor& t) { return t.unflatten(-1, {-1, kHead}).transpose(1, 2); };
    const auto parts = qkv(x).chunk(3, -1);
    const auto scores = heads(parts[0]).matmul(heads(parts[1]).transpose(-2, -1)).div(2).softmax(-1);
    return out(scores.matmul(heads(parts[2])).transpose(1, 2).flatten(2));
  }
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  Unit<torch::nn::LayerNorm> first{torch::nn::LayerNormOptions({kWidth})};
  Attention attention;
  Unit<nn::RMSNorm> second{std::vector<std::int64_t>{kWidth}, 1e-5};
  torch::nn::Sequential mlp{torch::nn::Linear(kWidth, 2 * kWidth), torch::nn::GELU(), nn::Dropout(0.2),
                            nn::Linear(2 * kWidth, kWidth)};
  nn::Dropout drop{0.3};
  BlockImpl() {
    register_module("first", first), register_module("attention", attention);
    register_module("second", second), register_module("mlp", mlp), register_module("drop", drop);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = x + drop(attention(first(x)));
    return y + mlp->forward(second(y));
  }
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  Unit<torch::nn::Embedding> words{kWords, kWidth}, places{kLength, kWidth};
  torch::nn::ModuleList blocks;
  Unit<torch::nn::LayerNorm> norm{torch::nn::LayerNormOptions({kWidth})};
  Unit<torch::nn::Linear> head{torch::nn::LinearOptions(kWidth, kWords).bias(false)};
  GptImpl() {
    for (int i = 0; i < 2; ++i) blocks->push_back(Block());
    register_module("words", words), register_module("places", places), register_module("blocks", blocks);
    register_module("norm", norm), register_module("head", head);
    fill_parameters(*this, 70);
    to(at::kDouble);
    nn::name_layers(*this);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = words(tokens) + places(at::arange(tokens.size(1)));
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return head(norm(x));
  }
};
TORCH_MODULE(Gpt);

ParallelPlan plan_for(bool sequence) {
  std::optional<std::int64_t> dim, row;
  if (sequence) dim = 1, row = 0;
  ParallelPlan plan = {{"words", Rowwise{.sequence_dim = dim}},
                       {"places", Rowwise{.sequence_dim = row}},
                       {"blocks.*.attention.qkv", Colwise{.sequence_dim = dim, .parts = 3}},
                       {"blocks.*.attention.out", Rowwise{.sequence_dim = dim}},
                       {"blocks.*.mlp.0", Colwise{.sequence_dim = dim}},
                       {"blocks.*.mlp.2", SequenceParallel{.dim = -1}},
                       {"blocks.*.mlp.3", Rowwise{.sequence_dim = dim}},
                       {"head", Colwise{.sequence_dim = dim}}};
  if (sequence)
    for (const char* name : {"blocks.*.first", "blocks.*.second", "norm", "blocks.*.drop"})
      plan.emplace_back(name, SequenceParallel{});
  return plan;
}

TEST(ParallelizeModule, a_transformer_trains_as_on_one_rank) {
  on_every_rank([](World& world) {
    for (const bool sequence : {false, true}) {
      Gpt one, model;
      const auto names = model->named_parameters().keys();
      const auto handles = model->parameters();
      torch::optim::SGD mine(model->parameters(), 0.1), theirs(one->parameters(), 0.1);  // Before the split.
      EXPECT_EQ(parallelize_module(*model, world.group(), plan_for(sequence)), sequence ? 20 : 13);
      EXPECT_EQ(model->named_parameters().keys(), names);
      for (std::size_t i = 0; i < handles.size(); ++i)
        EXPECT_TRUE(model->parameters()[i].is_same(handles[i]));
      EXPECT_EQ(model->head->weight.size(0), kWords / world.size());
      EXPECT_EQ(model->head->weight.storage().nbytes(), kWords * kWidth * sizeof(double) / world.size());
      for (std::uint64_t step = 0; step < 3; ++step) {
        const auto tokens = numbers(80 + step, {2, kLength + 1}).mul(1e3).to(at::kLong).remainder(kWords);
        const auto inputs = tokens.narrow(1, 0, kLength), targets = tokens.narrow(1, 1, kLength);
        mine.zero_grad(), theirs.zero_grad();
        const nn::DropoutScope scope({.seed = 3, .step = step});
        const auto expected = at::cross_entropy_loss(one(inputs).flatten(0, 1), targets.flatten());
        expected.backward();
        const auto loss = vocab_parallel_cross_entropy(model(inputs), targets, world.group());
        loss.backward();
        EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
        EXPECT_TRUE(all_close(full_gradients(*model), gradients_of(*one), 1e-11)) << sequence << step;
        mine.step(), theirs.step();
      }
      const auto whole = full_state(*model);
      ASSERT_EQ(whole.size(), names.size());
      for (std::size_t i = 0; i < names.size(); ++i) {
        EXPECT_EQ(whole[i].first, names[i]);
        EXPECT_TRUE(at::allclose(whole[i].second, one->parameters()[i], 1e-11, 1e-11)) << names[i];
      }
    }
  });
}

TEST(ParallelizeModule, samples_and_slices_are_dropped_as_on_one_rank) {
  on_every_rank([](World& world) {
    // With four ranks, half of them share the samples and the other half the features.
    const int tp = world.size() == 4 ? 2 : world.size(), dp = world.size() / tp;
    DeviceMesh mesh(world, {{"dp", dp}, {"tp", tp}});
    struct Net : torch::nn::Module {
      Unit<torch::nn::Linear> up{8, 8}, down{8, 8};
      nn::Dropout drop{0.5};
      Net() { register_module("up", up), register_module("drop", drop), register_module("down", down); }
      at::Tensor forward(const at::Tensor& x) { return down(drop(up(x))); }
    } one, mine;
    for (auto* each : {&one, &mine}) fill_parameters(*each, 90), nn::name_layers(*each);
    parallelize_module(mine, mesh["tp"],
                       {{"up", Colwise{}}, {"drop", SequenceParallel{.dim = -1}}, {"down", Rowwise{}}});
    const auto x = numbers(91, {4, 8});
    const nn::DropoutScope scope({.seed = 1});
    const auto expected = one.forward(x).chunk(dp)[mesh.coordinate("dp")];
    const auto moved = nn::shift_samples(4 / dp * mesh.coordinate("dp"));
    EXPECT_TRUE(at::allclose(mine.forward(x.chunk(dp)[mesh.coordinate("dp")]), expected, 1e-5, 1e-5));
  });
}

TEST(ParallelizeModule, with_data_parallelism_over_the_other_axis_it_trains_as_on_one_rank) {
  on_every_rank([](World& world) {
    const int tp = world.size() == 4 ? 2 : world.size(), dp = world.size() / tp;
    DeviceMesh mesh(world, {{"dp", dp}, {"tp", tp}});
    constexpr std::int64_t kRows = 4;
    const auto begin = kRows / dp * mesh.coordinate("dp");
    Gpt one, model;
    parallelize_module(*model, mesh["tp"], plan_for(true));
    DistributedDataParallel ddp(model, mesh["dp"]);
    torch::optim::SGD mine(model->parameters(), 0.1), theirs(one->parameters(), 0.1);
    for (std::uint64_t step = 0; step < 3; ++step) {
      const auto tokens = numbers(85 + step, {kRows, kLength + 1}).mul(1e3).to(at::kLong).remainder(kWords);
      const auto rows = tokens.narrow(0, begin, kRows / dp);
      mine.zero_grad(), theirs.zero_grad();
      const nn::DropoutScope scope({.seed = 3, .step = step});
      at::cross_entropy_loss(one(tokens.narrow(1, 0, kLength)).flatten(0, 1),
                             tokens.narrow(1, 1, kLength).flatten())
          .backward();
      const auto moved = nn::shift_samples(begin);
      vocab_parallel_cross_entropy(ddp(rows.narrow(1, 0, kLength)), rows.narrow(1, 1, kLength), mesh["tp"])
          .backward();
      mine.step(), theirs.step();
    }
    const auto whole = full_state(*model);
    for (std::size_t i = 0; i < whole.size(); ++i)
      EXPECT_TRUE(at::allclose(whole[i].second, one->parameters()[i], 1e-11, 1e-11)) << whole[i].first;
  });
}

TEST(ParallelizeModule, embeddings_by_columns_and_gathered_outputs) {
  on_every_rank([](World& world) {
    struct Net : torch::nn::Module {
      Unit<torch::nn::Embedding> table{12, 8};
      Unit<torch::nn::Linear> up{8, 24}, last{24, 8};
      Net() {
        register_module("table", table), register_module("up", up), register_module("last", last);
        fill_parameters(*this, 95);
        to(at::kDouble);
      }
      at::Tensor forward(const at::Tensor& i) { return last(up(table(i)).tanh()); }
    } one, mine;
    parallelize_module(mine, world.group(),
                       {{"table", Colwise{.gather_output = true}},
                        {"up", Colwise{.gather_output = true, .parts = 3}},
                        {"l*t", Rowwise{.input_is_parallel = false}}});
    const auto indices = at::tensor({3, 11, 0, 3}, at::kLong);
    const auto expected = one.forward(indices), output = mine.forward(indices);
    expected.square().sum().backward(), output.square().sum().backward();
    EXPECT_TRUE(at::allclose(output, expected, 1e-12, 1e-12));
    EXPECT_TRUE(all_close(full_gradients(mine), gradients_of(one), 1e-12));
    EXPECT_THAT(error_of<ConfigError>([&] { mine.up->forward(doubles(1, {2, 8})).sum().backward(); }),
                HasSubstr("'up' bypassed its Unit"));
  });
}

TEST(ParallelizeModule, a_tied_weight_is_split_once) {
  on_every_rank([](World& world) {
    struct Net : torch::nn::Module {
      Unit<torch::nn::Embedding> words{8, 4};
      Unit<torch::nn::Linear> head{torch::nn::LinearOptions(4, 8).bias(false)};
      explicit Net(bool tied = true) {
        register_module("words", words), register_module("head", head);
        fill_parameters(*this, 97);
        if (tied) head->weight = words->weight;
      }
      at::Tensor forward(const at::Tensor& i) { return head(words(i)); }
    } one, mine;
    EXPECT_THAT(
        error_of<ConfigError>(
            [&] { parallelize_module(mine, world.group(), {{"words", Colwise{}}, {"head", Colwise{}}}); }),
        AllOf(HasSubstr("words.weight"), HasSubstr("head.weight"), HasSubstr("be split differently")));
    parallelize_module(mine, world.group(), {{"words", Rowwise{}}, {"head", Colwise{.gather_output = true}}});
    EXPECT_TRUE(mine.head->weight.is_same(mine.words->weight));
    EXPECT_EQ(mine.words->weight.size(0), 8 / world.size());
    EXPECT_EQ(tensor_shards(mine).size(), 1U);
    const auto indices = at::tensor({3, 7, 0}, at::kLong);
    one.forward(indices).square().sum().backward();
    mine.forward(indices).square().sum().backward();
    EXPECT_TRUE(at::allclose(mine.words->weight.grad(),
                             one.words->weight.grad().chunk(world.size())[world.rank()], 1e-5, 1e-5));
  });
}

TEST(ParallelizeModule, a_child_of_several_sequentials_stays_one) {
  on_every_rank([](World& world) {
    const auto make = [] {
      nn::Linear shared(4, 4);
      torch::nn::Sequential model(shared, torch::nn::Tanh(), shared);
      fill_parameters(*model, 98);
      return model;
    };
    auto one = make(), mine = make();
    EXPECT_EQ(parallelize_module(*mine, world.group(), {{"0", Colwise{.gather_output = true}}}), 1);
    EXPECT_TRUE(mine->ptr(0) == mine->ptr(2));
    EXPECT_TRUE(mine->ptr(0)->as<nn::LinearImpl>());
    const auto x = numbers(99, {3, 4});
    one->forward(x).sum().backward(), mine->forward(x).sum().backward();
    EXPECT_TRUE(at::allclose(mine->forward(x), one->forward(x), 1e-5, 1e-5));
    EXPECT_TRUE(all_close(full_gradients(*mine), gradients_of(*one), 1e-5));
    EXPECT_THAT(error_of<ConfigError>([&] { mine->clone(); }), HasSubstr("cannot be cloned"));
    EXPECT_THAT(error_of<ConfigError>([&] { parallelize_module(*mine, world.group(), {{"2", Rowwise{}}}); }),
                AllOf(HasSubstr("'2'"), HasSubstr("already has")));
  });
}

struct OddImpl : torch::nn::Module {
  torch::nn::Linear plain{8, 8};
  Unit<torch::nn::Linear> odd{7, 5}, good{8, 8};
  Unit<torch::nn::Embedding> normed{torch::nn::EmbeddingOptions(8, 8).max_norm(1.0)};
  torch::nn::Dropout theirs{0.5};
  Unit<torch::nn::Conv2d> conv{torch::nn::Conv2dOptions(4, 4, 1)};
  OddImpl() {
    register_module("plain", plain), register_module("odd", odd), register_module("good", good);
    register_module("normed", normed), register_module("theirs", theirs), register_module("conv", conv);
    fill_parameters(*this, 110);
  }
};
TORCH_MODULE(Odd);

TEST(ParallelizeModule, all_that_is_wrong_is_named_and_nothing_is_changed) {
  on_every_rank([](World& world) {
    auto group = world.group();
    Odd model;
    const auto before = values_of(*model);
    const auto refused = [&](ParallelPlan plan) {
      plan.insert(plan.begin(), {"good", Colwise{}});
      const auto error = error_of<ConfigError>([&] { parallelize_module(*model, group, plan); });
      EXPECT_TRUE(same_bits(values_of(*model), before));
      EXPECT_EQ(detail::slot_of(model->good.get())->attachment, nullptr);
      EXPECT_TRUE(tensor_shards(*model).empty());
      return error;
    };
    EXPECT_THAT(refused({{"plain", Colwise{}}}),
                AllOf(HasSubstr("'plain'"), HasSubstr("lockstep::Unit<torch::nn::Linear>")));
    EXPECT_THAT(refused({{"nowhere.*", Rowwise{}}}),
                AllOf(HasSubstr("'nowhere.*' matches no module"), HasSubstr("good")));
    EXPECT_THAT(refused({{"good", SequenceParallel{}}}),
                AllOf(HasSubstr("'good' is Colwise{} by 'good'"), HasSubstr("SequenceParallel{dim = 1}")));
    EXPECT_THAT(refused({{"go*", Rowwise{.sequence_dim = 1}}}),
                HasSubstr("Rowwise{sequence_dim = 1} by 'go*'"));
    EXPECT_THAT(refused({{"normed", Rowwise{}}}), AllOf(HasSubstr("'normed'"), HasSubstr("max_norm")));
    EXPECT_THAT(refused({{"theirs", SequenceParallel{}}}), HasSubstr("use lockstep::nn::Dropout"));
    EXPECT_THAT(refused({{"conv", Colwise{}}}),
                AllOf(HasSubstr("'conv'"), HasSubstr("Conv2d"), HasSubstr("Linear and Embedding")));
    EXPECT_THAT(refused({{"odd", Colwise{.parts = 0}}}),
                HasSubstr("'odd': expected parts of at least 1, got 0"));
    if (world.size() > 1) {
      EXPECT_THAT(refused({{"odd", Colwise{}}, {"plain", Rowwise{}}}),
                  AllOf(HasSubstr("'odd' has 5 output features"),
                        HasSubstr(fmt::format("{} ranks", world.size())), HasSubstr("'plain'")));
    }
    {  // In a graph.
      const auto alive = model->good(at::ones({1, 8}));
      EXPECT_THAT(refused({}), AllOf(HasSubstr("'good.weight'"), HasSubstr("in use")));
    }
    EXPECT_EQ(parallelize_module(*model, group, {{"good", Colwise{}}, {"g*d", Colwise{}}}), 1);
    EXPECT_THAT(error_of<ConfigError>([&] { parallelize_module(*model, group, {{"good", Colwise{}}}); }),
                AllOf(HasSubstr("'good'"), HasSubstr("already has")));
    EXPECT_THAT(error_of<ConfigError>([&] { model->good->clone(); }), HasSubstr("cannot be cloned"));
  });
}

TEST(ParallelizeModule, ranks_with_other_plans_or_models_are_told_what_differs) {
  on_every_rank([](World& world) {
    if (world.size() == 1) return;
    const bool last = world.rank() + 1 == world.size();
    Odd model;
    const auto error = error_of<ConfigError>(
        [&] { parallelize_module(*model, world.group(), {{"good", Colwise{.gather_output = last}}}); });
    EXPECT_THAT(error,
                AllOf(HasSubstr(fmt::format("On rank {}", world.size() - 1)),
                      HasSubstr("'good' is Colwise{gather_output}"), HasSubstr("rank 0: the plan's 'good'")));
    EXPECT_EQ(model->good->weight.size(0), 8);
    EXPECT_THAT(error_of<ConfigError>([&] {
                  Unit<torch::nn::Linear> fc(8, last ? 16 : 8);
                  parallelize_module(*fc, world.group(), {{"", Colwise{}}});
                }),
                AllOf(HasSubstr("[16, 8]"), HasSubstr("[8, 8]")));
    // Only one rank has a problem.
    EXPECT_THAT(error_of<ConfigError>([&] {
                  Unit<torch::nn::Linear> unit(8, 8);
                  torch::nn::Linear plain(8, 8);
                  parallelize_module(last ? static_cast<torch::nn::Module&>(*plain) : *unit, world.group(),
                                     {{"", Colwise{}}});
                }),
                HasSubstr("plain member"));
  });
}

TEST(FullState, goes_out_whole_and_comes_back_in_slices) {
  on_every_rank([](World& world) {
    Gpt one, model, other;
    parallelize_module(*model, world.group(), plan_for(true));
    parallelize_module(*other, world.group(), plan_for(false));
    fill_parameters(*other, 1);
    const auto state = full_state(*model);
    for (std::size_t i = 0; i < state.size(); ++i)
      EXPECT_TRUE(at::equal(state[i].second, one->parameters()[i]));
    EXPECT_FALSE(same_bits(values_of(*model), values_of(*other)));
    load_full_state(*other, FullState(state.rbegin(), state.rend()));  // In any order.
    EXPECT_TRUE(same_bits(values_of(*model), values_of(*other)));
    const auto shards = tensor_shards(*model);
    EXPECT_EQ(shards.size(), 15U);
    EXPECT_EQ(shards[0].name, "words.weight");
    EXPECT_EQ(shards[2].name, "blocks.0.attention.qkv.weight");
    EXPECT_EQ(shards[2].parts, 3);
    EXPECT_TRUE(shards[2].parameter.is_same(model->named_parameters()["blocks.0.attention.qkv.weight"]));

    auto wrong = state;
    wrong[0].second = at::ones({3, 3});
    wrong.pop_back();
    wrong.emplace_back("strange", at::ones({1}));
    wrong.push_back(wrong[1]);
    const auto before = values_of(*model);
    EXPECT_THAT(
        error_of<ConfigError>([&] { load_full_state(*model, wrong); }),
        AllOf(HasSubstr("'words.weight': expected shape [24, 16], got [3, 3]"),
              HasSubstr("'head.weight' is missing"), HasSubstr("no 'strange'"), HasSubstr("given twice")));
    EXPECT_TRUE(same_bits(values_of(*model), before));
  });
}

TEST(ParallelizeModule, patterns_match_by_components) {
  EXPECT_TRUE(detail::name_matches("a.*.c", "a.b.c"));
  EXPECT_FALSE(detail::name_matches("a.*", "a.b.c"));
  EXPECT_FALSE(detail::name_matches("a.*.c", "a.c"));
  EXPECT_TRUE(detail::name_matches("layer*.*_proj", "layer12.q_proj"));
  EXPECT_FALSE(detail::name_matches("*", "a.b"));
  EXPECT_TRUE(detail::name_matches("", ""));
  EXPECT_FALSE(detail::name_matches("", "a"));
}

}  // namespace
}  // namespace lockstep::testing
