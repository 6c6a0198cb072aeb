// DistributedDataParallel: N ranks are equivalent to one, for all options and orders of events.
#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

at::Tensor input_of(int rank, int step, int rows = 5) { return numbers(1000 + 100 * step + rank, {rows, 6}); }

// The gradients of one rank alone.
std::vector<at::Tensor> local_gradients(const std::vector<at::Tensor>& inputs) {
  Mlp model;
  for (const auto& input : inputs) model(input).square().mean().backward();
  return gradients_of(*model);
}

// ((0+1)+(2+3))+..., divided once.
std::vector<at::Tensor> tree_average(std::vector<std::vector<at::Tensor>> parts) {
  const auto count = static_cast<double>(parts.size());
  while (parts.size() > 1) {
    std::vector<std::vector<at::Tensor>> next;
    for (std::size_t i = 0; i < parts.size(); i += 2) {
      next.push_back(parts[i]);
      if (i + 1 == parts.size()) continue;
      for (std::size_t k = 0; k < parts[i].size(); ++k) next.back()[k] = parts[i][k] + parts[i + 1][k];
    }
    parts = std::move(next);
  }
  for (auto& each : parts[0]) each = each / count;
  return parts[0];
}

std::vector<at::Tensor> expected_gradients(int ranks, int step) {
  std::vector<std::vector<at::Tensor>> parts;
  for (int rank = 0; rank < ranks; ++rank) parts.push_back(local_gradients({input_of(rank, step)}));
  return tree_average(std::move(parts));
}

TEST(Ddp, gradients_are_the_average_over_the_ranks_by_the_tree) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      ddp(input_of(world.rank(), step)).square().mean().backward();
      EXPECT_TRUE(same_bits(gradients_of(*model), expected_gradients(world.size(), step))) << "step " << step;
    }
  });
}

TEST(Ddp, buckets_of_any_size_give_the_same_bits) {
  on_every_rank([](World& world) {
    for (const std::int64_t bytes : {1, 40, 100, 400, 100000}) {
      Mlp model;
      DistributedDataParallel ddp(model, world.group(), {.bucket_bytes = bytes, .first_bucket_bytes = 1});
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        ddp(input_of(world.rank(), step)).square().mean().backward();
        ASSERT_TRUE(same_bits(gradients_of(*model), expected_gradients(world.size(), step)))
            << bytes << ' ' << step;
      }
      if (world.size() > 1) {
        EXPECT_EQ(ddp.bucket_sizes().size(), bytes == 1        ? 6U
                                             : bytes == 100000 ? 2U
                                                               : ddp.bucket_sizes().size());
      }
    }
  });
}

TEST(Ddp, buckets_follow_the_order_in_which_gradients_came) {
  on_every_rank([](World& world) {
    if (world.size() == 1) return;
    // Registered in the order of use, so backward reaches the last one first.
    torch::nn::Sequential model(torch::nn::Linear(2, 3), torch::nn::Linear(3, 50), torch::nn::Linear(50, 7));
    DistributedDataParallel ddp(model, world.group(), {.bucket_bytes = 1, .first_bucket_bytes = 1});
    EXPECT_TRUE(ddp.bucket_sizes().empty());
    ddp(at::ones({1, 2})).sum().backward();
    const auto sizes = ddp.bucket_sizes();
    ASSERT_EQ(sizes.size(), 6U);
    EXPECT_EQ(sizes[0] + sizes[1], 64 + 7 * 50 * 4 + 8);  // Padded to 64 bytes each.
    EXPECT_EQ(sizes[4] + sizes[5], 64 + 64);
  });
}

TEST(Ddp, a_gradient_is_held_once_under_both_forms_of_zero_grad) {
  on_every_rank([](World& world) {
    if (world.size() == 1) return;
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    const void* place = nullptr;
    for (int step = 0; step < 6; ++step) {
      model->zero_grad(/*set_to_none=*/step % 2 == 0);
      ddp(input_of(world.rank(), step)).square().mean().backward();
      const auto& grad = model->second->weight.grad();
      if (step > 0) {
        EXPECT_EQ(grad.const_data_ptr(), place) << "step " << step;
      }
      place = grad.const_data_ptr();
      EXPECT_EQ(grad.storage().nbytes(), static_cast<std::size_t>(ddp.bucket_sizes()[0]));
      EXPECT_TRUE(all_close(gradients_of(*model), expected_gradients(world.size(), step)));
    }
  });
}

