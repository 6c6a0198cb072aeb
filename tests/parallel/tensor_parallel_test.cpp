// Tensor parallelism: regions, layers and the loss, each compared with one rank's.
#include <mutex>

#include <lockstep/nn/linear.h>
#include <lockstep/parallel/tensor_parallel.h>

#include "parallel/models.h"
#include "parallel/tensor_parallel_models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

TEST(TensorParallel, regions_are_one_anothers_adjoint) {
  on_every_rank([](World& world) {
    auto group = world.group();
    const auto size = world.size(), rank = world.rank();
    const auto x = doubles(1, {4, 8, 4}), y = doubles(2 + rank, {4, 8, 4});
    const auto own = [&](const at::Tensor& t, std::int64_t dim) { return t.chunk(size, dim)[rank]; };
    const auto total = [&](at::Tensor t) {
      t = t.clone();
      group.all_reduce(t).wait();
      return t;
    };
    for (const std::int64_t dim : {0, 1, 2, -1}) {
      EXPECT_TRUE(at::equal(gather_from_group(own(x, dim), group, dim), x));
      EXPECT_TRUE(at::equal(gather_sequence(own(x, dim), group, dim), x));
      EXPECT_TRUE(at::equal(scatter_to_group(x, group, dim), own(x, dim)));
      EXPECT_TRUE(at::allclose(reduce_scatter_sequence(y, group, dim), own(total(y), dim), 1e-12));
    }
    EXPECT_TRUE(copy_to_group(x, group).is_same(x));  // No gradient is required.
    EXPECT_TRUE(at::allclose(reduce_from_group(y, group), total(y), 1e-12));

    // Gradients, with a weight that differs between ranks if split work uses the result.
    const auto grad = [&](const at::Tensor& value, const auto& function, const at::Tensor& weight) {
      auto leaf = value.detach().clone().requires_grad_();
      (function(leaf) * weight).sum().backward();
      return leaf.grad();
    };
    const auto copied = grad(x, [&](auto t) { return copy_to_group(t, group); }, y);
    EXPECT_TRUE(at::allclose(copied, total(y), 1e-12));
    const auto reduced = grad(y, [&](auto t) { return reduce_from_group(t, group); }, x);
    EXPECT_TRUE(at::equal(reduced, x));
    for (const std::int64_t dim : {0, 1, -1}) {
      EXPECT_TRUE(at::equal(
          grad(own(x, dim), [&](auto t) { return gather_from_group(t, group, dim); }, x), own(x, dim)));
      EXPECT_TRUE(
          at::equal(grad(x, [&](auto t) { return scatter_to_group(t, group, dim); }, own(x, dim)), x));
      EXPECT_TRUE(at::allclose(grad(
                                   own(x, dim), [&](auto t) { return gather_sequence(t, group, dim); }, y),
                               own(total(y), dim), 1e-12));
      EXPECT_TRUE(
          at::equal(grad(y, [&](auto t) { return reduce_scatter_sequence(t, group, dim); }, own(x, dim)), x));
    }

    if (size == 1) {  // The same tensor.
      for (const auto& same :
           {reduce_from_group(x, group), gather_sequence(x, group), scatter_to_group(x, group)})
        EXPECT_TRUE(same.is_same(x));
      return;
    }
    EXPECT_THAT(error_of<ConfigError>([&] { scatter_to_group(at::ones({2, 5}), group, 1); }),
                AllOf(HasSubstr("[2, 5]"), HasSubstr("5 is not divisible")));
    EXPECT_THAT(error_of<ConfigError>([&] { gather_from_group(x, group, 3); }), HasSubstr("dimension 3"));
    auto leaf = x.clone().requires_grad_();
    const auto sum = copy_to_group(leaf, group).square().sum();
    EXPECT_THAT(error_of<ConfigError>([&] { torch::autograd::grad({sum}, {leaf}, {}, true, true); }),
                HasSubstr("create_graph"));
  });
}

TEST(TensorParallel, what_autograd_keeps_is_not_reduced_over) {
  on_every_rank([](World& world) {
    auto x = doubles(3 + world.rank(), {6}).requires_grad_();
    const auto kept = x.tanh();  // Its backward needs the result.
    reduce_from_group(kept, world.group()).sum().backward();
    EXPECT_TRUE(at::allclose(x.grad(), 1 - x.tanh().square(), 1e-12));
  });
}

