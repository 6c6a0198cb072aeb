// DistributedOptimizer gives the bits of the plain optimizer after DistributedDataParallel, with part of the
// state on each rank.
#include "optim/distributed_optimizer.h"

namespace lockstep::testing {
namespace {

static_assert(!std::is_move_constructible_v<DistributedOptimizer<SGD>>);

// Weights of several sizes, with a memory layout that does not follow their indices.
struct LayersImpl : torch::nn::Module {
  LayersImpl() : conv(torch::nn::Conv2dOptions(3, 130, 3)), norm(130), first(130 * 4, 33), last(33, 2) {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("first", first);
    register_module("last", last);
    fill_parameters(*this, 600);
    torch::NoGradGuard no_grad;
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(const at::Tensor& x) { return last(first(norm(conv(x)).flatten(1)).tanh()); }
  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
  torch::nn::Linear first, last;
};
TORCH_MODULE(Layers);

at::Tensor image_of(int rank, int step) { return numbers(9500 + 100 * step + rank, {4, 3, 4, 4}); }

TEST(DistributedOptimizer, has_the_bits_of_the_plain_one) {
  on_every_rank([](World& world) {
    const auto step = [&](auto& ddp, auto& optimizer, int i) {
      kStep(ddp, optimizer, features_of(world.rank(), i));
    };
    for (const bool zero_copy : {true, false}) {
      const DdpOptions ddp{.zero_copy = zero_copy};
      expect_the_same_bits<AdamW, Wide>(world, AdamWOptions{.lr = 1e-2, .weight_decay = 0.1}, step, ddp);
      expect_the_same_bits<Adam, Wide>(world, AdamOptions{.lr = 1e-2, .weight_decay = 0.1, .amsgrad = true},
                                       step, ddp);
      expect_the_same_bits<SGD, Wide>(world, SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true}, step,
                                      ddp);
      expect_the_same_bits<SGD, Wide>(world, SGDOptions{.lr = 0.1}, step, ddp);
    }
    expect_the_same_bits<AdamW, Mlp>(world, AdamWOptions{.lr = 1e-2}, [&](auto& ddp, auto& optimizer, int i) {
      kStep(ddp, optimizer, numbers(9700 + i + 10 * world.rank(), {4, 6}));
    });
    expect_the_same_bits<AdamW, Layers>(
        world, AdamWOptions{.lr = 1e-2},
        [&](auto& ddp, auto& optimizer, int i) { kStep(ddp, optimizer, image_of(world.rank(), i)); },
        {.bucket_bytes = 30000, .first_bucket_bytes = 2000});
  });
}

TEST(DistributedOptimizer, state_is_this_ranks_part_and_gradients_are_gone_after_a_step) {
  on_every_rank([](World& world) {
    Wide model;
    DistributedDataParallel ddp(model, world.group());
    DistributedOptimizer<AdamW> optimizer(ddp, {.lr = 1e-3});
    std::int64_t all = 0, mine = 0;
    for (const auto& parameter : model->parameters()) all += parameter.numel();
    for (const auto& slice : optimizer.param_groups()[0].params()) mine += slice.numel();
    // Allow for whole blocks of 4096, and smaller remainders.
    EXPECT_LE(mine, all / world.size() + 4096 * 10);
    auto sum = at::tensor(mine);
    world.group().all_reduce(sum).wait();
    EXPECT_EQ(sum.item<std::int64_t>(), all);

    ddp(features_of(world.rank(), 0)).square().mean().backward();
    EXPECT_THAT(error_of<c10::Error>([&] { (void)model->parameters()[0].grad().sum(); }),
                HasSubstr("sharded"));
    optimizer.step();
    for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
    std::int64_t held = 0;
    for (const auto& [key, state] : optimizer.state())
      held += static_cast<const torch::optim::AdamWParamState&>(*state).exp_avg().numel();
    EXPECT_EQ(held, mine);
    for (const auto& slice : optimizer.param_groups()[0].params()) EXPECT_FALSE(slice.grad().defined());
    // A step without gradients changes nothing.
    const auto before = values_of(*model);
    optimizer.step();
    EXPECT_TRUE(same_bits(before, values_of(*model)));
  });
}

TEST(DistributedOptimizer, adds_up_passes_with_and_without_communication) {
  on_every_rank([](World& world) {
    expect_the_same_bits<SGD, Wide>(world, SGDOptions{.lr = 0.1, .momentum = 0.9},
                                    [&](auto& ddp, auto& optimizer, int i) {
                                      optimizer.zero_grad();
                                      {
                                        auto quiet = ddp.no_sync();
                                        ddp(features_of(world.rank(), 50 + i)).square().mean().backward();
                                      }
                                      ddp(features_of(world.rank(), i)).square().mean().backward();
                                      optimizer.step();
                                    });
    // This accumulates averages; the plain optimizer averages the accumulated average again, which rounds
    // differently.
    Wide plain_model, model;
    DistributedDataParallel plain_ddp(plain_model, world.group()), ddp(model, world.group());
    SGD plain(plain_model->parameters(), {.lr = 0.1});
    DistributedOptimizer<SGD> optimizer(ddp, {.lr = 0.1});
    const auto step = [&](auto& each_ddp, auto& each, int i) {
      each.zero_grad();
      for (int pass = 0; pass < 3; ++pass)
        each_ddp(features_of(world.rank(), 10 * pass + i)).square().mean().backward();
      each.step();
    };
    for (int i = 0; i < 3; ++i) {
      step(plain_ddp, plain, i);
      step(ddp, optimizer, i);
      EXPECT_TRUE(all_close(values_of(*plain_model), values_of(*model)));
    }
    check_replicas(*model, world.group());
    // Dropped gradients must not reappear.
    ddp(features_of(world.rank(), 90)).square().mean().backward();
    step(plain_ddp, plain, 4);
    step(ddp, optimizer, 4);
    EXPECT_TRUE(all_close(values_of(*plain_model), values_of(*model)));
  });
}

TEST(DistributedOptimizer, works_with_unused_parameters_micro_batches_and_uneven_data) {
  on_every_rank([](World& world) {
    expect_the_same_bits<SGD, Branches>(world, SGDOptions{.lr = 0.1, .momentum = 0.9},
                                        [&](auto& ddp, auto& optimizer, int i) {
                                          optimizer.zero_grad();
                                          ddp(numbers(9800 + i + 10 * world.rank(), {4, 4}),
                                              (world.rank() + i) % 3 == 0)
                                              .square()
                                              .mean()
                                              .backward();
                                          optimizer.step();
                                        },
                                        {.find_unused_parameters = true});
    expect_the_same_bits<AdamW, Wide>(
        world, AdamWOptions{.lr = 1e-2},
        [&](auto& ddp, auto& optimizer, int i) {
          optimizer.zero_grad();
          for (int m = 0; m < 3; ++m) ddp(features_of(3 * world.rank() + m, i)).square().mean().backward();
          optimizer.step();
        },
        {.micro_batches = 3});
    if (world.size() == 1) return;
    Wide plain_model, model;
    DistributedDataParallel plain_ddp(plain_model, world.group()), ddp(model, world.group());
    SGD plain(plain_model->parameters(), {.lr = 0.1});
    DistributedOptimizer<SGD> optimizer(ddp, {.lr = 0.1});
    const auto train = [&](auto& each_ddp, auto& each) {
      each_ddp.join(
          [&] {
            for (int i = 0; i < 2 + world.rank() % 3; ++i)
              kStep(each_ddp, each, features_of(world.rank(), i));
          },
          {.step = [&] { each.step(); }});
    };
    train(plain_ddp, plain);
    train(ddp, optimizer);
    EXPECT_TRUE(same_bits(values_of(*plain_model), values_of(*model)));
    EXPECT_THAT(error_of<ConfigError>([&] { ddp.join([] {}); }), HasSubstr("{.step}"));
  });
}

TEST(DistributedOptimizer, takes_groups_and_schedules) {
  on_every_rank([](World& world) {
    Wide plain_model, model;
    DistributedDataParallel plain_ddp(plain_model, world.group()), ddp(model, world.group());
    const auto groups_of = [](Wide& each) {
      std::vector<at::Tensor> weights, biases;
      for (const auto& item : each->named_parameters())
        (item.value().dim() > 1 ? weights : biases).push_back(item.value());
      return std::vector{AdamW::group(weights, {.lr = 1e-2, .weight_decay = 0.3}),
                         AdamW::group(biases, {.lr = 3e-2, .weight_decay = 0})};
    };
    AdamW plain(groups_of(plain_model));
    DistributedOptimizer<AdamW> optimizer(ddp, groups_of(model));
    ExponentialLR plain_schedule(plain, {.gamma = 0.5}), schedule(optimizer, {.gamma = 0.5});
    for (int i = 0; i < 4; ++i) {
      kStep(plain_ddp, plain, features_of(world.rank(), i));
      kStep(ddp, optimizer, features_of(world.rank(), i));
      plain_schedule.step();
      schedule.step();
    }
    EXPECT_TRUE(same_bits(values_of(*plain_model), values_of(*model)));
    EXPECT_EQ(optimizer.options(1).lr, plain.options(1).lr);
  });
}

TEST(DistributedOptimizer, clips_by_a_norm_that_does_not_depend_on_the_number_of_ranks) {
  on_every_rank([](World& world) {
    auto alone = world.group().split(world.rank(), 0, {.name = "alone"});
    for (const double norm_type : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
      Wide model, plain_model, single_model;
      DistributedDataParallel ddp(model, world.group()), plain_ddp(plain_model, world.group()),
          single_ddp(single_model, alone);
      DistributedOptimizer<SGD> optimizer(ddp, {.lr = 1});
      DistributedOptimizer<SGD> single(single_ddp, {.lr = 1});
      ddp(features_of(world.rank(), 0)).square().mean().backward();
      plain_ddp(features_of(world.rank(), 0)).square().mean().backward();
      // A single rank whose gradient is the average of all ranks.
      at::Tensor loss = single_ddp(features_of(0, 0)).sum() * 0;
      for (std::size_t i = 0; i < single_model->parameters().size(); ++i)
        loss = loss + (single_model->parameters()[i] * plain_model->parameters()[i].grad()).sum();
      loss.backward();

      const auto expected = clip_grad_norm(plain_model->parameters(), 0.01, {.norm_type = norm_type});
      const auto norm = optimizer.clip_grad_norm(0.01, {.norm_type = norm_type});
      EXPECT_TRUE(at::allclose(norm, expected, 1e-5)) << norm << expected;
      EXPECT_TRUE(at::equal(norm, single.clip_grad_norm(0.01, {.norm_type = norm_type}))) << norm_type;
      optimizer.step();
      single.step();
      EXPECT_TRUE(same_bits(values_of(*model), values_of(*single_model)));
    }
  });
}

TEST(DistributedOptimizer, a_norm_that_is_no_number_is_told) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    DistributedOptimizer<SGD> optimizer(ddp);
    const double factor = world.rank() == world.size() - 1 ? std::numeric_limits<double>::quiet_NaN() : 1;
    (ddp(numbers(1, {4, 6})).square().mean() * factor).backward();
    for (const double norm_type : {2.0, std::numeric_limits<double>::infinity()})
      EXPECT_THAT(error_of<Error>([&] {
                    optimizer.clip_grad_norm(1, {.norm_type = norm_type, .error_if_nonfinite = true});
                  }),
                  HasSubstr("is nan"));
    // A single one, in the middle.
    optimizer.zero_grad();
    auto poison = at::zeros_like(model->second->weight);
    poison[4][4] = std::numeric_limits<double>::quiet_NaN();
    (ddp(numbers(1, {4, 6})).square().mean() + (model->second->weight * poison).sum()).backward();
    EXPECT_THAT(error_of<Error>([&] {
                  optimizer.clip_grad_norm(
                      1, {.norm_type = std::numeric_limits<double>::infinity(), .error_if_nonfinite = true});
                }),
                HasSubstr("is nan"));
    EXPECT_THAT(error_of<ConfigError>([&] { optimizer.clip_grad_norm(1, {.norm_type = 0}); }),
                HasSubstr("norm_type: expected a number above 0, got 0"));
    EXPECT_THAT(error_of<ConfigError>([&] { optimizer.clip_grad_norm(1, {.group = world.group()}); }),
                HasSubstr("remove {.group}"));
  });
}

