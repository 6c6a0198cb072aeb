// Programs that change a model or its gradients without DistributedDataParallel's knowledge: it works, or it
// is an error before an update can be wrong.
#include <numeric>
#include <sstream>
#include <stdexcept>

#include <fmt/format.h>

#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

at::Tensor rows_of(int part, int rows = 5) { return numbers(3000 + part, {rows, 6}); }

void pass(DistributedDataParallel<Mlp>& ddp, int part) { ddp(rows_of(part)).square().mean().backward(); }

// The average gradient of these parts, each computed by a copy of the current model.
std::vector<at::Tensor> average_of(const Mlp& model, int first, int count) {
  std::vector<at::Tensor> sum;
  for (int part = first; part < first + count; ++part) {
    Mlp copy;
    copy->to(model->first->weight.scalar_type());
    auto parameters = copy->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      torch::NoGradGuard no_grad;
      parameters[i].copy_(model->parameters()[i]).requires_grad_(model->parameters()[i].requires_grad());
    }
    copy(rows_of(part).to(copy->first->weight.scalar_type())).square().mean().backward();
    const auto gradients = gradients_of(*copy);
    for (std::size_t i = 0; i < gradients.size(); ++i)
      if (sum.empty() || sum.size() <= i)
        sum.push_back(gradients[i]);
      else if (gradients[i].defined())
        sum[i] = sum[i] + gradients[i];
  }
  for (auto& each : sum)
    if (each.defined()) each = each / count;
  return sum;
}

// ---- sums of micro-batches ------------------------------------------------------------------------------------

TEST(DdpMisuse, gradients_cannot_be_used_in_the_middle_of_a_sum) {
  on_every_rank([](World& world) {
    for (auto& group : {world.group(), world.group({world.rank()})}) {
      Mlp model;
      DistributedDataParallel ddp(model, group, {.micro_batches = 4});
      const auto parameters = model->parameters();
      torch::optim::SGD sgd(parameters, 0.1);
      AdamW own(parameters, {.lr = 0.1});
      SGD own_sgd(parameters, {.lr = 0.1});
      GradScaler scaler;
      const int first = 4 * group.rank();
      for (int step = 0; step < 2; ++step) {  // In the second step gradients are views of buckets.
        pass(ddp, first), pass(ddp, first + 1);
        const auto before = values_of(*model);
        const auto missing = HasSubstr("2 of 4 micro-batches are missing");
        EXPECT_THAT(error_of<c10::Error>([&] { sgd.step(); }), missing);
        EXPECT_THAT(error_of<c10::Error>([&] { torch::nn::utils::clip_grad_norm_(parameters, 1); }), missing);
        EXPECT_THAT(error_of<ConfigError>([&] { own.step(); }), missing);
        EXPECT_THAT(error_of<ConfigError>([&] { own_sgd.step(); }), missing);
        EXPECT_THAT(error_of<ConfigError>([&] { clip_grad_norm(parameters, 1); }), missing);
        EXPECT_THAT(error_of<ConfigError>([&] { clip_grad_value(parameters, 1); }), missing);
        (void)scaler.scale(at::ones({}));
        EXPECT_THAT(error_of<ConfigError>([&] { scaler.unscale_(own); }), missing);
        EXPECT_TRUE(same_bits(before, values_of(*model)));
        // Unless cleared, the sum continues, even after a pass that reaches no parameter.
        auto x = rows_of(first).requires_grad_();
        (void)torch::autograd::grad({ddp(x).sum()}, {x});
        pass(ddp, first + 2), pass(ddp, first + 3);
        EXPECT_TRUE(all_close(gradients_of(*model), average_of(model, 0, 4 * group.size())));
        sgd.step();
        model->zero_grad();
      }
    }
  });
}

