// DistributedDataParallel in unusual situations.
#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

at::Tensor row(double value, int columns = 4) { return at::full({1, columns}, value); }

double first_of(const at::Tensor& gradient) { return gradient.flatten()[0].item<double>(); }

// The mean of f(rank) over the ranks.
double mean_of(int ranks, const std::function<double(int)>& f) {
  double sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += f(rank);
  return sum / ranks;
}

// One weight; its gradient is the input.
struct OneImpl : torch::nn::Module {
  explicit OneImpl(at::ScalarType type = at::kFloat) {
    weight = register_parameter("weight", at::ones({1}, type));
  }
  at::Tensor forward(const at::Tensor& x) { return weight * x; }
  at::Tensor weight;
};
TORCH_MODULE(One);

// ---- parameters that are not always used ------------------------------------------------------------------

TEST(DdpSeldom, a_parameter_that_nobody_used_at_first_is_averaged_when_it_is_used) {
  on_every_rank([](World& world) {
    Branches model;
    DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      ddp(row(world.rank() + 1.0), step == 0).sum().backward();
      EXPECT_EQ(model->right->weight.grad().defined(), step > 0);
    }
    Branches one;
    one(row(mean_of(world.size(), [](int rank) { return rank + 1.0; })), false).sum().backward();
    EXPECT_TRUE(at::allclose(model->right->weight.grad(), one->right->weight.grad()));
  });
}

TEST(DdpSeldom, a_parameter_that_was_used_inside_no_sync_alone_counts_as_used) {
  on_every_rank([](World& world) {
    Branches model;
    DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
    ddp(row(1), true).sum().backward();
    model->zero_grad();
    {
      auto guard = ddp.no_sync();
      ddp(row(1), world.rank() == 0).sum().backward();
    }
    ddp(row(1), false).sum().backward();
    Branches one;
    one(row(1), true).sum().backward();
    EXPECT_TRUE(at::allclose(model->left->weight.grad(), one->left->weight.grad() / world.size()));
  });
}

TEST(DdpSeldom, a_gradient_that_nobody_adds_to_stays_whatever_the_hook_does) {
  on_every_rank([](World& world) {
    Branches model;
    DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
    ddp.register_comm_hook([](GradBucket& bucket) {
      auto work = std::make_shared<Work>(bucket.group().all_reduce(bucket.buffer()));
      return [work] { work->wait(); };
    });
    ddp(row(1), true).sum().backward();
    const auto kept = model->left->weight.grad().clone();
    for (int step = 0; step < 3; ++step) ddp(row(1), false).sum().backward();
    EXPECT_TRUE(at::equal(model->left->weight.grad(), kept));
  });
}

TEST(DdpSeldom, a_static_graph_is_the_same_on_one_rank) {
  on_every_rank([](World& world) {
    for (auto& group : {world.group(), world.group({world.rank()})}) {
      Branches model;
      DistributedDataParallel ddp(model, group, {.static_graph = true});
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        ddp(row(1), true).sum().backward();
        EXPECT_FALSE(model->never->weight.grad().defined());
        EXPECT_TRUE(model->left->weight.grad().defined());
      }
    }
  });
}

// A parameter that gets two gradients in one pass.
struct Twice : torch::autograd::Function<Twice> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    at::AutoGradMode enable(true);
    (saved[1] * saved[0].detach()).sum().backward();
    return {gradients[0], at::Tensor()};
  }
};

TEST(DdpSeldom, a_second_reduction_is_refused_by_name_and_a_static_graph_allows_it) {
  on_every_rank([](World& world) {
    for (const bool fixed : {false, true}) {
      One model;
      DistributedDataParallel ddp(model, world.group(), {.static_graph = fixed});
      const auto step = [&] {
        auto x = at::full({1}, world.rank() + 1.0).requires_grad_();
        ddp(Twice::apply(x, model->weight)).sum().backward();
      };
      if (!fixed) {
        EXPECT_THAT(error_of<ConfigError>(step), AllOf(HasSubstr("'weight'"), HasSubstr("twice")));
        continue;
      }
      for (int i = 0; i < 3; ++i) {
        model->zero_grad();
        step();
        EXPECT_NEAR(first_of(model->weight.grad()),
                    mean_of(world.size(), [](int rank) { return 2.0 * (rank + 1); }), 1e-6);
      }
    }
  });
}