TEST(DistributedOptimizer, all_ranks_leave_out_a_step_together) {
  on_every_rank([](World& world) {
    Mlp plain_model, model;
    DistributedDataParallel plain_ddp(plain_model, world.group()), ddp(model, world.group());
    AdamW plain(plain_model->parameters(), {.lr = 1e-2});
    DistributedOptimizer<AdamW> optimizer(ddp, {.lr = 1e-2});
    GradScaler plain_scaler({.init_scale = 16}), scaler({.init_scale = 16});
    const auto step = [&](auto& each_ddp, auto& each, auto& each_scaler, int i) {
      each_ddp.module()->zero_grad();  // also clears the gradients of a skipped step
      auto loss = each_ddp(numbers(9900 + i + 10 * world.rank(), {4, 6})).square().mean();
      // From the last parameter only, and so from one rank's slice.
      if (i == 2 && world.is_main()) loss = loss + each_ddp.module()->parameters()[5].sum() * 1e38 * 1e10;
      each_scaler.scale(loss).backward();
      const bool done = each_scaler.step(each);
      each_scaler.update();
      return done;
    };
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(step(plain_ddp, plain, plain_scaler, i), i != 2);
      EXPECT_EQ(step(ddp, optimizer, scaler, i), i != 2);
      EXPECT_EQ(scaler.current_scale(), plain_scaler.current_scale());
      EXPECT_TRUE(same_bits(values_of(*plain_model), values_of(*model))) << i;
    }
  });
}