TEST(DdpMisuse, zero_grad_in_the_middle_of_a_sum_starts_it_again) {
  on_every_rank([](World& world) {
    Mlp model, reference;
    DistributedDataParallel ddp(model, world.group(), {.micro_batches = 4});
    DistributedDataParallel reference_ddp(reference, world.group(), {.micro_batches = 4});
    torch::optim::SGD optimizer(model->parameters(), 0.1), reference_optimizer(reference->parameters(), 0.1);
    for (const int batches : {6, 9})
      for (int epoch = 0; epoch < 2; ++epoch)
        for (int i = 0; i < batches; ++i) {
          if (i % 4 == 0) optimizer.zero_grad(), reference_optimizer.zero_grad();
          pass(ddp, 10 * world.rank() + i);
          if (i < batches / 4 * 4) pass(reference_ddp, 10 * world.rank() + i);
          if (i % 4 == 3) optimizer.step(), reference_optimizer.step();
        }
    EXPECT_TRUE(same_bits(values_of(*model), values_of(*reference)));
  });
}

TEST(DdpMisuse, a_sum_that_was_dropped_used_no_parameter) {
  on_every_rank([](World& world) {
    for (const bool cleared : {false, true}) {
      Mlp model;
      DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true, .micro_batches = 2});
      pass(ddp, 0);
      if (cleared)
        model->zero_grad();
      else
        ddp.discard_micro_batches();
      for (int part = 0; part < 2; ++part) {
        (void)ddp(rows_of(part));
        model->third(numbers(part, {5, 9})).sum().backward();
      }
      EXPECT_FALSE(model->first->weight.grad().defined());
      EXPECT_TRUE(model->third->weight.grad().defined());
    }
  });
}

TEST(DdpMisuse, a_sum_can_be_discarded) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group(), {.micro_batches = 2});
    ddp.discard_micro_batches();  // Without a sum to discard.
    pass(ddp, 2 * world.rank()), pass(ddp, 2 * world.rank() + 1);
    const auto before = gradients_of(*model);
    pass(ddp, 50);
    ddp.discard_micro_batches();
    EXPECT_TRUE(same_bits(before, gradients_of(*model)));
    model->zero_grad();
    pass(ddp, 2 * world.rank()), pass(ddp, 2 * world.rank() + 1);
    EXPECT_TRUE(same_bits(before, gradients_of(*model)));
  });
}

TEST(DdpMisuse, zero_grad_of_some_parameters_in_the_middle_of_a_sum_is_an_error) {
  on_every_rank([](World& world) {
    Mlp model;
    {
      DistributedDataParallel ddp(model, world.group(), {.micro_batches = 2});
      pass(ddp, world.rank());
      model->second->zero_grad();
      EXPECT_THAT(error_of<ConfigError>([&] { pass(ddp, world.rank()); }),
                  AllOf(HasSubstr("'second.weight', 'second.bias'"), HasSubstr("1 of 2 micro-batches")));
      model->zero_grad();
      pass(ddp, 2 * world.rank()), pass(ddp, 2 * world.rank() + 1);
      EXPECT_TRUE(all_close(gradients_of(*model), average_of(model, 0, 2 * world.size())));
      pass(ddp, 0);
    }
    // After DDP is destroyed, the model works normally.
    for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
    model(rows_of(0)).sum().backward();
  });
}

// ---- models that change ---------------------------------------------------------------------------------------

// Checks over a few steps that gradients are averaged and replicas stay equal.
void expect_averages(DistributedDataParallel<Mlp>& ddp, World& world) {
  auto& model = ddp.module();
  for (int step = 0; step < 3; ++step) {
    model->zero_grad();
    ddp(rows_of(world.rank()).to(model->first->weight.scalar_type())).square().mean().backward();
    const auto expected = average_of(model, 0, world.size());
    EXPECT_TRUE(all_close(gradients_of(*model), expected)) << step;
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters())
      if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.1);
  }
  check_replicas(*model, world.group());
}

