// DistributedOptimizer with master_weights: each rank keeps masters of its own slices.
#include "optim/distributed_optimizer.h"

namespace lockstep::testing {
namespace {

// bfloat16 and float32 parameters, some of several blocks of 4096, divided between ranks.
struct HalvesImpl : torch::nn::Module {
  HalvesImpl() : first(20, 600), second(600, 30), last(30, 3) {
    register_module("first", first);
    register_module("second", second);
    register_module("last", last);
    fill_parameters(*this, 730);
    first->to(at::kBFloat16);
    second->to(at::kBFloat16);
  }
  at::Tensor forward(const at::Tensor& x) {
    return last(second(first(x.to(at::kBFloat16)).tanh()).to(at::kFloat));
  }
  torch::nn::Linear first, second, last;
};
TORCH_MODULE(Halves);

TEST(DistributedOptimizerMasters, have_the_bits_of_the_plain_ones) {
  on_every_rank([](World& world) {
    const auto step = [&](auto& ddp, auto& optimizer, int i) {
      kStep(ddp, optimizer, features_of(world.rank(), i));
    };
    const bool share = world.size() > 1 && world.group().backend(at::kCPU) == "shm";
    for (const auto way : {Implementation::single, Implementation::fused})
      for (const bool shared : {false, share}) {
        const DistributedOptimizerOptions sharding{.share_weights = shared};
        expect_the_same_bits<AdamW, Halves>(
            world,
            AdamWOptions{.lr = 1e-4, .weight_decay = 0.1, .master_weights = true, .implementation = way},
            step, {}, sharding);
        expect_the_same_bits<Adam, Halves>(
            world, AdamOptions{.lr = 1e-4, .amsgrad = true, .master_weights = true, .implementation = way},
            step, {}, sharding);
        expect_the_same_bits<SGD, Halves>(
            world, SGDOptions{.lr = 1e-3, .momentum = 0.9, .master_weights = true, .implementation = way},
            step, {}, sharding);
        expect_the_same_bits<SGD, Halves>(
            world, SGDOptions{.lr = 1e-3, .master_weights = true, .implementation = way}, step, {}, sharding);
      }
  });
}

TEST(DistributedOptimizerMasters, are_of_this_ranks_part_and_follow_the_parameters) {
  on_every_rank([](World& world) {
    Halves plain_model, model;
    DistributedDataParallel plain_ddp(plain_model, world.group()), ddp(model, world.group());
    const AdamWOptions options{.lr = 1e-4, .master_weights = true};
    AdamW plain(plain_model->parameters(), options);
    DistributedOptimizer<AdamW> optimizer(ddp, options);
    const auto both = [&](int i) {
      kStep(plain_ddp, plain, features_of(world.rank(), i));
      kStep(ddp, optimizer, features_of(world.rank(), i));
    };
    for (int i = 0; i < 3; ++i) both(i);
    std::int64_t mastered = 0, all = 0;
    for (const auto& slice : optimizer.param_groups()[0].params()) {
      const auto master = optimizer.master(slice);
      if (slice.scalar_type() != at::kBFloat16 || slice.numel() == 0) {
        EXPECT_FALSE(master.defined());
        continue;
      }
      EXPECT_TRUE(at::equal(master.to(at::kBFloat16), slice));
      EXPECT_FALSE(at::equal(master, slice.to(at::kFloat)));
      mastered += master.numel();
    }
    for (const auto& parameter : model->parameters())
      if (parameter.scalar_type() == at::kBFloat16) all += parameter.numel();
    auto sum = at::tensor(mastered);
    world.group().all_reduce(sum).wait();
    EXPECT_EQ(sum.item<std::int64_t>(), all);

    // Modify one element of each; the masters of the other elements must keep their extra precision.
    torch::NoGradGuard no_grad;
    for (auto* each : {&plain_model, &model})
      for (auto& parameter : (*each)->parameters()) parameter.view(-1)[parameter.numel() / 2] = 2;
    torch::AutoGradMode grad(true);
    for (int i = 3; i < 6; ++i) {
      both(i);
      ASSERT_TRUE(same_bits(values_of(*plain_model), values_of(*model))) << "step " << i;
    }
  });
}

TEST(DistributedOptimizerMasters, follow_another_rank_that_writes_to_shared_weights) {
  on_every_rank([](World& world) {
    if (world.size() > 1 && world.group().backend(at::kCPU) != "shm") return;
    Halves model;
    DistributedDataParallel ddp(model, world.group());
    DistributedOptimizer<AdamW> optimizer(ddp, {.lr = 1e-4, .weight_decay = 0, .master_weights = true},
                                          {.share_weights = true});
    for (int i = 0; i < 2; ++i) kStep(ddp, optimizer, features_of(world.rank(), i));
    world.group().barrier().wait();
    if (world.is_main()) {
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.fill_(3);
    }
    world.group().barrier().wait();
    optimizer.param_groups()[0].options().set_lr(0);
    kStep(ddp, optimizer, features_of(world.rank(), 2));
    for (const auto& parameter : model->parameters()) EXPECT_TRUE((parameter == 3).all().item<bool>());
    for (const auto& slice : optimizer.param_groups()[0].params())
      if (const auto master = optimizer.master(slice); master.defined()) {
        EXPECT_TRUE((master == 3).all().item<bool>());
      }
  });
}

TEST(DistributedOptimizerMasters, are_saved_whole_and_go_on_with_any_number_of_ranks) {
  on_every_rank([](World& world) {
    const auto path = common_path(world, "masters");
    auto alone = world.group().split(world.rank(), 0, {.name = "alone"});
    // One group with masters and one without, with gradients in the same bucket.
    const auto groups_of = [](Halves& each) {
      std::vector<at::Tensor> with, without{each->first->bias, each->last->bias};
      for (const auto& item : each->named_parameters())
        if (item.value().dim() > 1 || item.key() == "second.bias") with.push_back(item.value());
      return std::vector{AdamW::group(with, {.lr = 1e-4, .amsgrad = true, .master_weights = true}),
                         AdamW::group(without, {.lr = 1e-2})};
    };
    const auto train = [](auto& ddp, auto& optimizer, int from, int to) {
      for (int i = from; i < to; ++i)
        kStep(ddp, optimizer, features_of(0, i));  // the same data on every rank
    };
    Halves model;
    DistributedDataParallel ddp(model, world.group());
    DistributedOptimizer<AdamW> optimizer(ddp, groups_of(model));
    train(ddp, optimizer, 0, 3);
    save(path, {.model = model, .optimizer = optimizer, .group = world.group()});
    std::stringstream stream;
    torch::save(optimizer, stream);
    const auto saved = values_of(*model);
    train(ddp, optimizer, 3, 6);
    const auto expected = values_of(*model);
    const bool exact = (world.size() & (world.size() - 1)) == 0;  // for other sizes, averages are rounded

    {  // one rank, distributed
      Halves other;
      DistributedDataParallel other_ddp(other, alone);
      DistributedOptimizer<AdamW> other_optimizer(other_ddp, groups_of(other));
      load(path, {.model = other, .optimizer = other_optimizer});
      train(other_ddp, other_optimizer, 3, 6);
      EXPECT_TRUE(!exact || same_bits(expected, values_of(*other)));
    }
    {  // plain, and back
      Halves other;
      AdamW plain(groups_of(other));
      load(path, {.model = other, .optimizer = plain});
      const auto master = plain.master(other->second->weight);
      ASSERT_TRUE(master.defined());
      EXPECT_TRUE(at::equal(master.to(at::kBFloat16), other->second->weight));
      EXPECT_FALSE(at::equal(master, other->second->weight.to(at::kFloat)));
      world.group().barrier().wait();
      save(path, {.model = other, .optimizer = plain, .group = world.group()});
      Halves again;
      DistributedDataParallel again_ddp(again, world.group());
      DistributedOptimizer<AdamW> again_optimizer(again_ddp, groups_of(again));
      load(path, {.model = again, .optimizer = again_optimizer, .group = world.group()});
      train(again_ddp, again_optimizer, 3, 6);
      EXPECT_TRUE(same_bits(expected, values_of(*again)));
    }
    {  // torch::save
      Halves other;
      DistributedDataParallel other_ddp(other, world.group());
      DistributedOptimizer<AdamW> other_optimizer(other_ddp, groups_of(other));
      torch::load(other_optimizer, stream);
      {
        torch::NoGradGuard no_grad;
        for (std::size_t i = 0; i < saved.size(); ++i) other->parameters()[i].copy_(saved[i]);
      }
      train(other_ddp, other_optimizer, 3, 6);
      EXPECT_TRUE(same_bits(expected, values_of(*other)));
    }
    world.group().barrier().wait();
    if (world.is_main()) std::filesystem::remove(path);
  });
}

}  // namespace
}  // namespace lockstep::testing