TEST(TensorParallel, first_values_are_one_ranks_and_so_is_the_generator_after) {
  on_every_rank([](World& world) {
    static std::mutex generator;  // Ranks that are threads share one generator.
    const std::lock_guard lock(generator);
    auto group = world.group();
    const auto size = world.size(), rank = world.rank();
    const auto rows = [&](const at::Tensor& t) { return t.chunk(size, 0)[rank]; };
    torch::manual_seed(5);
    const torch::nn::Linear fc(8, 12), down(12, 8);
    const torch::nn::Embedding table(torch::nn::EmbeddingOptions(16, 6).padding_idx(3));
    const auto after = at::rand({4});
    torch::manual_seed(5);
    const ColumnParallelLinear column(8, 12, group);
    const RowParallelLinear row(12, 8, group);
    const VocabParallelEmbedding vocab(16, 6, group, {.padding_idx = 3});
    EXPECT_TRUE(at::equal(at::rand({4}), after));
    EXPECT_TRUE(at::equal(column->weight, rows(fc->weight)));
    EXPECT_TRUE(at::equal(column->bias, rows(fc->bias)));
    EXPECT_TRUE(at::equal(row->weight, down->weight.chunk(size, 1)[rank]));
    EXPECT_TRUE(at::equal(row->bias, down->bias));
    EXPECT_TRUE(at::equal(vocab->weight, rows(table->weight)));
    EXPECT_TRUE(column->weight.is_leaf() && column->weight.requires_grad());
    // Only the slice is in memory.
    EXPECT_EQ(column->weight.storage().nbytes(), static_cast<std::size_t>(8 * 12 / size) * sizeof(float));
    EXPECT_EQ(row->weight.storage().nbytes(), static_cast<std::size_t>(8 * 12 / size) * sizeof(float));
  });
}

TEST(TensorParallel, linear_layers_equal_one_ranks) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for (const bool bias : {true, false})
      for (const int parts : {1, 3}) {
        const auto options = torch::nn::LinearOptions(8, 24).bias(bias);
        torch::nn::Linear up(options), down(torch::nn::LinearOptions(24, 8).bias(bias));
        for (auto* each : {&up, &down}) fill_parameters(**each, 30), (*each)->to(at::kDouble);
        ColumnParallelLinear column(8, 24, group, {.bias = bias, .parts = parts});
        ColumnParallelLinear gathered(8, 24, group, {.bias = bias, .gather_output = true, .parts = parts});
        RowParallelLinear row(24, 8, group, {.bias = bias});
        RowParallelLinear whole_row(24, 8, group, {.bias = bias, .input_is_parallel = false});
        take(*column, *up), take(*gathered, *up), take(*row, *down), take(*whole_row, *down);
        const auto given = doubles(31, {2, 4, 8});

        const auto run = [&](const auto& body) {
          auto x = given.clone().requires_grad_();
          const auto y = body(x);
          (y * y).sum().backward();
          return std::pair(y.detach(), x.grad());
        };
        const auto expected = run([&](const auto& x) { return up(x); });
        const auto mine = run([&](const auto& x) { return gathered(x); });
        EXPECT_TRUE(at::allclose(mine.first, expected.first, 1e-12, 1e-12));
        EXPECT_TRUE(at::allclose(mine.second, expected.second, 1e-12, 1e-12));
        EXPECT_TRUE(all_close(full_gradients(*gathered), gradients_of(*up), 1e-12));

        up->zero_grad();
        const auto deep = run([&](const auto& x) { return down(up(x).tanh()); });
        if (parts == 1) {  // Elementwise, so the order of features does not matter.
          const auto split = run([&](const auto& x) { return row(column(x).tanh()); });
          EXPECT_TRUE(at::allclose(split.first, deep.first, 1e-12, 1e-12));
          EXPECT_TRUE(at::allclose(split.second, deep.second, 1e-12, 1e-12));
          EXPECT_TRUE(all_close(full_gradients(*column), gradients_of(*up), 1e-12));
          EXPECT_TRUE(all_close(full_gradients(*row), gradients_of(*down), 1e-12));
        }
        gathered->zero_grad();
        const auto by_whole = run([&](const auto& x) { return whole_row(gathered(x).tanh()); });
        EXPECT_TRUE(at::allclose(by_whole.first, deep.first, 1e-12, 1e-12));
        EXPECT_TRUE(at::allclose(by_whole.second, deep.second, 1e-12, 1e-12));
        EXPECT_TRUE(all_close(full_gradients(*gathered), gradients_of(*up), 1e-12));
        EXPECT_TRUE(all_close(full_gradients(*whole_row), gradients_of(*down), 1e-12));
      }
    // Not a view, so a row-parallel layer's sum needs no copy.
    EXPECT_FALSE(at::linear(doubles(35, {2, 4, 8}).requires_grad_(), doubles(36, {6, 8})).is_view());
    // In evaluation mode, and in single precision.
    torch::NoGradGuard no_grad;
    torch::nn::Linear fc(16, 8);
    fill_parameters(*fc, 33);
    RowParallelLinear row(16, 8, group, {.input_is_parallel = false});
    load_full_state(*row, full_state(*fc));
    const auto x = numbers(34, {5, 16});
    EXPECT_TRUE(at::allclose(row(x), fc(x), 1e-5, 1e-5));
  });
}

