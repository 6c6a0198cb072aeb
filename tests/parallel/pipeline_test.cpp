// Pipelines compared with the same model on one rank: losses, gradients, and weights after steps.
#include <algorithm>
#include <numeric>

#include <lockstep/parallel/pipeline/backward.h>

#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

template <typename E, typename F>
void expect_error(F&& f, const std::string& text) {
  EXPECT_THAT(error_of<E>(f), HasSubstr(text));
}

const auto kLoss = [](const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
};

// Layers of several kinds, in double, so that differences beyond rounding are errors.
struct StageBlockImpl : torch::nn::Module {
  explicit StageBlockImpl(int width)
      : norm(torch::nn::LayerNormOptions({width})), up(width, 3 * width), down(3 * width, width) {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    scale = register_parameter("scale", torch::ones({width}));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(norm(x * scale)))) * scale; }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
  at::Tensor scale;  // Used twice: two paths lead to it.
};
TORCH_MODULE(StageBlock);

constexpr int kStageWidth = 6;

std::vector<PipelineStage> blocks(int count) {
  std::vector<PipelineStage> pieces;
  for (int i = 0; i < count; ++i) {
    StageBlock block(kStageWidth);
    block->to(at::kDouble);
    fill_parameters(*block, 1000 + 10 * static_cast<std::uint64_t>(i));
    pieces.emplace_back(block, "blocks." + std::to_string(i));
  }
  return pieces;
}

at::Tensor batch_of(int seed, std::int64_t samples = 24) {
  return numbers(seed, {samples, kStageWidth}).to(at::kDouble);
}

// The model's gradients by name, for a batch in micro-batches, on one rank.
struct Expected {
  at::Tensor loss, inputs;
  std::map<std::string, at::Tensor> gradients;
};
Expected expected(int pieces, int microbatches, int step = 0) {
  auto model = blocks(pieces);
  double sum = 0;
  const auto whole = batch_of(100 + step).requires_grad_();
  const auto inputs = whole.chunk(microbatches), targets = batch_of(200 + step).chunk(microbatches);
  for (int m = 0; m < microbatches; ++m) {
    StageValues values = {inputs[static_cast<std::size_t>(m)]};
    for (const auto& piece : model) values = piece(values);
    auto loss = kLoss(values[0], targets[static_cast<std::size_t>(m)]) / microbatches;
    sum += loss.item<double>();
    loss.backward();
  }
  Expected result{torch::scalar_tensor(sum, at::kDouble), whole.grad(), {}};
  for (const auto& piece : model)
    for (const auto& item : piece.module()->named_parameters())
      result.gradients[*piece.name() + "." + item.key()] = item.value().grad();
  return result;
}

void expect_gradients(const torch::nn::Module& module, const Expected& expected) {
  const auto parameters = module.named_parameters();
  EXPECT_GT(parameters.size(), 0u);
  for (const auto& item : parameters) {
    ASSERT_TRUE(expected.gradients.contains(item.key())) << item.key();
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_TRUE(torch::allclose(item.value().grad(), expected.gradients.at(item.key()), 1e-12, 1e-14))
        << item.key();
  }
}

int stages_per_rank(const std::string& name) {
  return make_schedule(name, {.ranks = 2, .microbatches = 4}).num_stages() / 2;
}

TEST(Pipeline, every_schedule_gives_the_gradients_of_one_rank) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for (const auto& name : schedule_names()) {
      SCOPED_TRACE(name);
      const int microbatches = 2 * group.size() * (24 % (2 * group.size()) == 0 ? 1 : 2);
      const int pieces = stages_per_rank(name) * group.size() + 1;
      Pipeline pipeline(blocks(pieces), group, ScheduleNamed{name, microbatches});
      EXPECT_EQ(std::accumulate(pipeline.cut().begin(), pipeline.cut().end(), 0), pieces);
      for (int step = 0; step < 2; ++step) {
        const auto expect = expected(pieces, microbatches, step);
        for (auto& parameter : pipeline.parameters()) parameter.mutable_grad().reset();
        const auto inputs = batch_of(100 + step).requires_grad_();  // A leaf may require a gradient.
        const auto loss = pipeline.step(inputs, batch_of(200 + step), kLoss);
        EXPECT_EQ(inputs.grad().defined(), pipeline.is_first());
        if (pipeline.is_first()) {
          EXPECT_TRUE(torch::allclose(inputs.grad(), expect.inputs, 1e-12, 1e-14));
        }
        EXPECT_EQ(loss.defined(), pipeline.is_last());
        EXPECT_NEAR(pipeline.loss().item<double>(), expect.loss.item<double>(), 1e-13);
        expect_gradients(*pipeline.module(), expect);
      }
      EXPECT_EQ(pipeline.moments().size(),
                pipeline.schedule().ranks[static_cast<std::size_t>(group.rank())].size());
    }
  });
}

