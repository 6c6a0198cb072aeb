// Gradients that are reduced in place: they have the same bits as with buckets, even if the program changes
// p.grad().
#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

at::Tensor batch_of(int rank, int step) { return numbers(7000 + 100 * step + rank, {4, 20}); }

bool in_place_here(World& world) { return world.size() > 1 && world.group().backend(at::kCPU) == "shm"; }

// Runs the same training with and without copies, and compares. step runs one step.
template <typename Model, typename Step>
void expect_the_bits_of_buckets(World& world, DdpOptions options, const Step& step) {
  std::vector<std::vector<at::Tensor>> values, gradients;
  for (const bool zero_copy : {false, true}) {
    options.zero_copy = zero_copy;
    Model model;
    DistributedDataParallel ddp(model, world.group(), options);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    for (int i = 0; i < 5; ++i) step(ddp, optimizer, i);
    values.push_back(values_of(*model));
    gradients.push_back(gradients_of(*model));
    EXPECT_EQ(ddp.counts().in_place > 0, zero_copy && in_place_here(world));
    EXPECT_EQ(ddp.counts().staged, 0);
  }
  EXPECT_TRUE(same_bits(values[0], values[1]));
  EXPECT_TRUE(same_bits(gradients[0], gradients[1]));
}

TEST(DdpInPlace, both_forms_of_zero_grad_have_the_bits_of_buckets) {
  on_every_rank([](World& world) {
    for (const bool to_none : {true, false})
      expect_the_bits_of_buckets<Wide>(world, {}, [&](auto& ddp, auto& optimizer, int i) {
        optimizer.zero_grad(to_none);
        ddp(batch_of(world.rank(), i)).square().mean().backward();
        optimizer.step();
      });
  });
}

TEST(DdpInPlace, gradients_are_in_shared_memory_and_are_held_once) {
  on_every_rank([](World& world) {
    Wide model;
    DistributedDataParallel ddp(model, world.group());
    for (int i = 0; i < 3; ++i) {
      model->zero_grad();
      if (in_place_here(world)) {
        EXPECT_FALSE(detail::in_shared_memory(model->second->weight));
      }
      ddp(batch_of(world.rank(), i)).square().mean().backward();
      EXPECT_EQ(detail::in_shared_memory(model->second->weight.grad()), in_place_here(world));
      if (in_place_here(world)) {
        EXPECT_EQ(model->second->weight.grad().storage().use_count(), 1U);
      }
    }
    EXPECT_EQ(ddp.counts().in_place, in_place_here(world) ? 6 : 0);  // Two weights, three steps.
    EXPECT_EQ(ddp.counts().copied, 0);
  });
}

TEST(DdpInPlace, accumulation_under_no_sync_has_the_bits_of_buckets) {
  on_every_rank([](World& world) {
    for (const bool to_none : {true, false})
      expect_the_bits_of_buckets<Wide>(world, {}, [&](auto& ddp, auto& optimizer, int i) {
        optimizer.zero_grad(to_none);
        {
          const auto local = ddp.no_sync();
          ddp(batch_of(world.rank(), 10 * i)).square().mean().backward();
        }
        ddp(batch_of(world.rank(), 10 * i + 1)).square().mean().backward();
        optimizer.step();
      });
  });
}

TEST(DdpInPlace, hooks_and_weights_of_samples_have_the_bits_of_buckets) {
  on_every_rank([](World& world) {
    std::vector<std::vector<at::Tensor>> values;
    for (const bool zero_copy : {false, true}) {
      Wide model;
      DistributedDataParallel ddp(model, world.group(), {.zero_copy = zero_copy});
      ddp.register_comm_hook(bf16_compress_hook());
      torch::optim::SGD optimizer(model->parameters(), 0.05);
      ddp.join([&] {
        for (int i = 0; i < 2 + world.rank() % 2; ++i) {
          optimizer.zero_grad();
          ddp(batch_of(world.rank(), i)).square().mean().backward();
          optimizer.step();
        }
      });
      values.push_back(values_of(*model));
    }
    EXPECT_TRUE(same_bits(values[0], values[1]));
  });
}

TEST(DdpInPlace, hooks_that_keep_a_state_leave_replicas_equal) {
  on_every_rank([](World& world) {
    for (const bool to_none : {true, false}) {
      Wide model;
      DistributedDataParallel ddp(model, world.group());
      ddp.register_comm_hook(power_sgd_hook({.matrix_approximation_rank = 2, .start_power_sgd_iter = 2}));
      torch::optim::SGD optimizer(model->parameters(), 0.05);
      for (int i = 0; i < 6; ++i) {
        optimizer.zero_grad(to_none);
        ddp(batch_of(world.rank(), i)).square().mean().backward();
        optimizer.step();
        check_replicas(*model, world.group());
      }
    }
  });
}

struct ForkImpl : torch::nn::Module {
  ForkImpl() : left(kWide, kWide), right(kWide, kWide), never(kWide, kWide) {
    register_module("left", left);
    register_module("right", right);
    register_module("never", never);
    fill_parameters(*this, 600);
  }
  at::Tensor forward(const at::Tensor& x, bool go_left) { return (go_left ? left : right)(x).tanh(); }
  torch::nn::Linear left, right, never;
};
TORCH_MODULE(Fork);