TEST(TensorParallel, embeddings_equal_one_ranks_to_the_bit) {
  on_every_rank([](World& world) {
    auto group = world.group();
    torch::nn::Embedding one(torch::nn::EmbeddingOptions(16, 4).padding_idx(5));
    fill_parameters(*one, 40);
    VocabParallelEmbedding mine(16, 4, group, {.padding_idx = 5});
    VocabParallelEmbedding sequence(16, 4, group, {.padding_idx = 5, .sequence_dim = 1});
    load_full_state(*mine, full_state(*one));
    load_full_state(*sequence, full_state(*one));
    const auto indices = at::tensor({0, 5, 15, 7, 8, 3, 0, 12}, at::kLong).view({2, 4});
    const auto weight = numbers(41, {2, 4, 4});
    const auto expected = one(indices), output = mine(indices), slice = sequence(indices);
    EXPECT_TRUE(at::equal(output, expected));
    EXPECT_TRUE(at::equal(slice, expected.chunk(world.size(), 1)[world.rank()]));
    (expected * weight).sum().backward();
    (output * weight).sum().backward();
    (slice * weight.chunk(world.size(), 1)[world.rank()]).sum().backward();
    EXPECT_TRUE(same_bits(full_gradients(*mine), gradients_of(*one)));
    EXPECT_TRUE(same_bits(full_gradients(*sequence), gradients_of(*one)));
    for (const int wrong : {16, -1}) EXPECT_ANY_THROW(mine(at::full({2}, wrong, at::kLong))) << wrong;
    EXPECT_TRUE(at::equal(mine(indices), expected));  // All ranks are still in step.
  });
}

TEST(TensorParallel, cross_entropy_equals_one_ranks) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None})
      for (const double smoothing : {0.0, 0.1})
        for (const double scale : {1.0, 300.0}) {
          auto whole = (doubles(50, {3, 5, 16}) * scale).requires_grad_();
          auto slice = whole.detach().chunk(world.size(), -1)[world.rank()].clone().requires_grad_();
          auto targets = at::arange(15).view({3, 5});
          targets[0][1] = -100, targets[2][2] = -100, targets[1][1] = 15;
          const auto expected =
              at::cross_entropy_loss(whole.flatten(0, 1), targets.flatten(), {}, reduction, -100, smoothing);
          const auto loss = vocab_parallel_cross_entropy(
              slice, targets, group, {.reduction = reduction, .label_smoothing = smoothing});
          EXPECT_TRUE(at::allclose(loss.flatten(), expected.flatten(), 1e-12, 1e-12));
          const auto weight =
              reduction == at::Reduction::None ? doubles(51, {15}) : at::full({1}, 2.0, at::kDouble);
          (expected.flatten() * weight).sum().backward();
          (loss.flatten() * weight).sum().backward();
          EXPECT_TRUE(
              at::allclose(slice.grad(), whole.grad().chunk(world.size(), -1)[world.rank()], 1e-12, 1e-12));
        }
    auto ignored = vocab_parallel_cross_entropy(at::ones({2, 3}), at::full({2}, 7), group,
                                                {.ignore_index = 7, .reduction = at::Reduction::Sum});
    EXPECT_EQ(ignored.item<float>(), 0);
    const auto half = numbers(52, {4, 16}).to(at::kBFloat16);
    const auto targets = at::arange(4);
    EXPECT_TRUE(
        at::allclose(vocab_parallel_cross_entropy(half.chunk(world.size(), -1)[world.rank()], targets, group),
                     at::cross_entropy_loss(half.to(at::kFloat), targets), 1e-5, 1e-6));
    EXPECT_THAT(
        error_of<ConfigError>([&] { vocab_parallel_cross_entropy(at::ones({2, 3}), at::ones({3}), group); }),
        AllOf(HasSubstr("[2, 3]"), HasSubstr("[3]")));
    EXPECT_ANY_THROW(vocab_parallel_cross_entropy(at::ones({1, 4}), at::full({1}, 4 * world.size()), group));
    group.barrier().wait();
  });
}