// Runs steps of SGD with micro_batches on a group. The samples of global part k are those of "rank" k.
std::vector<at::Tensor> train(Group group, int micro_batches, int parts, bool none,
                              at::ScalarType type = at::kFloat) {
  Mlp model;
  model->to(type);
  fill_parameters(*model, 7);
  DistributedDataParallel ddp(
      model, group, {.bucket_bytes = 200, .first_bucket_bytes = 50, .micro_batches = micro_batches});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad(none);
    for (int k = 0; k < micro_batches; ++k) {
      const int part = group.rank() * micro_batches + k;
      EXPECT_LT(part, parts);
      ddp(input_of(part, step).to(type)).square().mean().backward();
    }
    optimizer.step();
  }
  return values_of(*model);
}

TEST(Ddp, ranks_give_the_bits_of_one_rank_with_micro_batches) {
  on_every_rank([](World& world) {
    const int ranks = world.size();
    auto alone = world.group({world.rank()});
    for (const bool none : {true, false}) {
      EXPECT_TRUE(same_bits(train(world.group(), 1, ranks, none), train(alone, ranks, ranks, none)));
      EXPECT_TRUE(
          same_bits(train(world.group(), 2, 2 * ranks, none), train(alone, 2 * ranks, 2 * ranks, none)));
      EXPECT_TRUE(same_bits(train(world.group(), 1, ranks, none, at::kBFloat16),
                            train(alone, ranks, ranks, none, at::kBFloat16)));
      EXPECT_TRUE(same_bits(train(world.group(), 2, 2 * ranks, none, at::kBFloat16),
                            train(alone, 2 * ranks, 2 * ranks, none, at::kBFloat16)));
    }
  });
}

TEST(Ddp, micro_batches_add_to_what_was_there) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group(), {.micro_batches = 3});
    std::vector<at::Tensor> before;
    for (int step = 0; step < 3; ++step) {
      for (int k = 0; k < 3; ++k) ddp(input_of(3 * world.rank() + k, step)).square().mean().backward();
      std::vector<std::vector<at::Tensor>> parts;
      for (int part = 0; part < 3 * world.size(); ++part)
        parts.push_back(local_gradients({input_of(part, step)}));
      auto expected = tree_average(std::move(parts));
      if (!before.empty())
        for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = expected[i] + before[i];
      before = gradients_of(*model);
      EXPECT_TRUE(all_close(before, expected));
    }
  });
}

TEST(Ddp, without_zero_grad_averages_add_up) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    auto sum = expected_gradients(world.size(), 0);
    ddp(input_of(world.rank(), 0)).square().mean().backward();
    for (int step = 1; step < 3; ++step) {
      ddp(input_of(world.rank(), step)).square().mean().backward();
      const auto more = expected_gradients(world.size(), step);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] + more[i];
    }
    EXPECT_TRUE(all_close(gradients_of(*model), sum));
  });
}

TEST(Ddp, no_sync_accumulates_here_and_the_next_pass_reduces_all) {
  on_every_rank([](World& world) {
    for (const int first : {0, 1}) {  // Before and after buckets are made.
      Mlp model;
      DistributedDataParallel ddp(model, world.group());
      if (first == 1) {
        ddp(input_of(world.rank(), 9)).square().mean().backward();
        model->zero_grad(false);
      }
      {
        auto guard = ddp.no_sync();
        for (int step = 0; step < 2; ++step) ddp(input_of(world.rank(), step)).square().mean().backward();
      }
      const auto local = local_gradients({input_of(world.rank(), 0), input_of(world.rank(), 1)});
      EXPECT_TRUE(all_close(gradients_of(*model), local));
      ddp(input_of(world.rank(), 2)).square().mean().backward();
      std::vector<std::vector<at::Tensor>> parts;
      for (int rank = 0; rank < world.size(); ++rank)
        parts.push_back(local_gradients({input_of(rank, 0), input_of(rank, 1), input_of(rank, 2)}));
      EXPECT_TRUE(all_close(gradients_of(*model), tree_average(std::move(parts))));
    }
  });
}