TEST(DdpSeldom, a_function_that_returns_no_gradient_counts_as_zero) {
  struct Nothing : torch::autograd::Function<Nothing> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor&) {
      return x * 1;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list gradients) {
      return {gradients[0], at::Tensor()};
    }
  };
  struct ModelImpl : torch::nn::Module {
    ModelImpl() : a(4, 4) {
      register_module("a", a);
      weight = register_parameter("weight", at::ones({3}));
    }
    at::Tensor forward(const at::Tensor& x) { return Nothing::apply(a(x), weight); }
    torch::nn::Linear a;
    at::Tensor weight;
  };
  on_every_rank([](World& world) {
    auto model = std::make_shared<ModelImpl>();
    DistributedDataParallel ddp(model, world.group());
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      ddp(row(1)).sum().backward();
      if (world.size() > 1) {
        EXPECT_EQ(model->weight.grad().abs().sum().item<double>(), 0);
      }
    }
  });
}

// ---- sparse -----------------------------------------------------------------------------------------------

struct TableImpl : torch::nn::Module {
  TableImpl() : table(torch::nn::EmbeddingOptions(6, 2).sparse(true)), last(2, 2) {
    register_module("table", table);
    register_module("last", last);
    fill_parameters(*this, 60);
  }
  at::Tensor forward(const at::Tensor& ids, bool look) {
    return last(look ? table(ids) : at::ones({ids.size(0), 2}, last->weight.scalar_type()));
  }
  torch::nn::Embedding table;
  torch::nn::Linear last;
};
TORCH_MODULE(Table);

TEST(DdpSeldom, a_sparse_gradient_may_be_missing_on_any_rank_or_on_all) {
  on_every_rank([](World& world) {
    for (int without = 0; without < 2; ++without) {
      Table model;
      DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        const bool look = step != 2 && (world.rank() != without || world.size() == 1);
        ddp(at::tensor({1, 3}), look).sum().backward();
        const auto& grad = model->table->weight.grad();
        ASSERT_EQ(grad.defined(), step != 2) << step;
        if (!grad.defined()) continue;
        Table one;
        one(at::tensor({1, 3}), true).sum().backward();
        const double share = world.size() == 1 ? 1 : (world.size() - 1.0) / world.size();
        EXPECT_TRUE(at::allclose(grad.to_dense(), one->table->weight.grad().to_dense() * share)) << step;
      }
    }
  });
}

TEST(DdpSeldom, a_sparse_gradient_may_come_in_any_part_of_the_first_step) {
  on_every_rank([](World& world) {
    for (const auto type : {at::kFloat, at::kBFloat16})
      for (const bool parts : {true, false}) {
        Table model;
        model->to(type);
        DistributedDataParallel ddp(model, world.group(),
                                    {.find_unused_parameters = true, .micro_batches = parts ? 2 : 1});
        for (int step = 0; step < 2; ++step) {
          model->zero_grad();
          const auto pass = [&](bool look) {
            auto ids = at::tensor({1, 3});
            (look ? ddp(ids, true) : ddp(ids, false)).sum().backward();
          };
          if (parts) {
            pass(world.rank() == 0);
          } else {
            auto guard = ddp.no_sync();
            pass(world.rank() == 0);
          }
          pass(false);
          Table one;
          one->to(type);
          one(at::tensor({1, 3}), true).sum().backward();
          const double share = 1.0 / world.size() / (parts ? 2 : 1);
          EXPECT_TRUE(at::allclose(model->table->weight.grad().to_dense(),
                                   one->table->weight.grad().to_dense() * share, 1e-2))
              << type << parts;
        }
      }
  });
}