TEST(TensorParallel, a_block_on_slices_of_the_sequence_equals_one_ranks) {
  on_every_rank([](World& world) {
    auto group = world.group();
    const auto size = world.size(), rank = world.rank();
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({8}));
    nn::RMSNorm rms({8}, 1e-5);
    torch::nn::Linear up(8, 16), down(16, 8);
    SequenceParallelLayerNorm my_norm(torch::nn::LayerNormOptions({8}), group);
    SequenceParallelRMSNorm my_rms(std::vector<std::int64_t>{8}, group, 1e-5);
    ColumnParallelLinear my_up(8, 16, group, {.sequence_dim = 1});
    RowParallelLinear my_down(16, 8, group, {.sequence_dim = 1});
    for (torch::nn::Module* each :
         {static_cast<torch::nn::Module*>(norm.get()), static_cast<torch::nn::Module*>(rms.get()),
          static_cast<torch::nn::Module*>(up.get()), static_cast<torch::nn::Module*>(down.get())})
      fill_parameters(*each, 60), each->to(at::kDouble);
    take(*my_norm, *norm), take(*my_rms, *rms), take(*my_up, *up), take(*my_down, *down);
    const auto given = doubles(61, {2, 8, 8}), weight = doubles(62, {2, 8, 8});
    auto x = given.clone().requires_grad_();
    const auto expected = rms(x + down(at::gelu(up(norm(x)))));
    (expected * weight).sum().backward();
    auto slice = given.chunk(size, 1)[rank].clone().requires_grad_();
    const auto output = my_rms(slice + my_down(at::gelu(my_up(my_norm(slice)))));
    (output * weight.chunk(size, 1)[rank]).sum().backward();
    EXPECT_TRUE(at::allclose(output, expected.chunk(size, 1)[rank], 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(slice.grad(), x.grad().chunk(size, 1)[rank], 1e-12, 1e-12));
    EXPECT_TRUE(all_close(full_gradients(*my_norm), gradients_of(*norm), 1e-11));
    EXPECT_TRUE(all_close(full_gradients(*my_rms), gradients_of(*rms), 1e-11));
    EXPECT_TRUE(all_close(full_gradients(*my_up), gradients_of(*up), 1e-11));
    EXPECT_TRUE(all_close(full_gradients(*my_down), gradients_of(*down), 1e-11));
  });
}

TEST(TensorParallel, sizes_that_do_not_divide_are_named) {
  on_every_rank([](World& world) {
    auto group = world.group();
    EXPECT_THAT(error_of<ConfigError>([&] { ColumnParallelLinear(4, 4, group, {.parts = 0}); }),
                HasSubstr("expected parts of at least 1, got 0"));
    EXPECT_THAT(error_of<ConfigError>([&] { VocabParallelEmbedding(8, 4, group, {.padding_idx = 8}); }),
                HasSubstr("expected padding_idx from 0 to 7, got 8"));
    if (world.size() == 1) return;
    EXPECT_THAT(error_of<ConfigError>([&] { ColumnParallelLinear(4, 7, group); }),
                AllOf(HasSubstr("7 output features"), HasSubstr(fmt::format("{} ranks", world.size()))));
    EXPECT_THAT(error_of<ConfigError>([&] { RowParallelLinear(7, 4, group); }),
                HasSubstr("7 input features"));
    EXPECT_THAT(error_of<ConfigError>([&] { VocabParallelEmbedding(9, 4, group); }),
                HasSubstr("9 embeddings"));
  });
}

TEST(TensorParallel, a_rank_that_throws_between_layers_ends_the_others_wait) {
  // Only as threads: the runner then stops the other ranks.
  if (!ranks_are_threads() || num_ranks() == 1) return;
  const int last = num_ranks() - 1;
  std::atomic<int> told = 0;
  const auto error = error_of<std::logic_error>([&] {
    run_threads(num_ranks(), [&](World& world) {
      ColumnParallelLinear up(8, 16, world.group());
      RowParallelLinear down(16, 8, world.group());
      const auto x = numbers(1, {2, 8}).requires_grad_();
      down(up(x).tanh()).sum().backward();
      const auto hidden = up(x).tanh();
      if (world.rank() == last) throw std::logic_error("a bug in the middle of forward");
      EXPECT_THAT(error_of<CommError>([&] { down(hidden); }),
                  AllOf(HasSubstr("a bug in the middle"), HasSubstr("called at regions.cpp")));
      ++told;
    });
  });
  EXPECT_THAT(error, HasSubstr("a bug in the middle of forward"));
  EXPECT_EQ(told, last);
}

}  // namespace
}  // namespace lockstep::testing