TEST(Ddp, several_forwards_before_backward_and_several_backwards_count) {
  on_every_rank([](World& world) {
    std::vector<std::vector<at::Tensor>> parts;
    for (int rank = 0; rank < world.size(); ++rank)
      parts.push_back(local_gradients({input_of(rank, 0), input_of(rank, 1)}));
    const auto expected = tree_average(std::move(parts));
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    for (int repeat = 0; repeat < 2; ++repeat) {
      model->zero_grad();
      auto first = ddp(input_of(world.rank(), 0)), second = ddp(input_of(world.rank(), 1));
      (first.square().mean() + second.square().mean()).backward();
      EXPECT_TRUE(all_close(gradients_of(*model), expected));
      model->zero_grad();
      first = ddp(input_of(world.rank(), 0)), second = ddp(input_of(world.rank(), 1));
      first.square().mean().backward();
      second.square().mean().backward();
      EXPECT_TRUE(all_close(gradients_of(*model), expected));
    }
  });
}

TEST(Ddp, a_forward_that_goes_round_it_is_averaged_too) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model(input_of(world.rank(), step)).square().mean().backward();
      EXPECT_TRUE(same_bits(gradients_of(*model), expected_gradients(world.size(), step)));
    }
  });
}

TEST(Ddp, a_parameter_without_gradient_is_named) {
  on_every_rank([](World& world) {
    Branches model;
    // A group of one, because all ranks fail alike.
    DistributedDataParallel ddp(model, world.group({world.rank()}));
    const auto text = error_of<ConfigError>([&] { ddp(at::ones({2, 4}), true).sum().backward(); });
    EXPECT_THAT(text, AllOf(HasSubstr("'right.weight', 'right.bias', 'never.weight'"),
                            HasSubstr("find_unused_parameters")));
    EXPECT_THAT(text, Not(HasSubstr("left")));
  });
}

TEST(Ddp, unused_parameters_count_as_zero_and_those_unused_everywhere_are_left_alone) {
  on_every_rank([](World& world) {
    Branches model;
    DistributedDataParallel ddp(model, world.group(),
                                {.bucket_bytes = 1, .first_bucket_bytes = 1, .find_unused_parameters = true});
    for (int step = 0; step < 4; ++step) {
      model->zero_grad(step % 2 == 0);
      const auto never = numbers(5, {4});
      model->never->bias.mutable_grad() = never.clone();
      // In even steps rank 0 goes left and the other ranks right; in odd steps all go right.
      const auto left = [&](int rank) { return rank == 0 && step % 2 == 0; };
      const auto x = numbers(50 + step, {2, 4});
      ddp(x, left(world.rank())).sum().backward();
      std::vector<std::vector<at::Tensor>> parts;
      for (int rank = 0; rank < world.size(); ++rank) {
        Branches one;
        one(x, left(rank)).sum().backward();
        parts.push_back(gradients_of(*one));
        for (std::size_t i = 0; i < parts.back().size(); ++i)
          if (!parts.back()[i].defined()) parts.back()[i] = at::zeros_like(one->parameters()[i]);
      }
      const auto expected = tree_average(std::move(parts));
      const auto grads = gradients_of(*model);
      for (std::size_t i = 0; i < grads.size(); ++i) {
        const auto name = model->named_parameters()[i].key();
        const bool used = name.starts_with("last") || (name.starts_with("left") && step % 2 == 0) ||
                          (name.starts_with("right") && (step % 2 == 1 || world.size() > 1));
        if (used) {
          EXPECT_TRUE(at::allclose(grads[i], expected[i])) << name << " step " << step;
        } else if (name == "never.bias") {
          EXPECT_TRUE(at::allclose(grads[i], never)) << step;
        } else if (step % 2 == 0) {
          EXPECT_FALSE(grads[i].defined()) << name << " step " << step;
        }
      }
    }
  });
}

TEST(Ddp, a_static_graph_is_learned_in_the_first_step) {
  on_every_rank([](World& world) {
    if (world.size() == 1) return;
    Branches model;
    DistributedDataParallel ddp(model, world.group(), {.first_bucket_bytes = 1, .static_graph = true});
    const bool left = world.rank() == 0;
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      ddp(at::ones({2, 4}), left).sum().backward();
      EXPECT_FALSE(model->never->weight.grad().defined());
      Branches one;
      one(at::ones({2, 4}), true).sum().backward();
      EXPECT_TRUE(at::allclose(model->left->weight.grad(), one->left->weight.grad() / world.size()));
    }
    // A change of the graph is refused by name, here on every rank before anything is sent.
    const auto text = error_of<ConfigError>(
        [&] { model->never(ddp(at::ones({2, 4}), left).repeat({1, 2})).sum().backward(); });
    EXPECT_THAT(text, AllOf(HasSubstr("'never."), HasSubstr("static_graph")));
  });
}