TEST(DdpSeldom, ranks_without_data_keep_what_others_keep) {
  on_every_rank([](World& world) {
    Branches model;
    Table table;
    DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
    DistributedDataParallel sparse(table, world.group(), {.find_unused_parameters = true});
    // Gradients of the first step are kept through steps that do not use the parameters.
    const auto steps = [&](const std::function<void(int)>& step) {
      for (int i = 0; i < 2 + world.rank(); ++i) step(i);
    };
    ddp.join([&] { steps([&](int i) { ddp(row(2), i == 0).sum().backward(); }); });
    sparse.join([&] { steps([&](int i) { sparse(at::tensor({1, 3}), i == 0).sum().backward(); }); });
    Branches one;
    one(row(2), true).sum().backward();
    EXPECT_TRUE(at::allclose(model->left->weight.grad(), one->left->weight.grad()));
    EXPECT_TRUE(table->table->weight.grad().is_sparse());
  });
}

TEST(DdpSeldom, ranks_without_data_follow_sparse_gradients) {
  on_every_rank([](World& world) {
    Table model;
    DistributedDataParallel ddp(model, world.group());
    SGD optimizer(model->parameters(), {.lr = 0.1});
    ddp.join(
        [&] {
          for (int i = 0; i < 1 + world.rank(); ++i) {
            optimizer.zero_grad();
            ddp(at::tensor({1, 3}), true).sum().backward();
            optimizer.step();
          }
        },
        {.step = [&] { optimizer.step(); }});
    check_replicas(*model, world.group());
  });
}

// ---- when gradients are zeroed, and which forward counts --------------------------------------------------

TEST(DdpSeldom, zero_grad_may_come_between_forward_and_backward_of_micro_batches) {
  on_every_rank([](World& world) {
    for (auto& group : {world.group(), world.group({world.rank()})}) {
      One model;
      DistributedDataParallel ddp(model, group, {.micro_batches = 2});
      for (int step = 0; step < 3; ++step) {
        auto loss = ddp(at::ones({1})).sum();
        model->zero_grad();
        loss.backward();
        ddp(at::ones({1})).sum().backward();
        EXPECT_EQ(first_of(model->weight.grad()), 1);
        auto later = ddp(at::ones({1}));  // Before the optimizer's step, while gradients still exist.
        EXPECT_EQ(first_of(model->weight.grad()), 1);
      }
    }
  });
}

TEST(DdpSeldom, what_counts_is_whether_the_forward_ran_inside_no_sync) {
  on_every_rank([](World& world) {
    const auto x = at::full({1}, world.rank() + 1.0);
    const double mean = mean_of(world.size(), [](int rank) { return rank + 1.0; });
    One model;
    DistributedDataParallel ddp(model, world.group());
    const auto quietly = [&] {
      auto guard = ddp.no_sync();
      return ddp(x).sum();
    };
    auto synced = ddp(x).sum(), unsynced = quietly();
    (synced + unsynced).backward();
    EXPECT_NEAR(first_of(model->weight.grad()), 2 * mean, 1e-6);
    model->zero_grad();
    unsynced = quietly();
    synced = ddp(x).sum();
    unsynced.backward();
    EXPECT_NEAR(first_of(model->weight.grad()), world.rank() + 1.0, 1e-6);
    synced.backward();
    EXPECT_NEAR(first_of(model->weight.grad()), 2 * mean, 1e-6);
  });
}