TEST(DistributedOptimizer, is_saved_whole_and_goes_on_with_any_number_of_ranks) {
  on_every_rank([](World& world) {
    const auto path = common_path(world, "whole");
    auto alone = world.group().split(world.rank(), 0, {.name = "alone"});
    const AdamWOptions options{.lr = 1e-2, .weight_decay = 0.1, .amsgrad = true};
    // Every rank has the same data, so that a single rank computes the same.
    const auto train = [](auto& ddp, auto& optimizer, int from, int to) {
      for (int i = from; i < to; ++i) kStep(ddp, optimizer, features_of(0, i));
    };
    Wide model;
    DistributedDataParallel ddp(model, world.group());
    DistributedOptimizer<AdamW> optimizer(ddp, options);
    train(ddp, optimizer, 0, 3);
    save(path, {.model = model, .optimizer = optimizer, .group = world.group()});
    train(ddp, optimizer, 3, 6);
    const auto expected = values_of(*model);

    {  // one rank, distributed
      Wide other;
      DistributedDataParallel other_ddp(other, alone);
      DistributedOptimizer<AdamW> other_optimizer(other_ddp, {.lr = 5});
      load(path, {.model = other, .optimizer = other_optimizer});
      EXPECT_EQ(other_optimizer.options().lr, 1e-2);
      train(other_ddp, other_optimizer, 3, 6);
      if ((world.size() & (world.size() - 1)) == 0) {  // for other sizes, averages are rounded
        EXPECT_TRUE(same_bits(expected, values_of(*other)));
      }
      EXPECT_TRUE(all_close(expected, values_of(*other), 1e-5));
    }
    {  // plain, and back
      Wide other;
      AdamW plain(other->parameters(), options);
      load(path, {.model = other, .optimizer = plain});
      world.group().barrier().wait();
      save(path, {.model = other, .optimizer = plain, .group = world.group()});
      Wide again;
      DistributedDataParallel again_ddp(again, world.group());
      DistributedOptimizer<AdamW> again_optimizer(again_ddp, options);
      load(path, {.model = again, .optimizer = again_optimizer, .group = world.group()});
      train(again_ddp, again_optimizer, 3, 6);
      EXPECT_TRUE(same_bits(expected, values_of(*again)));
    }
    EXPECT_THAT(error_of<ConfigError>([&] { save(path, {.model = model, .optimizer = optimizer}); }),
                HasSubstr("call save on every rank"));
    if (world.size() > 1) {
      EXPECT_THAT(error_of<ConfigError>(
                      [&] { save(path, {.model = model, .optimizer = optimizer, .group = alone}); }),
                  HasSubstr("call save on every rank"));
    }
    world.group().barrier().wait();
    if (world.is_main()) std::filesystem::remove(path);
  });
}