TEST(Pipeline, a_world_of_one_and_more_pieces_than_stages_work) {
  on_every_rank([](World& world) {
    auto alone = world.group().subgroup({world.rank()});
    Pipeline pipeline(blocks(3), alone, Schedule1F1B{.num_microbatches = 4});
    pipeline.step(batch_of(100), batch_of(200), kLoss);
    expect_gradients(*pipeline.module(), expected(3, 4));
    EXPECT_TRUE(pipeline.is_first() && pipeline.is_last());
  });
}

TEST(Pipeline, a_stage_may_have_no_weights) {
  on_every_rank([](World& world) {
    const auto pieces_of = [&] {
      auto pieces = blocks(world.size());
      pieces.insert(pieces.begin() + (world.size() > 1 ? 1 : 0), PipelineStage(torch::nn::Tanh(), "tanh"));
      return pieces;
    };
    auto whole = pieces_of();
    StageValues values = {batch_of(100)};
    for (const auto& piece : whole) values = piece(values);
    kLoss(values[0], batch_of(200)).backward();
    std::vector<int> cut(static_cast<std::size_t>(world.size()), 1);
    cut.back() = 2;
    Pipeline pipeline(pieces_of(), world.group(), ScheduleGPipe{.num_microbatches = 4}, {.cut = cut});
    pipeline.step(batch_of(100), batch_of(200), kLoss);
    if (world.rank() == 1 && world.size() > 2) {
      EXPECT_TRUE(pipeline.parameters().empty());
    }
    const auto here = pipeline.module()->named_parameters();
    for (const auto& piece : whole)
      for (const auto& item : piece.module()->named_parameters())
        if (const auto* found = here.find(*piece.name() + "." + item.key())) {
          EXPECT_TRUE(at::allclose(found->grad(), item.value().grad(), 1e-10, 1e-12)) << item.key();
        }
  });
}

TEST(Pipeline, only_the_first_and_the_last_rank_need_data) {
  on_every_rank([](World& world) {
    Pipeline pipeline(blocks(world.size()), world.group(), ScheduleGPipe{.num_microbatches = 2});
    const at::Tensor none;
    pipeline.step(pipeline.is_first() ? batch_of(100) : none, pipeline.is_last() ? batch_of(200) : none,
                  kLoss);
    expect_gradients(*pipeline.module(), expected(world.size(), 2));
    if (!pipeline.is_first() && !pipeline.is_last()) {
      pipeline.step({}, {}, kLoss);
    } else {
      pipeline.step(batch_of(100), batch_of(200), kLoss);
    }
  });
}

TEST(Pipeline, evaluation_leaves_no_gradients_and_gives_outputs) {
  on_every_rank([](World& world) {
    Pipeline pipeline(blocks(world.size()), world.group(), Schedule1F1B{.num_microbatches = 4});
    const auto loss = pipeline.evaluate(batch_of(100), batch_of(200), kLoss);
    EXPECT_NEAR(pipeline.loss().item<double>(), expected(world.size(), 4).loss.item<double>(), 1e-13);
    const auto outputs = pipeline.forward(batch_of(100));
    for (const auto& parameter : pipeline.parameters()) EXPECT_FALSE(parameter.grad().defined());
    if (!pipeline.is_last()) {
      EXPECT_TRUE(outputs.empty());
      EXPECT_FALSE(loss.defined());
      return;
    }
    StageValues values = {batch_of(100)};
    for (const auto& piece : blocks(world.size())) values = piece(values);
    ASSERT_EQ(outputs.size(), 1u);
    EXPECT_TRUE(torch::allclose(outputs[0], values[0], 1e-12, 1e-14));
    EXPECT_FALSE(outputs[0].requires_grad());
  });
}