TEST(DdpSeldom, a_backward_that_reaches_no_parameter_is_none) {
  on_every_rank([](World& world) {
    One model;
    DistributedDataParallel ddp(model, world.group());
    auto x = at::ones({1}).requires_grad_();
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      // The gradient of its input, with create_graph.
      const auto gradient = torch::autograd::grad({ddp(x).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
      EXPECT_EQ(first_of(gradient), 1);
      // Frozen while another model trains on its output.
      model->weight.requires_grad_(false);
      ddp(x).sum().backward();
      model->weight.requires_grad_(true);
      EXPECT_FALSE(model->weight.grad().defined());
      ddp(at::full({1}, world.rank() + 1.0)).sum().backward();
      EXPECT_NEAR(first_of(model->weight.grad()), mean_of(world.size(), [](int rank) { return rank + 1.0; }),
                  1e-6);
    }
  });
}

TEST(DdpSeldom, several_forwards_may_share_running_statistics) {
  on_every_rank([](World& world) {
    for (const bool training : {true, false}) {
      torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
      fill_parameters(*model, 70);
      DistributedDataParallel ddp(model, world.group());
      model->train(training);
      for (int step = 0; step < 2; ++step) {
        auto a = ddp(numbers(1 + world.rank(), {5, 4})), b = ddp(numbers(11 + world.rank(), {5, 4}));
        (a + b).square().mean().backward();
      }
      check_replicas(*model, world.group());
    }
  });
}

TEST(DdpSeldom, after_a_pass_that_failed_direct_calls_work_again) {
  on_every_rank([](World& world) {
    struct Throws : torch::autograd::Function<Throws> {
      static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 1; }
      static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                     torch::autograd::variable_list) {
        throw std::runtime_error("planted");
      }
    };
    One model;
    torch::nn::Linear other(1, 1);
    DistributedDataParallel ddp(model, world.group());
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      EXPECT_THROW((Throws::apply(at::ones({1}).requires_grad_()) + ddp(at::ones({1}))).sum().backward(),
                   std::exception);
      model->zero_grad();
      model(at::full({1}, world.rank() + 1.0)).sum().backward();
      EXPECT_NEAR(first_of(model->weight.grad()), mean_of(world.size(), [](int rank) { return rank + 1.0; }),
                  1e-6);
    }
  });
}

TEST(DdpSeldom, an_output_that_is_a_leaf_gets_no_hook_at_every_step) {
  struct ModelImpl : torch::nn::Module {
    ModelImpl() { weight = register_parameter("weight", at::ones({1})); }
    std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {weight * x, weight}; }
    at::Tensor weight;
  };
  on_every_rank([](World& world) {
    auto model = std::make_shared<ModelImpl>();
    DistributedDataParallel ddp(model, world.group());
    const auto hooks = [&] { return torch::autograd::impl::hooks(model->weight).size(); };
    const auto before = hooks();
    for (int step = 0; step < 5; ++step) {
      model->zero_grad();
      ddp(at::full({1}, world.rank() + 1.0)).first.sum().backward();
    }
    EXPECT_EQ(hooks(), before);
    EXPECT_NEAR(first_of(model->weight.grad()), mean_of(world.size(), [](int rank) { return rank + 1.0; }),
                1e-6);
  });
}

// ---- dtypes and hooks -------------------------------------------------------------------------------------

TEST(DdpSeldom, complex_gradients_keep_their_sign_with_every_hook) {
  on_every_rank([](World& world) {
    const auto x = at::complex(at::full({1}, world.rank() + 1.0), at::ones({1}));
    for (const int hook : {0, 1, 2}) {
      One model(at::kComplexFloat);
      DistributedDataParallel ddp(model, world.group());
      if (hook == 1) ddp.register_comm_hook(bf16_compress_hook());
      if (hook == 2) ddp.register_comm_hook(power_sgd_hook({}));
      at::Tensor mean = at::zeros({1}, at::kComplexFloat);
      for (int rank = 0; rank < world.size(); ++rank) {
        One one(at::kComplexFloat);
        at::real(one(at::complex(at::full({1}, rank + 1.0), at::ones({1})))).sum().backward();
        mean += one->weight.grad() / world.size();
      }
      for (int step = 0; step < 4; ++step) {
        model->zero_grad();
        at::real(ddp(x)).sum().backward();
        EXPECT_TRUE(at::allclose(model->weight.grad().resolve_conj(), mean.resolve_conj())) << hook;
      }
    }
  });
}