TEST(DistributedOptimizer, torch_save_holds_all_of_it) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    DistributedOptimizer<SGD> optimizer(ddp, {.lr = 0.1, .momentum = 0.9});
    const auto input = numbers(1, {4, 6});
    for (int i = 0; i < 3; ++i) kStep(ddp, optimizer, input);
    std::stringstream stream;
    torch::save(optimizer, stream);
    Mlp other;
    DistributedDataParallel other_ddp(other, world.group());
    {
      torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < other->parameters().size(); ++i)
        other->parameters()[i].copy_(model->parameters()[i]);
    }
    DistributedOptimizer<SGD> other_optimizer(other_ddp, {.lr = 7});
    torch::load(other_optimizer, stream);
    kStep(ddp, optimizer, input);
    kStep(other_ddp, other_optimizer, input);
    EXPECT_TRUE(same_bits(values_of(*model), values_of(*other)));
  });
}

// Parameters of two dtypes, whose gradients share buckets, and a complex one.
struct MixedImpl : torch::nn::Module {
  MixedImpl() : narrow(6, 5), wide(5, 4) {
    register_module("narrow", narrow);
    register_module("wide", wide);
    phase = register_parameter("phase", at::zeros({4}, at::kComplexFloat));
    fill_parameters(*narrow, 700);
    fill_parameters(*wide, 710);
    narrow->to(at::kBFloat16);
    torch::NoGradGuard no_grad;
    phase.copy_(at::complex(numbers(720, {4}), numbers(721, {4})));
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::view_as_real(wide(narrow(x.to(at::kBFloat16)).to(at::kFloat)) * phase);
  }
  torch::nn::Linear narrow, wide;
  at::Tensor phase;
};
TORCH_MODULE(Mixed);