TEST(Ddp, shared_frozen_and_ignored_parameters_have_their_way) {
  on_every_rank([](World& world) {
    torch::nn::Linear first(4, 4), frozen(4, 4), own(4, 4);
    torch::nn::Sequential model(first, frozen, first, own);
    fill_parameters(*model, 11 + static_cast<std::uint64_t>(world.rank()));
    frozen->weight.requires_grad_(false);
    DistributedDataParallel ddp(model, world.group(), {.ignore = {"3"}});
    const auto x = numbers(60 + world.rank(), {3, 4});
    ddp(x).square().mean().backward();
    EXPECT_FALSE(frozen->weight.grad().defined());
    // Made equal at construction, including frozen ones, but not ignored ones.
    const auto sums = world.group().all_gather_values(frozen->weight.sum().item<float>());
    for (const auto sum : sums) EXPECT_EQ(sum, sums[0]);
    const auto grads = world.group().all_gather_values(first->weight.grad().sum().item<float>());
    for (const auto grad : grads) EXPECT_EQ(grad, grads[0]);
    const auto theirs = world.group().all_gather_values(own->weight.grad().sum().item<float>());
    if (world.size() > 1) {
      EXPECT_NE(theirs[0], theirs[1]);
    }
    EXPECT_THAT(
        error_of<ConfigError>([&] { DistributedDataParallel(model, world.group(), {.ignore = {"4"}}); }),
        HasSubstr("'4'"));
  });
}

TEST(Ddp, sparse_gradients_are_averaged) {
  on_every_rank([](World& world) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(10, 3).sparse(true));
    torch::nn::Sequential model(table, torch::nn::Linear(3, 2));
    fill_parameters(*model, 21);
    DistributedDataParallel ddp(model, world.group());
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      const auto ids = [&](int rank) { return at::tensor({rank % 10, 2, 2, (rank + step) % 10}); };
      ddp(ids(world.rank())).square().sum().backward();
      at::Tensor sum = at::zeros({10, 3});
      for (int rank = 0; rank < world.size(); ++rank) {
        torch::nn::Embedding other(10, 3);
        torch::nn::Sequential one(other, torch::nn::Linear(3, 2));
        fill_parameters(*one, 21);
        one->forward(ids(rank)).square().sum().backward();
        sum += other->weight.grad();
      }
      EXPECT_TRUE(table->weight.grad().is_sparse());
      EXPECT_TRUE(at::allclose(table->weight.grad().to_dense(), sum / world.size(), 1e-5, 1e-6)) << step;
    }
  });
}

TEST(Ddp, models_that_differ_are_refused_on_every_rank_with_the_name) {
  on_every_rank([](World& world) {
    if (world.size() == 1) return;
    const bool odd = world.rank() == 1;
    Mlp shape(6, odd ? 8 : 9);
    EXPECT_THAT(error_of<ConfigError>([&] { DistributedDataParallel(shape, world.group()); }),
                AllOf(HasSubstr("rank 1 has parameter 'first.weight': Float [8, 6]"),
                      HasSubstr("rank 0 has parameter 'first.weight': Float [9, 6]")));
    torch::nn::Sequential more(torch::nn::Linear(2, 2));
    if (odd) more->push_back(torch::nn::Linear(2, 2));
    EXPECT_THAT(error_of<ConfigError>([&] { DistributedDataParallel(more, world.group()); }),
                AllOf(HasSubstr("rank 1 has parameter '1.weight'"), HasSubstr("rank 0 has nothing more")));
    Mlp options;
    EXPECT_THAT(error_of<ConfigError>([&] {
                  DistributedDataParallel(options, world.group(), {.find_unused_parameters = odd});
                }),
                HasSubstr("find_unused_parameters"));
  });
}