TEST(DdpSeldom, one_hook_may_serve_two_models) {
  on_every_rank([](World& world) {
    const auto check = [&](const CommHook& hook, double tolerance) {
      torch::nn::Linear a(40, 30), b(20, 50);
      fill_parameters(*a, 80);
      fill_parameters(*b, 90);
      DistributedDataParallel first(a, world.group()), second(b, world.group());
      first.register_comm_hook(hook);
      second.register_comm_hook(hook);
      for (int step = 0; step < 5; ++step) {
        a->zero_grad();
        b->zero_grad();
        // Of rank one, so that PowerSGD is exact.
        (first(row(1.0 + world.rank(), 40)).sum() + 8 * second(row(2.0 + world.rank(), 20)).sum()).backward();
        const double one = mean_of(world.size(), [](int rank) { return 1.0 + rank; });
        EXPECT_NEAR(first_of(a->weight.grad()), one, one * tolerance) << step;
        EXPECT_NEAR(first_of(b->weight.grad()), 8 * (one + 1), 8 * (one + 1) * tolerance) << step;
      }
    };
    check(bf16_compress_hook(), 1e-2);
    check(power_sgd_hook({.matrix_approximation_rank = 1}), 1e-4);
  });
}

// ---- join -------------------------------------------------------------------------------------------------

TEST(DdpSeldom, samples_may_be_told_before_forward) {
  on_every_rank([](World& world) {
    One model;
    DistributedDataParallel ddp(model, world.group());
    ddp.join([&] {
      ddp.samples(world.rank() + 1);
      ddp(at::full({5}, world.rank() + 1.0)).sum().backward();
    });
    double sum = 0, weights = 0;
    for (int rank = 0; rank < world.size(); ++rank) {
      sum += (rank + 1) * 5.0 * (rank + 1);
      weights += rank + 1;
    }
    EXPECT_NEAR(first_of(model->weight.grad()), sum / weights, 1e-5);
  });
}

TEST(DdpSeldom, ranks_without_data_decay_the_weights_that_others_decay) {
  on_every_rank([](World& world) {
    for (const bool none : {true, false}) {
      Branches model;
      DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
      SGD optimizer(model->parameters(), {.lr = 0.1, .weight_decay = 0.5});
      ddp.join(
          [&] {
            for (int i = 0; i < 2 + world.rank(); ++i) {
              optimizer.zero_grad(none);
              ddp(row(1), i == 0).sum().backward();
              optimizer.step();
            }
          },
          {.step = [&] { optimizer.step(); }});
      check_replicas(*model, world.group());
    }
  });
}

TEST(DdpSeldom, a_static_graph_is_learned_from_ranks_that_have_data) {
  on_every_rank([](World& world) {
    Branches model;
    DistributedDataParallel ddp(model, world.group(), {.static_graph = true});
    SGD optimizer(model->parameters(), {.lr = 0.1});
    const auto step = [&] {
      optimizer.zero_grad();
      ddp(row(1), true).sum().backward();
      optimizer.step();
    };
    ddp.join(
        [&] {
          if (world.rank() == world.size() - 1) step();
        },
        {.step = [&] { optimizer.step(); }});
    step();
    check_replicas(*model, world.group());
  });
}

TEST(DdpSeldom, join_is_refused_with_a_synchronised_batch_norm) {
  on_every_rank([](World& world) {
    if (world.size() == 1) return;
    torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
    convert_sync_batchnorm(*model, world.group());
    DistributedDataParallel ddp(model, world.group());
    EXPECT_THAT(error_of<ConfigError>([&] { ddp.join([] {}); }), HasSubstr("SyncBatchNorm"));
  });
}

// ---- what is compared between ranks -----------------------------------------------------------------------

TEST(DdpSeldom, frozen_parameters_are_compared_and_ignored_ones_may_drift) {
  on_every_rank([](World& world) {
    if (world.size() == 1) return;
    {
      torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(world.rank() == 0 ? 2 : 3, 2));
      for (auto& parameter : model->ptr<torch::nn::LinearImpl>(1)->parameters())
        parameter.requires_grad_(false);
      EXPECT_THAT(error_of<ConfigError>([&] { DistributedDataParallel ddp(model, world.group()); }),
                  AllOf(HasSubstr("frozen parameter '1.weight'"), HasSubstr("differ between ranks")));
    }
    Branches model;
    {
      torch::NoGradGuard no_grad;
      model->never->weight.fill_(world.rank());
    }
    DistributedDataParallel ddp(
        model, world.group(),
        {.find_unused_parameters = true, .check_replicas_every = 1, .ignore = {"never"}});
    for (int step = 0; step < 3; ++step) ddp(row(1), true).sum().backward();
    EXPECT_THAT(error_of<DriftError>([&] { check_replicas(*model, world.group()); }),
                HasSubstr("'never.weight'"));
  });
}