TEST(DistributedOptimizer, takes_parameters_of_several_types) {
  on_every_rank([](World& world) {
    for (const int micro_batches : {1, 2})
      expect_the_same_bits<SGD, Mixed>(
          world, SGDOptions{.lr = 0.1, .momentum = 0.9},
          [&](auto& ddp, auto& optimizer, int i) {
            optimizer.zero_grad();
            for (int m = 0; m < micro_batches; ++m)
              ddp(numbers(9990 + i + 10 * (2 * world.rank() + m), {4, 6})).square().mean().backward();
            optimizer.step();
          },
          {.micro_batches = micro_batches});
    Mixed model, plain_model;
    DistributedDataParallel ddp(model, world.group()), plain_ddp(plain_model, world.group());
    DistributedOptimizer<SGD> optimizer(ddp);
    const auto input = numbers(1 + world.rank(), {4, 6});
    ddp(input).square().mean().backward();
    plain_ddp(input).square().mean().backward();
    double expected = 0;
    for (const auto& parameter : plain_model->parameters())
      expected += parameter.grad().abs().to(at::kDouble).square().sum().item<double>();
    EXPECT_NEAR(optimizer.clip_grad_norm(1).item<double>(), std::sqrt(expected), 1e-5 * std::sqrt(expected));
  });
}