// Two tensors, an optional, and an integer tensor without a gradient.
struct WideningImpl : torch::nn::Module {
  explicit WideningImpl(bool gives_mask) : linear(kStageWidth, kStageWidth), with_mask(gives_mask) {
    register_module("linear", linear);
    to(at::kDouble);
  }
  std::tuple<at::Tensor, std::optional<at::Tensor>, std::vector<at::Tensor>> forward(const at::Tensor& x) {
    const auto y = linear(x);
    return {y, with_mask ? std::optional(x.gt(0)) : std::nullopt, {y.tanh(), y.transpose(0, 1)}};
  }
  torch::nn::Linear linear;
  bool with_mask;
};
TORCH_MODULE(Widening);
struct NarrowingImpl : torch::nn::Module {
  NarrowingImpl() : linear(kStageWidth, kStageWidth) {
    register_module("linear", linear);
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x, const std::optional<at::Tensor>& mask,
                     const std::vector<at::Tensor>& others) {
    auto sum = x + others.at(0) * 2 + others.at(1).transpose(0, 1).exp();
    if (mask) sum = sum * mask->to(at::kDouble);
    return linear(sum);
  }
  torch::nn::Linear linear;
};
TORCH_MODULE(Narrowing);

TEST(Pipeline, tuples_optionals_and_vectors_go_between_stages) {
  on_every_rank([](World& world) {
    if (world.size() != 2) return;
    for (const bool mask : {true, false})
      for (const char* name : {"1f1b", "zbh1"}) {
        Widening first(mask);
        Narrowing second;
        fill_parameters(*first, 30);
        fill_parameters(*second, 40);
        const auto inputs = batch_of(1), targets = batch_of(2);
        for (int m = 0; m < 2; ++m) {
          const auto [a, b, c] = first->forward(inputs.narrow(0, 12 * m, 12));
          (kLoss(second->forward(a, b, c), targets.narrow(0, 12 * m, 12)) / 2).backward();
        }
        std::map<std::string, at::Tensor> expect;
        for (const auto& item : first->named_parameters())
          expect["0." + item.key()] = item.value().grad().clone();
        for (const auto& item : second->named_parameters())
          expect["1." + item.key()] = item.value().grad().clone();
        first->zero_grad();
        second->zero_grad();
        Pipeline pipeline({first, second}, world.group(), ScheduleNamed{name, 2});
        pipeline.step(inputs, targets, kLoss);
        for (const auto& item : pipeline.module()->named_parameters())
          EXPECT_TRUE(torch::allclose(item.value().grad(), expect.at(item.key()), 1e-12, 1e-14))
              << item.key();
      }
  });
}

TEST(Pipeline, shapes_may_change_from_step_to_step) {
  on_every_rank([](World& world) {
    Pipeline pipeline(blocks(world.size()), world.group(), Schedule1F1B{.num_microbatches = 2});
    for (const std::int64_t samples : {4, 16, 2}) {
      const auto inputs = batch_of(100, samples).unsqueeze(1).expand({-1, samples, -1});
      pipeline.step(inputs, inputs, kLoss);
      EXPECT_GT(pipeline.loss().item<double>(), 0);
    }
  });
}

// Embedding and head share their weight.
struct TokensImpl : torch::nn::Module {
  TokensImpl() : table(10, kStageWidth) {
    register_module("table", table);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& tokens) { return table(tokens); }
  torch::nn::Embedding table;
};
TORCH_MODULE(Tokens);
struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(at::Tensor weight) : table(register_parameter("table", std::move(weight))) {}
  at::Tensor forward(const at::Tensor& x) { return torch::matmul(x, table.t()); }
  at::Tensor table;
};
TORCH_MODULE(Head);