TEST(Ddp, bad_options_and_models_are_refused) {
  on_every_rank([](World& world) {
    Mlp model;
    auto group = world.group();
    EXPECT_THAT(error_of<ConfigError>([&] { DistributedDataParallel(model, group, {.bucket_bytes = 0}); }),
                HasSubstr("must be positive, got 0 and 1048576"));
    EXPECT_THAT(error_of<ConfigError>([&] { DistributedDataParallel(model, group, {.micro_batches = 0}); }),
                HasSubstr("micro_batches"));
    EXPECT_THAT(error_of<ConfigError>([&] {
                  DistributedDataParallel(model, group, {.static_graph = true, .micro_batches = 2});
                }),
                HasSubstr("static_graph cannot be combined with micro_batches"));
    EXPECT_THAT(
        error_of<ConfigError>([&] { DistributedDataParallel(model, group, {.check_replicas_every = -1}); }),
        HasSubstr("check_replicas_every"));
    EXPECT_THAT(error_of<ConfigError>([&] { DistributedDataParallel(Mlp(nullptr), group); }),
                HasSubstr("module holder is empty"));
    for (auto& p : model->parameters()) p.requires_grad_(false);
    EXPECT_THAT(error_of<ConfigError>([&] { DistributedDataParallel(model, group); }),
                HasSubstr("no parameter"));
  });
}

TEST(Ddp, a_gradient_of_a_gradient_is_refused) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    const auto text = error_of<ConfigError>([&] {
      ddp(input_of(0, 0)).square().mean().backward({}, /*keep_graph=*/true, /*create_graph=*/true);
    });
    EXPECT_THAT(text, AllOf(HasSubstr("create_graph"), HasSubstr("third.")));
    // Training can continue.
    model->zero_grad();
    ddp(input_of(world.rank(), 0)).square().mean().backward();
    EXPECT_TRUE(same_bits(gradients_of(*model), expected_gradients(world.size(), 0)));
  });
}

struct Fails : torch::autograd::Function<Fails> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("as planned");
  }
};

TEST(Ddp, a_backward_that_throws_can_be_tried_again_or_is_told_apart) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group(), {.bucket_bytes = 1, .first_bucket_bytes = 1});
    const auto x = input_of(world.rank(), 0);
    for (int repeat = 0; repeat < 2; ++repeat) {
      EXPECT_THAT(error_of<std::runtime_error>([&] { Fails::apply(ddp(x)).sum().backward(); }),
                  HasSubstr("as planned"));
      model->zero_grad();
      ddp(x).square().mean().backward();
      EXPECT_TRUE(same_bits(gradients_of(*model), expected_gradients(world.size(), 0)));
    }
    if (world.size() == 1) return;
    // Also in the middle, when some buckets have already been reduced.
    EXPECT_THAT(error_of<std::runtime_error>([&] {
                  auto hidden = Fails::apply(model->second(model->first(x).tanh()).tanh());
                  ddp(x).sum().add(model->third(hidden).sum()).backward();
                }),
                HasSubstr("as planned"));
    model->zero_grad();
    ddp(x).square().mean().backward();
    EXPECT_TRUE(same_bits(gradients_of(*model), expected_gradients(world.size(), 0)));
  });
}

TEST(Ddp, buffers_are_rank_0s_at_each_forward_that_trains) {
  on_every_rank([](World& world) {
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
    DistributedDataParallel ddp(model, world.group());
    for (int step = 0; step < 3; ++step) {
      ddp(numbers(70 + world.rank() + 10 * step, {8, 4})).sum().backward();
      auto mine = model->buffers();
      const auto theirs = world.group().all_gather_values(mine[0].sum().item<float>());
      if (world.size() > 1) {
        EXPECT_NE(theirs[0], theirs[1]);
      }  // Each rank has seen its own data.
      ddp.sync_buffers();
      for (const auto sum : world.group().all_gather_values(mine[0].sum().item<float>()))
        EXPECT_EQ(sum, theirs[0]);
    }
    DistributedDataParallel apart(model, world.group(), {.init_sync = false, .broadcast_buffers = false});
    model->buffers()[0].fill_(world.rank());
    {
      torch::NoGradGuard no_grad;
      apart(at::ones({2, 4}));
    }
    EXPECT_NE(model->buffers()[0][0].item<float>(), -1);
  });
}

struct PairImpl : torch::nn::Module {
  PairImpl() { register_module("mlp", mlp); }
  std::pair<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x,
                                                         std::optional<at::Tensor> scale) {
    auto y = mlp(x);
    return {scale ? y * *scale : y, {y.detach(), y.sin()}};
  }
  Mlp mlp;
};