TEST(DistributedOptimizer, what_is_dropped_is_not_in_a_later_step) {
  on_every_rank([](World& world) {
    Wide plain_model, model;
    DistributedDataParallel plain_ddp(plain_model, world.group()), ddp(model, world.group());
    SGD plain(plain_model->parameters(), {.lr = 0.1});
    DistributedOptimizer<SGD> optimizer(ddp, {.lr = 0.1});
    {
      auto quiet = ddp.no_sync();
      ddp(features_of(world.rank(), 70)).square().mean().backward();
    }
    EXPECT_THAT(error_of<ConfigError>([&] { optimizer.step(); }), HasSubstr("was not averaged"));
    kStep(ddp, optimizer, features_of(world.rank(), 0));
    kStep(plain_ddp, plain, features_of(world.rank(), 0));
    EXPECT_TRUE(same_bits(values_of(*plain_model), values_of(*model)));
    if (world.size() == 1) return;
    // The last step of a rank with data is skipped; the rank then follows its peers.
    const auto train = [&](auto& each_ddp, auto& each) {
      each_ddp.join(
          [&] {
            for (int i = 0; i < 2 + world.rank() % 2; ++i) {
              each.zero_grad();
              each_ddp(features_of(world.rank(), i)).square().mean().backward();
              if (i != 1) each.step();
            }
          },
          {.step = [&] { each.step(); }});
    };
    train(plain_ddp, plain);
    train(ddp, optimizer);
    EXPECT_TRUE(same_bits(values_of(*plain_model), values_of(*model)));
  });
}

TEST(DistributedOptimizer, leaves_everything_as_it_was_when_it_is_gone_or_was_never_made) {
  on_every_rank([](World& world) {
    Wide plain_model, model;
    DistributedDataParallel plain_ddp(plain_model, world.group()), ddp(model, world.group());
    AdamW plain(plain_model->parameters(), {.lr = 1e-2});
    EXPECT_THAT(error_of<ConfigError>([&] { DistributedOptimizer<AdamW> wrong(ddp, {.capturable = true}); }),
                HasSubstr("does not support capturable"));
    EXPECT_THAT(error_of<ConfigError>([&] { DistributedOptimizer<AdamW> wrong(ddp, {.lr = -1}); }),
                HasSubstr("lr: expected 0 or more, got -1"));
    const bool share = world.size() == 1 || world.group().backend(at::kCPU) == "shm";
    { DistributedOptimizer<AdamW> gone(ddp, {}, {.share_weights = share}); }
    ddp.register_comm_hook(allreduce_hook());  // works as if there had never been an optimizer
    AdamW again(model->parameters(), {.lr = 1e-2});
    for (int i = 0; i < 3; ++i) {
      kStep(plain_ddp, plain, features_of(world.rank(), i));
      kStep(ddp, again, features_of(world.rank(), i));
      world.group().barrier().wait();
      EXPECT_TRUE(same_bits(values_of(*plain_model), values_of(*model)));
    }
  });
}