TEST(Pipeline, weights_that_stages_share_stay_equal) {
  const auto loss_of = [](const at::Tensor& output, const at::Tensor& target) {
    return torch::nn::functional::cross_entropy(output.flatten(0, 1), target.flatten());
  };
  on_every_rank([&](World& world) {
    const auto tokens = torch::arange(40).view({8, 5}).remainder(10), targets = tokens.flip(1);
    const auto pieces = [&] {
      Tokens first;
      fill_parameters(*first, 60);
      auto between = blocks(2 * world.size());
      std::vector<PipelineStage> all = {{first, ""}};
      all.insert(all.end(), between.begin(), between.end());
      all.emplace_back(Head(first->table->weight), "head");
      return all;
    };
    for (const char* name : {"1f1b", "zbv"}) {
      // On one rank, for comparison.
      auto alone = world.group().subgroup({world.rank()});
      Pipeline whole(pieces(), alone, ScheduleGPipe{.num_microbatches = 4});
      Pipeline pipeline(pieces(), world.group(), ScheduleNamed{name, 2 * world.size() > 4 ? 8 : 4});
      SGD expect(whole.parameters(), {.lr = 0.5}), optimizer(pipeline.parameters(), {.lr = 0.5});
      for (int step = 0; step < 3; ++step) {
        expect.zero_grad();
        optimizer.zero_grad();
        whole.step(tokens, targets, loss_of);
        pipeline.step(tokens, targets, loss_of);
        expect.step();
        optimizer.step();
        EXPECT_NEAR(pipeline.loss().item<double>(), whole.loss().item<double>(), 1e-12);
      }
      const auto names = whole.module()->named_parameters();
      for (const auto& item : pipeline.module()->named_parameters())
        EXPECT_TRUE(torch::allclose(item.value(), names[item.key()], 1e-11, 1e-13)) << item.key();
      // Each weight has exactly one owner.
      double owned = 0;
      for (const auto& weight : pipeline.own_parameters()) owned += static_cast<double>(weight.numel());
      const auto all = world.group().all_gather_values(owned);
      double expected_total = 0;
      for (const auto& weight : whole.parameters()) expected_total += static_cast<double>(weight.numel());
      EXPECT_EQ(std::accumulate(all.begin(), all.end(), 0.0), expected_total);
    }
  });
}

TEST(Pipeline, a_schedule_from_a_file_runs) {
  on_every_rank([](World& world) {
    const auto text =
        to_csv(make_schedule("zbh1", {.ranks = world.size(), .microbatches = 2 * world.size()}));
    Pipeline pipeline(blocks(world.size()), world.group(), schedule_from_csv(text, "mine"));
    const auto samples = static_cast<std::int64_t>(4 * world.size());
    pipeline.step(batch_of(100, samples), batch_of(200, samples), kLoss);
    for (const auto& parameter : pipeline.parameters()) EXPECT_TRUE(parameter.grad().defined());
  });
}

TEST(Pipeline, a_sequential_is_cut_by_its_children) {
  on_every_rank([](World& world) {
    torch::nn::Sequential model;
    for (int i = 0; i < world.size(); ++i) {
      model->push_back(torch::nn::Linear(kStageWidth, kStageWidth));
      model->push_back(torch::nn::Functional(torch::tanh));
    }
    model->to(at::kDouble);
    fill_parameters(*model, 70);
    Pipeline pipeline(model, world.group(), ScheduleZBH1{.num_microbatches = 4},
                      {.balance = PipelineBalance::pieces});
    EXPECT_EQ(pipeline.cut(), std::vector<int>(static_cast<std::size_t>(world.size()), 2));
    pipeline.step(batch_of(100), batch_of(200), kLoss);
    std::map<std::string, at::Tensor> piped;
    for (const auto& item : pipeline.module()->named_parameters())
      piped[item.key()] = item.value().grad().clone();
    model->zero_grad();
    kLoss(model->forward(batch_of(100)), batch_of(200)).backward();
    EXPECT_EQ(piped.size(), 2u);
    for (const auto& [name, gradient] : piped)
      EXPECT_TRUE(torch::allclose(gradient, model->named_parameters()[name].grad(), 1e-12, 1e-14)) << name;
  });
}

TEST(Pipeline, measured_pieces_are_balanced_by_time) {
  on_every_rank([](World& world) {
    if (world.size() != 2) return;
    // The first piece takes as long as all other pieces together.
    torch::nn::Sequential model(torch::nn::Functional([](const at::Tensor& x) {
      auto big = torch::ones({300, 300}, at::kDouble);
      for (int i = 0; i < 20; ++i) big = big.mm(torch::eye(300, at::kDouble));
      return x * big[0][0];
    }));
    for (int i = 0; i < 4; ++i) model->push_back(torch::nn::Linear(kStageWidth, kStageWidth));
    model->to(at::kDouble);
    Pipeline pipeline(model, world.group(), Schedule1F1B{.num_microbatches = 2},
                      {.balance = PipelineBalance::time, .sample = {batch_of(1)}});
    EXPECT_EQ(pipeline.cut(), (std::vector<int>{1, 4}));
    for (const auto& parameter : pipeline.parameters()) EXPECT_FALSE(parameter.grad().defined());
  });
}

// Throws on request.
struct FragileImpl : torch::nn::Module {
  FragileImpl() : linear(kStageWidth, kStageWidth) {
    register_module("linear", linear);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (fails_at == calls++) throw std::logic_error("this stage is tired");
    auto y = linear(x);
    if (backward_fails)
      y.register_hook([](const at::Tensor& g) -> at::Tensor {
        throw std::logic_error("backward is tired");
        return g;
      });
    return y;
  }
  torch::nn::Linear linear;
  int calls = 0, fails_at = -1;
  bool backward_fails = false;
};
TORCH_MODULE(Fragile);