TEST(DdpMisuse, a_model_may_be_loaded_cast_and_rebuilt_after_it_was_wrapped) {
  on_every_rank([](World& world) {
    for (const bool unused : {false, true}) {
      Mlp model, other;
      fill_parameters(*other, 900);
      std::stringstream file;
      torch::save(other, file);
      DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = unused});
      expect_averages(ddp, world);
      torch::load(model, file);
      EXPECT_TRUE(same_bits(values_of(*model), values_of(*other)));
      expect_averages(ddp, world);
      model->to(at::kDouble);
      expect_averages(ddp, world);
      torch::nn::Linear second(9, 9);
      // Rank 0's values are used again, as at construction.
      fill_parameters(*second, 50 + static_cast<std::uint64_t>(world.rank()));
      second->to(at::kDouble);
      model->second = model->replace_module("second", second);
      expect_averages(ddp, world);
    }
  });
}

// The second new module often lies where the first one was.
TEST(DdpMisuse, a_module_may_be_replaced_several_times_between_two_steps) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    for (int round = 0; round < 5; ++round) {
      model->zero_grad();
      expect_averages(ddp, world);
      for (int i = 0; i < 2; ++i) {
        torch::nn::Linear second(9, 9);
        fill_parameters(*second, 60);
        model->second = model->replace_module("second", second);
      }
    }
  });
}

struct GrowingImpl : torch::nn::Module {
  GrowingImpl() : linear(6, 3) {
    register_module("linear", linear);
    fill_parameters(*this, 70);
  }
  void grow() { scale = register_parameter("scale", at::ones({3})); }
  at::Tensor forward(const at::Tensor& x) { return scale.defined() ? linear(x) * scale : linear(x); }
  torch::nn::Linear linear;
  at::Tensor scale;
};
TORCH_MODULE(Growing);

TEST(DdpMisuse, a_module_may_get_a_new_parameter) {
  on_every_rank([](World& world) {
    Growing model, one;
    DistributedDataParallel ddp(model, world.group());
    ddp(rows_of(world.rank())).square().mean().backward();
    model->grow(), one->grow();
    model->zero_grad();
    ddp(rows_of(world.rank())).square().mean().backward();
    for (int rank = 0; rank < world.size(); ++rank)
      one(rows_of(rank)).square().mean().div(world.size()).backward();
    EXPECT_TRUE(all_close(gradients_of(*model), gradients_of(*one)));
  });
}

TEST(DdpMisuse, passes_in_no_sync_after_a_change_count) {
  on_every_rank([](World& world) {
    Mlp model, other;
    fill_parameters(*other, 900);
    std::stringstream file;
    torch::save(other, file);
    DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
    pass(ddp, world.rank());
    torch::load(model, file);
    model->zero_grad();
    {
      const auto guard = ddp.no_sync();
      pass(ddp, world.rank());
    }
    (void)ddp(rows_of(0));
    model->third(numbers(world.rank(), {5, 9})).sum().backward();  // the first two layers have no part in it
    check_replicas(*model, world.group());
    const auto mine = model->first->weight.grad().sum().item<double>();
    for (const double each : world.group().all_gather_values(mine)) EXPECT_EQ(each, mine);
  });
}

TEST(DdpMisuse, parameters_may_be_unfrozen_and_frozen_again) {
  on_every_rank([](World& world) {
    Mlp model;
    const auto freeze = [&](bool frozen) {
      for (auto& parameter : model->first->parameters()) parameter.requires_grad_(!frozen);
    };
    freeze(true);
    DistributedDataParallel ddp(model, world.group());
    for (const bool frozen : {true, false, true, false}) {
      freeze(frozen);
      model->zero_grad();
      expect_averages(ddp, world);
      EXPECT_EQ(model->first->weight.grad().defined(), !frozen);
    }
  });
}

TEST(DdpMisuse, a_model_that_changes_on_one_rank_is_an_error_on_all) {
  on_every_rank([](World& world) {
    if (world.size() == 1 || world.group().backend() == "gloo") return;
    std::vector<int> all(static_cast<std::size_t>(world.size()));
    std::iota(all.begin(), all.end(), 0);
    auto group = world.group(all);  // A separate group, because it fails.
    Mlp model;
    DistributedDataParallel ddp(model, group);
    pass(ddp, 0);
    if (world.rank() == 1) model->first->bias.requires_grad_(false);
    const auto text = error_of<CommError>([&] { pass(ddp, 0); });
    if (transport() == "fake_nccl")  // It compares c10d's calls, which have no tags.
      EXPECT_THAT(text, AllOf(HasSubstr("the ranks' calls differ in operation"),
                              HasSubstr("rank 1 called barrier()")));
    else
      EXPECT_THAT(
          text,
          HasSubstr("rank 1 called barrier(tag 'ddp model change: parameter 'first.bias' was frozen')"));
  });
}