TEST(DistributedOptimizer, parameters_that_move_and_a_ddp_that_is_gone_are_told) {
  on_every_rank([](World& world) {
    Mlp model;
    auto ddp = std::make_unique<DistributedDataParallel<Mlp>>(model, world.group());
    DistributedOptimizer<SGD> optimizer(*ddp, {.lr = 0.1});
    const auto before = model->second->weight.detach();
    model->second->weight.set_data(before.clone());
    EXPECT_THAT(
        error_of<ConfigError>([&] { optimizer.step(); }),
        AllOf(HasSubstr("'second.weight'"), HasSubstr("has moved in memory"), HasSubstr("lockstep::load")));
    model->second->weight.set_data(before);
    optimizer.step();
    ddp.reset();
    model->forward(numbers(1, {4, 6})).square().mean().backward();
    EXPECT_THAT(error_of<ConfigError>([&] { optimizer.step(); }), HasSubstr("was destroyed"));
    model->zero_grad();
    DistributedDataParallel late(model, world.group());
    late(numbers(1, {4, 6})).square().mean().backward();
    EXPECT_THAT(error_of<ConfigError>([&] { DistributedOptimizer<SGD> too_late(late); }),
                AllOf(HasSubstr("'first.weight' already has a gradient"), HasSubstr("zero_grad()")));
    if (world.size() == 1) return;
    model->zero_grad();
    EXPECT_THAT(error_of<ConfigError>(
                    [&] { DistributedOptimizer<SGD> uneven(late, {.lr = 0.1 * (1 + world.rank())}); }),
                AllOf(HasSubstr("options differ between ranks"), HasSubstr("lr 0.2")));
    EXPECT_THAT(error_of<ConfigError>(
                    [&] { DistributedOptimizer<SGD> uneven(late, {.momentum = 0.1 * world.rank()}); }),
                HasSubstr("momentum 0.1"));
  });
}

TEST(DistributedOptimizer, zero_grad_drops_gradients_of_parameters_in_no_group) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    DistributedOptimizer<SGD> optimizer(ddp,
                                        std::vector{SGD::group(model->third->parameters(), {.lr = 0.1})});
    const auto input = numbers(1, {4, 6});
    ddp(input).square().mean().backward();
    const auto once = optimizer.clip_grad_norm(1e9);
    optimizer.zero_grad();
    ddp(input).square().mean().backward();
    EXPECT_TRUE(at::equal(optimizer.clip_grad_norm(1e9), once));
    // A reference to the options stays valid after loading.
    auto& options = static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options());
    std::stringstream stream;
    torch::save(optimizer, stream);
    options.lr(7);
    torch::load(optimizer, stream);
    EXPECT_EQ(options.lr(), 0.1);
  });
}

struct WritesImpl : torch::nn::Module {
  WritesImpl() : inner(6, 3) { register_module("inner", inner); }
  at::Tensor forward(const at::Tensor& x) {
    if (writes) {
      torch::NoGradGuard no_grad;
      inner->weight.mul_(0.5);
    }
    return inner(x);
  }
  torch::nn::Linear inner;
  bool writes = false;
};
TORCH_MODULE(Writes);

TEST(DistributedOptimizer, shared_weights_are_one_copy_with_the_same_bits) {
  on_every_rank([](World& world) {
    const auto step = [&](auto& ddp, auto& optimizer, int i) {
      kStep(ddp, optimizer, features_of(world.rank(), i));
    };
    if (world.size() > 1 && world.group().backend(at::kCPU) != "shm") {
      Mlp model;
      DistributedDataParallel ddp(model, world.group());
      EXPECT_THAT(error_of<ConfigError>(
                      [&] { DistributedOptimizer<SGD> optimizer(ddp, {}, {.share_weights = true}); }),
                  HasSubstr("expected backend 'shm'"));
      return;
    }
    const DistributedOptimizerOptions sharing{.share_weights = true};
    expect_the_same_bits<AdamW, Wide>(world, AdamWOptions{.lr = 1e-2}, step, {}, sharing);
    expect_the_same_bits<SGD, Wide>(world, SGDOptions{.lr = 0.1, .momentum = 0.9}, step, {}, sharing);

    Writes model;
    DistributedDataParallel ddp(model, world.group());
    DistributedOptimizer<SGD> optimizer(ddp, {.lr = 0.1}, sharing);
    kStep(ddp, optimizer, numbers(1, {4, 6}));
    if (world.size() == 1) return;
    // A write by one rank is visible to all.
    world.group().barrier().wait();
    if (world.is_main()) {
      torch::NoGradGuard no_grad;
      model->inner->weight.fill_(42);
    }
    world.group().barrier().wait();
    EXPECT_TRUE((model->inner->weight == 42).all().item<bool>());
    world.group().barrier().wait();
    model->writes = true;
    EXPECT_THAT(error_of<ConfigError>([&] { ddp(numbers(1, {4, 6})); }),
                AllOf(HasSubstr("'inner.weight'"), HasSubstr("share_weights")));
    world.group().barrier().wait();
  });
}