TEST(Pipeline, a_stage_that_throws_is_known_to_every_rank_and_the_next_step_works) {
  on_every_rank([](World& world) {
    for (const auto& name : schedule_names())
      for (int victim = 0; victim < stages_per_rank(name) * world.size(); ++victim)
        for (const bool in_backward : {false, true}) {
          SCOPED_TRACE(name + " " + std::to_string(victim) + (in_backward ? " backward" : " forward"));
          const int stages = stages_per_rank(name) * world.size();
          std::vector<Fragile> modules;
          std::vector<PipelineStage> pieces;
          for (int i = 0; i < stages; ++i) {
            pieces.emplace_back(modules.emplace_back());
            fill_parameters(*modules.back(), 80);
          }
          Pipeline pipeline(pieces, world.group(), ScheduleNamed{name, 2 * world.size()});
          const auto samples = 4 * world.size();
          const auto step = [&] { pipeline.step(batch_of(1, samples), batch_of(2, samples), kLoss); };
          step();
          auto& chosen = *modules[static_cast<std::size_t>(victim)];
          chosen.calls = 0;
          if (in_backward)
            chosen.backward_fails = true;
          else
            chosen.fails_at = 1;
          const bool is_mine =
              pipeline.schedule().rank_of_stage[static_cast<std::size_t>(victim)] == world.rank();
          if (is_mine)
            EXPECT_THROW(step(), std::logic_error);
          else
            expect_error<Error>(step, "stage " + std::to_string(victim));
          EXPECT_THROW(pipeline.loss(), ConfigError);
          chosen.backward_fails = false;
          chosen.fails_at = -1;
          step();
          EXPECT_GT(pipeline.loss().item<double>(), 0);
        }
  });
}

TEST(Pipeline, a_batch_that_does_not_divide_is_everybodys_error) {
  on_every_rank([](World& world) {
    Pipeline pipeline(blocks(world.size()), world.group(), Schedule1F1B{.num_microbatches = 4});
    const auto wrong = [&] { pipeline.step(batch_of(1, 10), batch_of(2, 12), kLoss); };
    if (pipeline.is_first())
      expect_error<ConfigError>(wrong, "inputs of 10 samples cannot be divided into 4 micro-batches");
    else
      expect_error<Error>(wrong, "rank 0: inputs of 10 samples");
    if (world.size() > 1 && pipeline.is_last()) {
      EXPECT_THROW(pipeline.step(batch_of(1, 12), batch_of(2, 10), kLoss), ConfigError);
    } else if (world.size() > 1) {
      expect_error<Error>([&] { pipeline.step(batch_of(1, 12), batch_of(2, 10), kLoss); },
                          "targets of 10 samples");
    }
    pipeline.step(batch_of(1, 12), batch_of(2, 12), kLoss);
    // Outputs and targets of different sizes.
    EXPECT_ANY_THROW(pipeline.step(batch_of(1, 12), batch_of(2, 12),
                                   [](const at::Tensor& output, const at::Tensor&) { return output; }));
  });
}

TEST(Pipeline, what_cannot_be_is_refused) {
  on_every_rank([](World& world) {
    auto group = world.group();
    const int n = world.size();
    expect_error<ConfigError>([&] { Pipeline(blocks(n), group, ScheduleNamed{"2f2b", 4}); }, "2f2b");
    expect_error<ConfigError>([&] { Pipeline(blocks(n), group, Schedule1F1B{.num_microbatches = 0}); }, "0");
    expect_error<ConfigError>(
        [&] { Pipeline(blocks(n), group, ScheduleZBVZeroBubble{.num_microbatches = 2 * n}); },
        "needs at least one for each of " + std::to_string(2 * n) + " stages");
    expect_error<ConfigError>(
        [&] { Pipeline(blocks(n), group, make_schedule("gpipe", {.ranks = n + 1, .microbatches = 2})); },
        "is for " + std::to_string(n + 1) + " ranks");
    expect_error<ConfigError>(
        [&] { Pipeline(blocks(n), group, Schedule1F1B{.num_microbatches = 2}, {.cut = {n, 1}}); },
        "PipelineOptions::cut: expected");
    expect_error<ConfigError>(
        [&] {
          Pipeline(blocks(n + 1), group, Schedule1F1B{.num_microbatches = 2},
                   {.balance = PipelineBalance::time});
        },
        "sample");
    auto broken = make_schedule("1f1b", {.ranks = n, .microbatches = 2});
    std::swap(broken.ranks[0].front(), broken.ranks[0].back());
    EXPECT_THROW(Pipeline(blocks(n), group, broken), ConfigError);
    auto twins = blocks(n);
    twins.emplace_back(StageBlock(kStageWidth), "blocks.0");
    if (n == 1) expect_error<ConfigError>([&] { Pipeline(twins, group, ScheduleGPipe{}); }, "two pieces");
    if (n == 1) return;
    // Ranks that disagree.
    expect_error<ConfigError>(
        [&] { Pipeline(blocks(n), group, Schedule1F1B{.num_microbatches = world.rank() == 1 ? 4 : 2}); },
        "differ");
    expect_error<ConfigError>([&] { Pipeline(blocks(n + world.rank()), group, ScheduleGPipe{}); }, "differ");
  });
}