TEST(DdpInPlace, parameters_without_a_gradient_have_what_buckets_leave) {
  on_every_rank([](World& world) {
    for (const bool to_none : {true, false})
      expect_the_bits_of_buckets<Fork>(world, {.find_unused_parameters = true},
                                       [&](auto& ddp, auto& optimizer, int i) {
                                         optimizer.zero_grad(to_none);
                                         const bool left = i < 2 || (i + world.rank()) % 2 == 0;
                                         ddp(numbers(900 + i, {3, kWide}), left).square().mean().backward();
                                         EXPECT_FALSE(ddp.module()->never->weight.grad().defined());
                                         optimizer.step();
                                       });
  });
}

// The gradients of `flat` and another parameter are views of the same memory.
struct AliasImpl : torch::nn::Module {
  AliasImpl() {
    flat = register_parameter("flat", numbers(1, {kWide * kWide}));
    square = register_parameter("square", numbers(2, {kWide, kWide}));
    another = register_parameter("another", numbers(5, {kWide * kWide}));
    early = register_parameter("early", numbers(6, {kWide * kWide}));
    tied = register_parameter("tied", numbers(3, {kWide, kWide}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto sum = flat.view({kWide, kWide}) + another.view({kWide, kWide});
    // early's gradient is a view of a tensor that square's gradient is computed from.
    const auto later = early.view({kWide, kWide}) + square.tanh();
    return at::mm(x, sum) + at::mm(x, later) + at::mm(at::mm(x, tied), tied.t());
  }
  at::Tensor flat, square, another, early, tied;
};
TORCH_MODULE(Alias);

TEST(DdpInPlace, gradients_that_are_views_of_one_another_are_told_apart) {
  on_every_rank([](World& world) {
    for (const bool to_none : {true, false})
      expect_the_bits_of_buckets<Alias>(world, {}, [&](auto& ddp, auto& optimizer, int i) {
        optimizer.zero_grad(to_none);
        ddp(numbers(800 + i * 10 + world.rank(), {3, kWide})).square().mean().mul(1e-4).backward();
        optimizer.step();
      });
    // LibTorch adds in place to gradients left by a pass without communication.
    expect_the_bits_of_buckets<Alias>(world, {}, [&](auto& ddp, auto& optimizer, int i) {
      optimizer.zero_grad();
      {
        const auto local = ddp.no_sync();
        ddp(numbers(700 + i * 10 + world.rank(), {3, kWide})).square().mean().mul(1e-4).backward();
      }
      ddp(numbers(800 + i * 10 + world.rank(), {3, kWide})).square().mean().mul(1e-4).backward();
      optimizer.step();
    });
  });
}

TEST(DdpInPlace, after_a_pass_other_tensors_are_the_processs_own) {
  on_every_rank([](World& world) {
    Wide model;
    DistributedDataParallel ddp(model, world.group());
    {
      const auto local = ddp.no_sync();
      ddp(batch_of(world.rank(), 0)).square().mean().backward();
    }
    EXPECT_FALSE(detail::in_shared_memory(model->second->weight.clone()));
    ddp(batch_of(world.rank(), 1)).square().mean().backward();
    EXPECT_FALSE(detail::in_shared_memory(model->second->weight.clone()));
  });
}

std::vector<float>& foreign_memory() {
  thread_local std::vector<float> memory(kWide * kWide);
  return memory;
}

// Its gradient is in memory that LibTorch did not allocate.
struct Foreign : torch::autograd::Function<Foreign> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& weight) {
    return weight * 2;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               const torch::autograd::tensor_list& gradients) {
    auto memory = at::from_blob(foreign_memory().data(), {kWide, kWide}, [](void*) {}, at::kFloat);
    memory.copy_(gradients[0]).mul_(2);
    return {memory};
  }
};
struct ForeignWeightImpl : torch::nn::Module {
  ForeignWeightImpl() { weight = register_parameter("weight", numbers(4, {kWide, kWide})); }
  at::Tensor forward(const at::Tensor& x) { return at::mm(x, Foreign::apply(weight)); }
  at::Tensor weight;
};
TORCH_MODULE(ForeignWeight);

TEST(DdpInPlace, a_gradient_in_foreign_memory_is_staged_and_counted) {
  on_every_rank([](World& world) {
    ForeignWeight model;
    DistributedDataParallel ddp(model, world.group());
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      ddp(numbers(60 + step, {3, kWide})).sum().backward();
      ForeignWeight one;
      one(numbers(60 + step, {3, kWide})).sum().backward();
      EXPECT_TRUE(at::allclose(model->weight.grad(), one->weight.grad(), 1e-5, 1e-5));
    }
    if (in_place_here(world)) {
      EXPECT_EQ(ddp.counts().staged, 3);
    }
  });
}

TEST(DdpInPlace, a_gradient_outlives_the_ranks_ddp) {
  on_every_rank([](World& world) {
    at::Tensor gradient, copy;
    {
      Wide model;
      DistributedDataParallel ddp(model, world.group());
      ddp(batch_of(world.rank(), 0)).square().mean().backward();
      gradient = model->second->weight.grad();
      copy = gradient.clone();
    }
    world.group().barrier().wait();
    EXPECT_TRUE(at::equal(gradient, copy));
  });
}

}  // namespace
}  // namespace lockstep::testing