// ---- Units ------------------------------------------------------------------------------------------------

TEST(DdpSeldom, gradients_of_a_synchronised_norms_gradients_are_refused) {
  on_every_rank([](World& world) {
    if (world.size() == 1) return;
    SyncBatchNorm1d norm(torch::nn::BatchNorm1dOptions(3), world.group());
    auto x = numbers(1 + world.rank(), {4, 3}).requires_grad_();
    auto loss = norm(x).pow(3).sum();
    EXPECT_THAT(error_of<ConfigError>([&] { torch::autograd::grad({loss}, {x}, {}, true, true); }),
                HasSubstr("SyncBatchNorm"));
  });
}

TEST(DdpSeldom, in_evaluation_every_rank_is_for_itself) {
  on_every_rank([](World& world) {
    const auto options = torch::nn::BatchNorm1dOptions(3).track_running_stats(false);
    SyncBatchNorm1d norm(options, world.group());
    torch::nn::BatchNorm1d one(options);
    norm->eval();
    one->eval();
    const auto x = numbers(1 + world.rank(), {4, 3});
    if (world.rank() == 0) {  // On one rank only: does not wait for peers.
      EXPECT_TRUE(at::allclose(norm(x), one(x)));
    }
  });
}

TEST(DdpSeldom, a_unit_is_cloned_as_a_unit_or_not_at_all) {
  on_every_rank([](World& world) {
    Unit<torch::nn::BatchNorm1d> norm(3);
    const auto copy = norm->clone();
    EXPECT_NE(detail::slot_of(copy.get()), nullptr);
    EXPECT_NE(copy->parameters()[0].const_data_ptr(), norm->weight.const_data_ptr());
    EXPECT_TRUE(at::equal(copy->parameters()[0], norm->weight));
    EXPECT_EQ(convert_sync_batchnorm(*copy, world.group()), 1);
    EXPECT_THAT(error_of<ConfigError>([&] { (void)copy->clone(); }), HasSubstr("cannot be cloned"));
  });
}

struct OwnNormImpl : torch::nn::BatchNorm1dImpl {
  using BatchNorm1dImpl::BatchNorm1dImpl;
  std::array<double, 64> more{};
};
TORCH_MODULE(OwnNorm);

TEST(DdpSeldom, a_unit_of_a_derived_module_is_cloned_as_libtorch_clones_it) {
  Unit<OwnNorm> norm(3);
  const auto copy = norm->clone();
  EXPECT_EQ(detail::slot_of(copy.get()), nullptr);
  EXPECT_TRUE(at::equal(copy->parameters()[0], norm->weight));
}

TEST(DdpSeldom, a_unit_may_be_in_a_sequential_too) {
  struct ModelImpl : torch::nn::Module {
    ModelImpl() : norm(3), all(torch::nn::Linear(4, 3), norm) {
      register_module("norm", norm);
      register_module("all", all);
    }
    at::Tensor forward(const at::Tensor& x) { return all->forward(x); }
    Unit<torch::nn::BatchNorm1d> norm;
    torch::nn::Sequential all;
  };
  on_every_rank([](World& world) {
    auto model = std::make_shared<ModelImpl>();
    convert_sync_batchnorm(*model, world.group());
    DistributedDataParallel ddp(model, world.group());
    for (int step = 0; step < 2; ++step) ddp(numbers(1 + world.rank(), {5, 4})).square().mean().backward();
  });
}

// ---- gradients that are averaged when the program says so -------------------------------------------------