TEST(Pipeline, its_gradients_are_averaged_over_replicas) {
  on_every_rank([](World& world) {
    if (world.size() != 4) return;
    DeviceMesh mesh(world, {{"dp", 2}, {"pp", 2}});
    for (const char* name : {"1f1b", "zbv"}) {
      const int pieces = 2 * stages_per_rank(name);
      Pipeline pipeline(blocks(pieces), mesh["pp"], ScheduleNamed{name, 4});
      // Averages once after all passes, or by hooks in each pass. If the schedule splits backward, each pass
      // covers only part of the parameters.
      for (const bool once : {true, false}) {
        DistributedDataParallel ddp(pipeline.module(), mesh["dp"],
                                    {.find_unused_parameters = !once, .reduce_in_backward = !once});
        for (int step = 0; step < 3; ++step) {
          for (auto& parameter : pipeline.parameters()) parameter.mutable_grad().reset();
          const auto half = 12 * mesh.coordinate("dp");
          pipeline.step(batch_of(100 + step).narrow(0, half, 12), batch_of(200 + step).narrow(0, half, 12),
                        kLoss);
          if (once) ddp.reduce();
          expect_gradients(*pipeline.module(), expected(pieces, 8, step));
        }
      }
    }
  });
}

TEST(Pipeline, a_loss_that_throws_is_everybodys_error) {
  on_every_rank([](World& world) {
    Pipeline pipeline(blocks(world.size()), world.group(), Schedule1F1B{.num_microbatches = 4});
    int calls = 0;
    const auto loss = [&](const at::Tensor& output, const at::Tensor& target) {
      if (++calls == 3) throw std::logic_error("no loss today");
      return kLoss(output, target);
    };
    if (pipeline.is_last())
      EXPECT_THROW(pipeline.step(batch_of(1), batch_of(2), loss), std::logic_error);
    else
      expect_error<Error>([&] { pipeline.step(batch_of(1), batch_of(2), loss); },
                          "micro-batch 2: no loss today");
    pipeline.step(batch_of(1), batch_of(2), loss);
    // A module may be the loss too, and a callable may change its own state.
    pipeline.step(batch_of(1), batch_of(2), torch::nn::MSELoss());
    pipeline.step(batch_of(1), batch_of(2),
                  [n = 0](const at::Tensor& y, const at::Tensor& t) mutable { return kLoss(y, t) * ++n; });
  });
}

struct SparseImpl : torch::nn::Module {
  SparseImpl() : linear(kStageWidth, kStageWidth) {
    register_module("linear", linear);
    to(at::kDouble);
    fill_parameters(*this, 90);
  }
  at::Tensor forward(const at::Tensor& x) { return sparse ? linear(x).to_sparse() : linear(x); }
  torch::nn::Linear linear;
  bool sparse = false;
};
TORCH_MODULE(Sparse);

TEST(Pipeline, what_cannot_be_handed_on_is_everybodys_error) {
  on_every_rank([](World& world) {
    if (world.size() != 2) return;
    Sparse first;
    auto pieces = blocks(2);
    pieces[0] = {first, "first"};
    Pipeline pipeline(pieces, world.group(), Schedule1F1B{.num_microbatches = 4});
    first->sparse = true;
    for (int i = 0; i < 2; ++i) {
      const auto step = [&] { pipeline.step(batch_of(1), batch_of(2), kLoss); };
      EXPECT_THAT(error_of<Error>(step), HasSubstr("only dense ones are supported"));
    }
    first->sparse = false;
    pipeline.step(batch_of(1), batch_of(2), kLoss);
    EXPECT_GT(pipeline.loss().item<double>(), 0);
  });
}