TEST(DdpMisuse, a_model_may_not_change_in_a_sum_in_join_or_under_a_distributed_optimizer) {
  on_every_rank([](World& world) {
    Mlp model;
    DistributedDataParallel ddp(model, world.group(), {.micro_batches = 2});
    pass(ddp, 0);
    model->to(at::kDouble);
    const auto again = [&] { ddp(rows_of(0).to(at::kDouble)).sum().backward(); };
    EXPECT_THAT(error_of<ConfigError>(again),
                AllOf(HasSubstr("'first.weight' was replaced"), HasSubstr("1 of 2 micro-batches")));
    ddp.discard_micro_batches();
    again();
    model->to(at::kFloat);
    model->zero_grad();  // drops the sum as well
    pass(ddp, world.rank()), pass(ddp, world.rank());
    EXPECT_TRUE(all_close(gradients_of(*model), average_of(model, 0, world.size())));

    Mlp sharded;
    DistributedDataParallel sharded_ddp(sharded, world.group());
    DistributedOptimizer<SGD> optimizer(sharded_ddp, {.lr = 0.1});
    sharded->first->bias.requires_grad_(false);
    EXPECT_THAT(error_of<ConfigError>([&] { pass(sharded_ddp, 0); }),
                AllOf(HasSubstr("'first.bias' was frozen"), HasSubstr("new DistributedOptimizer")));
  });
}

// ---- gradients that would be lost -----------------------------------------------------------------------------

struct ForgetfulImpl : torch::nn::Module {
  ForgetfulImpl() : known(6, 3), forgotten(3, 3) { register_module("known", known); }
  at::Tensor forward(const at::Tensor& x) { return forgotten(known(x)); }
  torch::nn::Linear known, forgotten;
};
TORCH_MODULE(Forgetful);

TEST(DdpMisuse, a_module_that_was_not_registered_is_an_error) {
  on_every_rank([](World& world) {
    Forgetful model;
    DistributedDataParallel ddp(model, world.group());
    for (int i = 0; i < 2; ++i) {  // also if the program continues
      const auto text = error_of<ConfigError>([&] { ddp(rows_of(0)); });
      EXPECT_THAT(text, AllOf(HasSubstr("register_module"), ContainsRegex("shape \\[3(, 3)?\\]")));
    }
    {
      torch::NoGradGuard no_grad;
      ddp(rows_of(0));
    }
    // Allowed: an argument's graph, and parameters that another DistributedDataParallel reduces.
    model->register_module("forgotten", model->forgotten);
    Mlp first(6, 9, 6);
    DistributedDataParallel first_ddp(first, world.group());
    auto leaf = rows_of(0).requires_grad_();
    ddp(first_ddp(leaf)).sum().backward();
    Forgetful inner;
    DistributedDataParallel inner_ddp(inner->forgotten, world.group());
    DistributedDataParallel outer(inner, world.group());
    outer(rows_of(0));
  });
}

// Forces are gradients of an energy, which forward takes itself.
struct ForcesImpl : torch::nn::Module {
  ForcesImpl() : energy(6, 9, 1) { register_module("energy", energy); }
  at::Tensor forward(const at::Tensor& positions) {
    auto x = positions.detach().requires_grad_();
    return torch::autograd::grad({energy(x).sum()}, {x}, {}, true, true)[0];
  }
  Mlp energy;
};
TORCH_MODULE(Forces);