TEST(DdpSeldom, reduce_averages_what_several_passes_left) {
  on_every_rank([](World& world) {
    const auto input = [&](int step, int pass) {
      return numbers(static_cast<std::uint64_t>(700 + 100 * world.rank() + 10 * step + pass), {4, 20});
    };
    for (const bool zero_copy : {true, false}) {
      Wide told, usual;
      DistributedDataParallel ddp(told, world.group(), {.zero_copy = zero_copy, .reduce_in_backward = false}),
          expected(usual, world.group(), {.zero_copy = zero_copy});
      AdamW optimizer(told->parameters()), expected_optimizer(usual->parameters());
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        expected_optimizer.zero_grad();
        // Bypasses DDP.
        for (int pass = 0; pass < 3; ++pass) told(input(step, pass)).square().mean().backward();
        ddp.reduce();
        {
          auto guard = expected.no_sync();
          for (int pass = 0; pass < 2; ++pass) expected(input(step, pass)).square().mean().backward();
        }
        expected(input(step, 2)).square().mean().backward();
        optimizer.step();
        expected_optimizer.step();
        ASSERT_TRUE(same_bits(gradients_of(*told), gradients_of(*usual))) << step;
        ASSERT_TRUE(same_bits(values_of(*told), values_of(*usual))) << step;
      }
      check_replicas(*told, world.group());
    }
  });
}

TEST(DdpSeldom, reduce_goes_with_unused_parameters_hooks_and_shared_updates) {
  on_every_rank([](World& world) {
    const double mean = mean_of(world.size(), [](int rank) { return rank + 1.0; });
    Branches model;
    DistributedDataParallel ddp(model, world.group(),
                                {.find_unused_parameters = true, .reduce_in_backward = false});
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      model(row(world.rank() + 1.0), true).sum().backward();
      ddp.reduce();
      EXPECT_TRUE(model->left->weight.grad().defined());
      EXPECT_FALSE(model->right->weight.grad().defined());
      EXPECT_FALSE(model->never->weight.grad().defined());
    }
    One hooked;
    DistributedDataParallel with_hook(hooked, world.group(), {.reduce_in_backward = false});
    with_hook.register_comm_hook(bf16_compress_hook());
    hooked(row(world.rank() + 1.0, 1)).sum().backward();
    with_hook.reduce();
    EXPECT_NEAR(first_of(hooked->weight.grad()), mean, 0.02);

    Wide plain, shared;
    DistributedDataParallel ddp_plain(plain, world.group(), {.reduce_in_backward = false}),
        ddp_shared(shared, world.group(), {.reduce_in_backward = false});
    AdamW optimizer(plain->parameters());
    DistributedOptimizer<AdamW> together(ddp_shared, AdamWOptions{});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      together.zero_grad();
      const auto x = numbers(static_cast<std::uint64_t>(800 + 10 * world.rank() + step), {4, 20});
      for (auto* each : {&plain, &shared}) (*each)(x).square().mean().backward();
      ddp_plain.reduce();
      ddp_shared.reduce();
      optimizer.step();
      together.step();
      ASSERT_TRUE(same_bits(values_of(*plain), values_of(*shared))) << step;
    }
  });
}

TEST(DdpSeldom, reduce_where_it_does_not_belong_is_refused) {
  on_every_rank([](World& world) {
    Mlp model;
    auto group = world.group();
    DistributedDataParallel usual(model, group);
    EXPECT_THAT(error_of<ConfigError>([&] { usual.reduce(); }), HasSubstr("reduce_in_backward = false"));
    for (const DdpOptions& options : {DdpOptions{.static_graph = true, .reduce_in_backward = false},
                                      DdpOptions{.micro_batches = 2, .reduce_in_backward = false}})
      EXPECT_THAT(error_of<ConfigError>([&] { DistributedDataParallel(model, group, options); }),
                  HasSubstr("reduce_in_backward = false cannot be combined"));
    // No gradients arrived.
    Mlp other;
    DistributedDataParallel told(other, group, {.reduce_in_backward = false});
    EXPECT_THAT(error_of<ConfigError>([&] { told.reduce(); }), HasSubstr("no gradient for"));
    other(at::ones({2, 6})).sum().backward();
    told.reduce();
  });
}

}  // namespace
}  // namespace lockstep::testing