TEST(Pipeline, gradients_are_added_to_those_that_are_there) {
  on_every_rank([](World& world) {
    const auto tokens = torch::arange(40).view({8, 5}).remainder(10);
    const auto loss_of = [](const at::Tensor& output, const at::Tensor& target) {
      return torch::nn::functional::cross_entropy(output.flatten(0, 1), target.flatten());
    };
    const auto pieces = [&](bool same) {
      Tokens first;
      // Ranks that started with different values get the first rank's.
      fill_parameters(*first, 60 + (same ? 0 : static_cast<std::uint64_t>(world.rank())));
      std::vector<PipelineStage> all = {{first, ""}};
      for (const auto& each : blocks(world.size())) all.push_back(each);
      all.emplace_back(Head(first->table->weight), "head");
      return all;
    };
    auto alone = world.group().subgroup({world.rank()});
    Pipeline whole(pieces(true), alone, ScheduleGPipe{.num_microbatches = 4}),
        pipeline(pieces(false), world.group(), Schedule1F1B{.num_microbatches = 4});
    for (int step = 0; step < 3; ++step) {
      whole.step(tokens, tokens.flip(1), loss_of);
      pipeline.step(tokens, tokens.flip(1), loss_of);
    }
    const auto names = whole.module()->named_parameters();
    for (const auto& item : pipeline.module()->named_parameters())
      EXPECT_TRUE(torch::allclose(item.value().grad(), names[item.key()].grad(), 1e-11, 1e-13)) << item.key();
    // A weight that no stage uses has no gradient.
    auto unused = pieces(true);
    const auto weight = torch::ones({2}, torch::TensorOptions().requires_grad(true));
    for (auto* each : {&unused.front(), &unused.back()}) each->module()->register_parameter("unused", weight);
    unused.front() = {std::dynamic_pointer_cast<TokensImpl>(unused.front().module()), "first"};
    Pipeline other(unused, world.group(), Schedule1F1B{.num_microbatches = 4});
    other.step(tokens, tokens.flip(1), loss_of);
    EXPECT_FALSE(weight.grad().defined());
  });
}