TEST(DdpMisuse, forward_may_take_gradients_of_its_argument) {
  on_every_rank([](World& world) {
    Forces model, one;
    DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
    ddp(rows_of(world.rank())).square().mean().backward();
    for (int rank = 0; rank < world.size(); ++rank)
      one(rows_of(rank)).square().mean().div(world.size()).backward();
    EXPECT_TRUE(all_close({model->energy->first->weight.grad()}, {one->energy->first->weight.grad()}));
  });
}

TEST(DdpMisuse, gradients_that_are_sharded_cannot_be_clipped_as_whole_ones) {
  on_every_rank([](World& world) {
    Mlp model, reference;
    DistributedDataParallel ddp(model, world.group()), reference_ddp(reference, world.group());
    DistributedOptimizer<SGD> optimizer(ddp, {.lr = 0.1});
    SGD reference_optimizer(reference->parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad(), reference_optimizer.zero_grad();
      pass(ddp, world.rank()), pass(reference_ddp, world.rank());
      const auto advice = HasSubstr("optimizer.clip_grad_norm(max_norm)");
      EXPECT_THAT(error_of<c10::Error>([&] { torch::nn::utils::clip_grad_norm_(model->parameters(), 0.01); }),
                  advice);
      EXPECT_THAT(error_of<ConfigError>([&] { clip_grad_norm(model->parameters(), 0.01); }), advice);
      EXPECT_THAT(error_of<ConfigError>([&] { clip_grad_value(model->parameters(), 0.01); }), advice);
      optimizer.step(), reference_optimizer.step();
      clip_grad_norm(model->parameters(), 0.01);  // There are no gradients to clip.
      EXPECT_TRUE(same_bits(values_of(*model), values_of(*reference)));
    }
    Mlp summed;
    DistributedDataParallel summing(summed, world.group(), {.micro_batches = 2});
    DistributedOptimizer<SGD> both(summing, {.lr = 0.1});
    pass(summing, 0);
    EXPECT_THAT(error_of<ConfigError>([&] { both.clip_grad_norm(1); }), HasSubstr("1 of 2 micro-batches"));
    EXPECT_THAT(error_of<ConfigError>([&] { both.step(); }), HasSubstr("1 of 2 micro-batches"));
    pass(summing, 0);
    both.step();
  });
}

TEST(DdpMisuse, a_gradient_penalty_works_as_the_error_about_create_graph_says) {
  on_every_rank([](World& world) {
    const auto penalized = [](const auto& model, int part) {
      auto x = rows_of(part).requires_grad_();
      const auto inner = torch::autograd::grad({model(x).sum()}, {x}, {}, true, true)[0];
      return (inner.norm() - 1).square();
    };
    Mlp model;
    DistributedDataParallel ddp(model, world.group());
    // The penalty does not depend on the last bias.
    model->third->bias.requires_grad_(false);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      penalized([&](const at::Tensor& x) { return ddp(x); }, world.rank()).backward();
      Mlp one;
      for (int rank = 0; rank < world.size(); ++rank)
        penalized([&](const at::Tensor& x) { return one(x); }, rank).div(world.size()).backward();
      EXPECT_TRUE(at::allclose(model->first->weight.grad(), one->first->weight.grad(), 1e-4, 1e-6)) << step;
    }
    EXPECT_THAT(error_of<ConfigError>([&] { ddp(rows_of(0)).sum().backward({}, std::nullopt, true); }),
                HasSubstr("torch::autograd::grad"));
  });
}

// ---- backward passes that end with an exception on some ranks -------------------------------------------------

struct ThrowsBelow : torch::autograd::Function<ThrowsBelow> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("as planned");
  }
};

struct RaggedImpl : torch::nn::Module {
  RaggedImpl() : first(6, 9), norm(9), second(9, 3) {
    register_module("first", first);
    register_module("norm", norm);
    register_module("second", second);
    fill_parameters(*this, 800);
  }
  // reach: how far backward gets on this rank: nowhere, past the second layer, or to the end.
  at::Tensor forward(const at::Tensor& x, int reach) {
    auto y = first(x);
    if (reach == 1) y = ThrowsBelow::apply(y);
    y = second(norm(y));
    return reach == 0 ? ThrowsBelow::apply(y) : y;
  }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear second;
};
TORCH_MODULE(Ragged);