TEST(Ddp, any_arguments_and_results_pass_through) {
  on_every_rank([](World& world) {
    auto model = std::make_shared<PairImpl>();
    DistributedDataParallel ddp(model, world.group());
    auto [y, more] = ddp(input_of(0, 0), at::ones({3}));
    EXPECT_EQ(more.size(), 2U);
    (y.sum() + more[1].sum()).backward();
    EXPECT_TRUE(model->mlp->first->weight.grad().defined());
    EXPECT_EQ(ddp.module(), model);
    torch::nn::AnyModule any(torch::nn::Linear(2, 2));
    torch::nn::Sequential sequence(torch::nn::Linear(2, 2));
    DistributedDataParallel other(sequence, world.group());
    EXPECT_EQ(other(at::ones({1, 2})).size(1), 2);
    EXPECT_EQ(other.forward(at::ones({1, 2})).size(1), 2);
  });
}

TEST(Ddp, dtypes_and_layouts_have_buckets_of_their_own) {
  on_every_rank([](World& world) {
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 4, 3));
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    torch::nn::Linear wide(4, 2);
    wide->to(at::kDouble);
    struct Mixed : torch::nn::Module {
      torch::nn::Conv2d conv;
      torch::nn::Linear wide;
      Mixed(torch::nn::Conv2d c, torch::nn::Linear w)
          : conv(register_module("conv", c)), wide(register_module("wide", w)) {}
      at::Tensor forward(const at::Tensor& x) { return wide(conv(x).mean({2, 3}).to(at::kDouble)); }
    };
    auto model = std::make_shared<Mixed>(conv, wide);
    fill_parameters(*model, 31);
    DistributedDataParallel ddp(model, world.group());
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      ddp(numbers(80 + world.rank(), {2, 3, 5, 5})).square().mean().backward();
      if (world.size() > 1) {
        EXPECT_EQ(ddp.bucket_sizes().size(), 2U);
        EXPECT_TRUE(conv->weight.grad().is_contiguous(at::MemoryFormat::ChannelsLast));
      }
      const auto sums = world.group().all_gather_values(conv->weight.grad().sum().item<float>());
      for (const auto sum : sums) EXPECT_EQ(sum, sums[0]);
    }
  });
}

TEST(Ddp, join_weighs_by_samples_and_keeps_replicas_equal) {
  on_every_rank([](World& world) {
    const int p = world.size();
    for (const bool follow : {true, false}) {
      // Rank r makes r + 2 steps of r + 1 samples.
      const auto rows = [](int rank) { return rank + 1; };
      const auto steps = [](int rank) { return rank + 2; };
      Mlp model;
      DistributedDataParallel ddp(model, world.group(), {.first_bucket_bytes = 1});
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      const auto step = [&] { optimizer.step(); };
      ddp.join(
          [&] {
            for (int i = 0; i < steps(world.rank()); ++i) {
              optimizer.zero_grad();
              ddp(input_of(world.rank(), i, rows(world.rank()))).square().mean().backward();
              optimizer.step();
            }
          },
          follow ? JoinOptions{.step = step} : JoinOptions{});
      check_replicas(*model, world.group());
      // One rank with all samples of a step.
      Mlp one;
      torch::optim::SGD sgd(one->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int i = 0; i < steps(p - 1); ++i) {
        std::vector<at::Tensor> inputs;
        for (int rank = 0; rank < p; ++rank)
          if (i < steps(rank)) inputs.push_back(input_of(rank, i, rows(rank)));
        sgd.zero_grad();
        one(at::cat(inputs)).square().mean().backward();
        sgd.step();
      }
      EXPECT_TRUE(all_close(values_of(*model), values_of(*one), 1e-5));
      // Continue with the same number of steps on each rank.
      for (int i = 0; i < 2; ++i) {
        optimizer.zero_grad();
        ddp(input_of(world.rank(), 20 + i)).square().mean().backward();
        if (follow) optimizer.step();
      }
      check_replicas(*model, world.group());
    }
  });
}