// Changes its input in place.
struct HastyImpl : torch::nn::Module {
  HastyImpl() : linear(kStageWidth, kStageWidth) {
    register_module("linear", linear);
    to(at::kDouble);
    fill_parameters(*this, 95);
  }
  at::Tensor forward(at::Tensor x) { return linear(x.relu_()); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Hasty);

TEST(Pipeline, a_stage_may_begin_in_place) {
  on_every_rank([](World& world) {
    for (const char* name : {"1f1b", "zbv"}) {
      std::vector<Hasty> modules(static_cast<std::size_t>(2 * world.size()));
      const std::vector<PipelineStage> pieces(modules.begin(), modules.end());
      Pipeline pipeline(pieces, world.group(), ScheduleNamed{name, 2 * world.size()});
      const auto samples = 4 * world.size();
      pipeline.step(batch_of(1, samples), batch_of(2, samples), kLoss);
      std::map<std::string, at::Tensor> piped;
      for (const auto& item : pipeline.module()->named_parameters())
        piped[item.key()] = item.value().grad().clone();
      auto x = batch_of(1, samples);
      for (auto& each : modules) {
        each->zero_grad();
        x = each(x);
      }
      kLoss(x, batch_of(2, samples)).backward();
      for (const auto& [key, gradient] : piped) {
        const auto expect =
            modules[static_cast<std::size_t>(key[0] - '0')]->named_parameters()[key.substr(2)].grad();
        EXPECT_TRUE(torch::allclose(gradient, expect, 1e-12, 1e-14)) << name << " " << key;
      }
    }
  });
}

TEST(Pipeline, inputs_with_a_graph_are_refused) {
  on_every_rank([](World& world) {
    Pipeline pipeline(blocks(world.size()), world.group(), Schedule1F1B{.num_microbatches = 4});
    const auto inputs = batch_of(1).requires_grad_() * 2;
    EXPECT_THAT(error_of<Error>([&] { pipeline.step(inputs, batch_of(2), kLoss); }),
                HasSubstr("Move that computation"));
  });
}

TEST(Pipeline, evaluation_mode_reaches_every_piece) {
  on_every_rank([](World& world) {
    auto pieces = blocks(world.size());
    StageBlock first(kStageWidth);
    first->to(at::kDouble);
    pieces[0] = {first, ""};
    Pipeline pipeline(pieces, world.group(), Schedule1F1B{.num_microbatches = 4});
    pipeline.module()->eval();
    EXPECT_EQ(first->is_training(), !pipeline.is_first());
  });
}

TEST(Pipeline, measuring_leaves_no_trace) {
  on_every_rank([](World& world) {
    torch::nn::Sequential model;
    for (int i = 0; i < world.size() + 1; ++i) model->push_back(torch::nn::BatchNorm1d(kStageWidth));
    model->to(at::kDouble);
    Pipeline pipeline(model, world.group(), Schedule1F1B{.num_microbatches = 2},
                      {.balance = PipelineBalance::time, .sample = {batch_of(1)}, .agree = world.group()});
    for (const auto& item : model->named_buffers())
      EXPECT_TRUE(!item.key().ends_with("tracked") || item.value().item<int>() == 0) << item.key();
  });
}

TEST(Pipeline, what_only_one_rank_has_wrong_is_everybodys_error) {
  on_every_rank([](World& world) {
    const int n = world.size();
    if (n == 1) return;
    auto group = world.group();
    expect_error<ConfigError>(
        [&] { Pipeline(blocks(n), group, Schedule1F1B{.num_microbatches = world.rank() == 1 ? 0 : 2}); },
        "differ");
    auto twins = blocks(n + 1);
    twins.back() = {StageBlock(kStageWidth), "blocks.0"};
    expect_error<ConfigError>([&] { Pipeline(twins, group, ScheduleGPipe{}); }, "two pieces");
    twins.back() = {StageBlock(kStageWidth), "blocks"};
    expect_error<ConfigError>([&] { Pipeline(twins, group, ScheduleGPipe{}); },
                              "would be inside piece 'blocks'");
    // Weights that are shared on some ranks only.
    Tokens first;
    first->to(at::kDouble);
    auto tied = blocks(n);
    tied.front() = {first, "first"};
    tied.back() = {Head(world.rank() == 0 ? first->table->weight : first->table->weight.detach().clone()),
                   "head"};
    expect_error<ConfigError>([&] { Pipeline(tied, group, ScheduleGPipe{}); }, "differ");
    // A schedule without actions.
    EXPECT_THROW(
        Pipeline(blocks(n), group,
                 PipelineSchedule{.name = "none", .microbatches = 0, .rank_of_stage = {}, .ranks = {}}),
        ConfigError);
  });
}

TEST(Pipeline, weights_may_come_before_the_gradient_is_sent) {
  on_every_rank([](World& world) {
    if (world.size() != 2) return;
    const auto schedule =
        schedule_from_csv("0F0,0SEND_F0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,1I0,1W0,1SEND_B0\n", "late");
    Pipeline pipeline(blocks(2), world.group(), schedule);
    pipeline.step(batch_of(100), batch_of(200), kLoss);
    expect_gradients(*pipeline.module(), expected(2, 1));
  });
}

// Compares both parts with a whole pass, when paths to weights cross, hooks change gradients, and some
// outputs lead to no input.
TEST(PipelineBackward, the_parts_give_what_the_whole_gives) {
  const auto run = [](bool parts) {
    auto x = numbers(1, {3, 4}).requires_grad_(), w = numbers(2, {4, 4}).requires_grad_(),
         shared = numbers(3, {4}).requires_grad_(), apart = numbers(4, {4}).requires_grad_();
    const auto a = (x * shared).mm(w);
    a.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
    const auto b = a.tanh() + shared;
    b.retain_grad();
    const auto only_weights = apart.exp();
    only_weights.register_hook([](const at::Tensor& gradient) { return gradient * 0.1; });
    const std::vector<at::Tensor> outputs = {b * 2, only_weights, x.detach()},
                                  gradients = {at::ones_like(b), at::ones_like(apart), {}};
    detail::PipelineBackward pass(outputs, gradients, {x});
    if (parts) {
      pass.input_part();
      EXPECT_TRUE(x.grad().defined());
      EXPECT_FALSE(w.grad().defined());
      pass.weight_part();
    } else {
      pass.whole();
    }
    return std::vector<at::Tensor>{x.grad(), w.grad(), shared.grad(), apart.grad(), b.grad()};
  };
  const auto whole = run(false), parts = run(true);
  for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(torch::equal(whole[i], parts[i])) << i;
}

}  // namespace
}  // namespace lockstep::testing