TEST(DistributedOptimizer, misuse_is_told) {
  on_every_rank([](World& world) {
    Mlp model, other;
    DistributedDataParallel ddp(model, world.group());
    EXPECT_THAT(error_of<ConfigError>([&] {
                  DistributedDataParallel fixed(other, world.group(), {.static_graph = true});
                  DistributedOptimizer<SGD> optimizer(fixed);
                }),
                HasSubstr("static_graph"));
    EXPECT_THAT(error_of<ConfigError>([&] {
                  DistributedDataParallel another(other, world.group());
                  DistributedOptimizer<SGD> optimizer(another,
                                                      std::vector{SGD::group(model->parameters(), {})});
                }),
                HasSubstr("its DistributedDataParallel does not reduce"));
    EXPECT_THAT(error_of<ConfigError>([&] {
                  struct TwiceImpl : torch::nn::Module {
                    TwiceImpl() {
                      auto both = at::ones({20});
                      register_parameter("one", both.narrow(0, 0, 15));
                      register_parameter("two", both.narrow(0, 10, 10));
                    }
                  };
                  DistributedDataParallel twice(std::make_shared<TwiceImpl>(), world.group());
                  DistributedOptimizer<SGD> optimizer(twice);
                }),
                AllOf(HasSubstr("'one'"), HasSubstr("'two'"), HasSubstr("share memory")));
    DistributedOptimizer<SGD> optimizer(ddp, {.lr = 0.1});
    EXPECT_THAT(error_of<ConfigError>([&] { DistributedOptimizer<SGD> second(ddp); }),
                HasSubstr("already has one"));
    optimizer.add_param_group(torch::optim::OptimizerParamGroup(other->parameters()));
    EXPECT_THAT(error_of<ConfigError>([&] { optimizer.step(); }), HasSubstr("was added"));
  });
}

TEST(Share, is_one_tensor_for_all_ranks) {
  on_every_rank([](World& world) {
    auto group = world.group();
    if (group.size() > 1 && group.backend(at::kCPU) != "shm") {
      EXPECT_THAT(error_of<ConfigError>([&] { (void)group.share({3}); }), HasSubstr("cannot be shared"));
      return;
    }
    auto tensor = group.share({world.size(), 1000}, at::kDouble);
    EXPECT_EQ(tensor.sum().item<double>(), 0);
    group.barrier().wait();
    tensor[world.rank()].fill_(world.rank() + 1);
    group.barrier().wait();
    for (int r = 0; r < world.size(); ++r) EXPECT_TRUE((tensor[r] == r + 1).all().item<bool>());
    // Another rank may release it first.
    if (world.is_main()) tensor.reset();
    group.barrier().wait();
    if (tensor.defined()) {
      EXPECT_TRUE((tensor[0] == 1).all().item<bool>());
    }
    EXPECT_EQ(group.share({0, 5}).numel(), 0);
    EXPECT_THAT(error_of<ConfigError>([&] { (void)group.share({-1}); }), HasSubstr("got [-1]"));
    if (world.size() == 1) return;
    EXPECT_THAT(error_of<ConfigError>([&] { (void)group.share({world.is_main() ? 4 : 5}); }),
                HasSubstr("asks for Float [5], rank 0 for Float [4]"));
    EXPECT_THAT(error_of<ConfigError>([&] { (void)group.share({world.is_main() ? 0 : 5}); }),
                HasSubstr("rank 0 for Float [0]"));
  });
}

}  // namespace
}  // namespace lockstep::testing