TEST(DdpMisuse, a_pass_that_fails_on_one_rank_is_an_error_on_all_until_it_is_discarded) {
  on_every_rank([](World& world) {
    if (world.size() == 1 || world.group().backend() != "shm") return;
    const int last = world.size() - 1;
    for (const bool unused : {false, true})
      for (const bool buffers : {false, true})
        for (const int parts : {1, 2})
          for (const int reach : {0, 1})
            for (const int warm : {0, 2}) {
              Ragged model;
              DistributedDataParallel ddp(model, world.group(),
                                          {.bucket_bytes = 100,
                                           .first_bucket_bytes = 50,
                                           .broadcast_buffers = buffers,
                                           .find_unused_parameters = unused,
                                           .micro_batches = parts});
              const auto step = [&](int reach_of_last) {
                for (int part = 0; part < parts; ++part)
                  ddp(rows_of(world.rank() + part), world.rank() == last ? reach_of_last : 2)
                      .square()
                      .mean()
                      .backward();
              };
              for (int i = 0; i < warm; ++i) step(2), model->zero_grad();
              torch::optim::SGD optimizer(model->parameters(), 0.1);
              const auto what = fmt::format("{} {} {} {} {}", unused, buffers, parts, reach, warm);
              if (world.rank() == last) {
                EXPECT_THAT(error_of<std::runtime_error>([&] { step(reach); }), HasSubstr("as planned"))
                    << what;
              } else {
                EXPECT_THAT(error_of<CommError>([&] { step(2); }),
                            HasSubstr(fmt::format("rank {} threw an exception in a backward pass", last)))
                    << what;
                EXPECT_THAT(error_of<c10::Error>([&] { optimizer.step(); }), HasSubstr("ddp.discard()"))
                    << what;
              }
              for (int i = 0; i < 2; ++i)
                EXPECT_THAT(error_of<Error>([&] { step(2); }), HasSubstr("ddp.discard() on every rank"))
                    << what;
              ddp.discard();
              for (int i = 0; i < 2; ++i) step(2), model->zero_grad();
              check_replicas(*model, world.group());
              step(2);
              Ragged fresh;
              DistributedDataParallel reference(fresh, world.group(),
                                                {.broadcast_buffers = buffers, .micro_batches = parts});
              for (int part = 0; part < parts; ++part)
                reference(rows_of(world.rank() + part), 2).square().mean().backward();
              EXPECT_TRUE(all_close(gradients_of(*model), gradients_of(*fresh), 1e-5)) << what;
            }
  });
}

TEST(DdpMisuse, a_rank_that_has_updated_after_its_pass_failed_is_found_when_the_pass_is_discarded) {
  on_every_rank([](World& world) {
    if (world.size() == 1 || world.group().backend() != "shm") return;
    const bool fails = world.rank() == world.size() - 1;
    Ragged model;
    DistributedDataParallel ddp(model, world.group());
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const auto step = [&](int reach) { ddp(rows_of(world.rank()), reach).square().mean().backward(); };
    EXPECT_ANY_THROW(step(fails ? 1 : 2));
    if (fails) optimizer.step();
    EXPECT_THAT(error_of<Error>([&] { step(2); }), HasSubstr("ddp.discard()"));
    EXPECT_THROW(ddp.discard(), DriftError);
    EXPECT_THAT(error_of<Error>([&] { step(2); }), HasSubstr("ddp.discard()"));
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) world.group().broadcast(parameter, {.root = 0}).wait();
    ddp.discard();
    torch::AutoGradMode grad(true);
    step(2);
  });
}

TEST(DdpMisuse, a_pass_that_fails_on_one_rank_fails_the_group_where_it_cannot_refuse) {
  on_every_rank([](World& world) {
    if (world.size() == 1 || world.group().backend() != "threads") return;
    std::vector<int> all(static_cast<std::size_t>(world.size()));
    std::iota(all.begin(), all.end(), 0);
    auto group = world.group(all);
    Ragged model;
    DistributedDataParallel ddp(model, group, {.broadcast_buffers = false});
    const auto step = [&](int reach) { ddp(rows_of(world.rank()), reach).square().mean().backward(); };
    step(2);
    if (world.rank() == 0) {
      EXPECT_THAT(error_of<std::runtime_error>([&] { step(0); }), HasSubstr("as planned"));
    }
    EXPECT_THAT(error_of<CommError>([&] { step(2); }), HasSubstr("ddp broken pass"));
  });
}