TEST(Ddp, join_holds_for_ranks_without_data_and_for_told_samples) {
  on_every_rank([](World& world) {
    const int p = world.size();
    Mlp model;
    DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    ddp.join(
        [&] {
          // Makes no step, but its bucket order is used by the other ranks.
          if (world.rank() == 0 && p > 1) return;
          for (int i = 0; i < 2; ++i) {
            optimizer.zero_grad();
            auto loss = ddp(input_of(world.rank(), i)).square().mean();
            ddp.samples(i == 0 ? world.rank() : 3);
            loss.backward();
            optimizer.step();
          }
        },
        {.step = [&] { optimizer.step(); }});
    check_replicas(*model, world.group());
    if (p == 2) {
      Mlp one;
      torch::optim::SGD sgd(one->parameters(), 0.1);
      for (int i = 0; i < 2; ++i) {
        sgd.zero_grad();
        one(input_of(1, i)).square().mean().backward();
        sgd.step();
      }
      EXPECT_TRUE(all_close(values_of(*model), values_of(*one), 1e-6));
    }
  });
}

TEST(Ddp, join_can_end_at_the_first_that_runs_out) {
  on_every_rank([](World& world) {
    if (world.size() == 1) return;
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    for (int epoch = 0; epoch < 2; ++epoch) {
      const auto text = error_of<ConfigError>([&] {
        ddp.join(
            [&] {
              for (int i = 0; i < 2 + (world.rank() == 0); ++i)
                ddp(input_of(0, i)).square().mean().backward();
            },
            {.throw_on_early_termination = true});
      });
      EXPECT_THAT(text, AllOf(ContainsRegex("rank 1 ran out of data after [24] steps"),
                              HasSubstr("rank 0 has more")));
    }
    model->zero_grad();
    ddp(input_of(world.rank(), 0)).square().mean().backward();
    EXPECT_TRUE(all_close(gradients_of(*model), expected_gradients(world.size(), 0), 1e-6));
  });
}

TEST(Ddp, a_hook_takes_the_place_of_the_average) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group(), {.bucket_bytes = 300, .first_bucket_bytes = 300});
    std::vector<std::size_t> seen, completed;
    std::size_t gradients = 0;
    ddp.register_comm_hook([&](GradBucket& bucket) {
      seen.push_back(bucket.index());
      gradients += bucket.gradients().size();
      EXPECT_EQ(bucket.gradients().size(), bucket.names().size());
      auto work = std::make_shared<Work>(bucket.group().all_reduce(bucket.buffer()));
      return [&, work, index = bucket.index()] {
        work->wait();
        completed.push_back(index);
      };
    });
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      ddp(input_of(world.rank(), step)).square().mean().backward();
      auto expected = expected_gradients(world.size(), step);
      for (auto& each : expected) each = each * world.size();
      EXPECT_TRUE(all_close(gradients_of(*model), expected));
    }
    EXPECT_EQ(seen, completed);
    EXPECT_EQ(gradients, 12U);
    EXPECT_THAT(error_of<ConfigError>([&] { ddp.register_comm_hook({}); }), HasSubstr("before the first"));
  });
}

TEST(Ddp, replicas_that_drift_are_found_with_rank_and_tensor) {
  on_every_rank([](World& world) {
    if (world.size() == 1) return;
    Mlp model;
    DistributedDataParallel ddp(model, world.group(), {.check_replicas_every = 2});
    check_replicas(*model, world.group(), {.buffers = true});
    const auto step = [&](int i) { ddp(input_of(world.rank(), i)).square().mean().backward(); };
    step(0);
    if (world.rank() == world.size() - 1) {
      torch::NoGradGuard no_grad;
      model->second->bias[3] += 1e-7;
      model->second->bias[4] = at::nextafter(model->second->bias[4], at::tensor(9.F)[0]);
    }
    step(1);
    const auto text = error_of<DriftError>([&] { step(2); });
    EXPECT_THAT(text, HasSubstr(fmt::format("'second.bias' on rank {} differs from rank", world.size() - 1)));
  });
}

TEST(Ddp, it_may_go_before_the_model_and_the_model_before_it) {
  on_every_rank([](World& world) {
    Mlp model;
    { DistributedDataParallel ddp(model, world.group()); }
    model(input_of(world.rank(), 0)).square().mean().backward();  // No hook is left.
    EXPECT_TRUE(same_bits(gradients_of(*model), local_gradients({input_of(world.rank(), 0)})));
    auto other = std::make_unique<DistributedDataParallel<Mlp>>(Mlp(), world.group());
    auto loss = (*other)(input_of(world.rank(), 0)).square().mean();
    other.reset();
    loss.backward();
  });
}

}  // namespace
}  // namespace lockstep::testing