// ---- join: what counts as a sample ----------------------------------------------------------------------------

struct RecurrentImpl : torch::nn::Module {
  explicit RecurrentImpl(bool batch_first) : lstm(torch::nn::LSTMOptions(6, 4).batch_first(batch_first)) {
    register_module("lstm", lstm);
    fill_parameters(*this, 400);
  }
  at::Tensor forward(const at::Tensor& x) { return std::get<0>(lstm(x)); }
  torch::nn::LSTM lstm;
};
TORCH_MODULE(Recurrent);

TEST(DdpMisuse, join_counts_samples_where_the_batch_is) {
  on_every_rank([](World& world) {
    // Rank r has 2 + r sequences of 3 steps.
    const auto input = [](int rank) { return numbers(70 + rank, {3, 2 + rank, 6}); };
    const auto loss = [](const at::Tensor& y) { return y.square().mean(); };
    for (const bool told : {false, true}) {
      Recurrent model(false);
      DistributedDataParallel ddp(model, world.group());
      ddp.join(
          [&] {
            auto y = ddp(input(world.rank()));
            if (told) ddp.samples(2 + world.rank());
            loss(y).backward();
          },
          {.batch_dim = told ? std::nullopt : std::optional<std::int64_t>(1)});
      Recurrent one(false);
      double total = 0;
      for (int rank = 0; rank < world.size(); ++rank) total += 2 + rank;
      for (int rank = 0; rank < world.size(); ++rank)
        (loss(one(input(rank))) * ((2 + rank) / total)).backward();
      EXPECT_TRUE(all_close(gradients_of(*model), gradients_of(*one)));
    }
  });
}

TEST(DdpMisuse, join_refuses_to_guess_what_a_sample_is) {
  on_every_rank([](World& world) {
    if (world.size() == 1) return;
    Recurrent model(false);
    DistributedDataParallel ddp(model, world.group());
    EXPECT_THAT(
        error_of<ConfigError>([&] { ddp.join([&] { ddp(numbers(1, {3, 2, 6})).sum().backward(); }); }),
        AllOf(HasSubstr("'lstm'"), HasSubstr("JoinOptions::batch_dim")));
    EXPECT_THAT(error_of<ConfigError>([&] { ddp.join([] {}, {.batch_dim = -1}); }), HasSubstr("batch_dim"));
    Recurrent batch_first(true);
    DistributedDataParallel first_ddp(batch_first, world.group());
    first_ddp.join([&] { first_ddp(numbers(1, {2 + world.rank(), 3, 6})).sum().backward(); });
    // Sequences of different lengths.
    EXPECT_THAT(error_of<ConfigError>([&] {
                  first_ddp.join([&] { first_ddp(numbers(1, {2, 3 + world.rank(), 6})).sum().backward(); });
                }),
                HasSubstr("differ in a dimension other than 0"));

    struct TwoImpl : torch::nn::Module {
      TwoImpl() : linear(6, 3) { register_module("linear", linear); }
      at::Tensor forward(const at::Tensor& x, const at::Tensor& bias) { return linear(x).sum() + bias.sum(); }
      torch::nn::Linear linear;
    };
    auto two = std::make_shared<TwoImpl>();
    DistributedDataParallel two_ddp(two, world.group());
    EXPECT_THAT(
        error_of<ConfigError>([&] {
          two_ddp.join([&] { two_ddp(rows_of(0), numbers(1, {world.rank() == 1 ? 7 : 5})).backward(); });
        }),
        HasSubstr("inputs of rank 1 have different sizes in dim 0"));
  });
}

}  // namespace
}  // namespace lockstep::testing
