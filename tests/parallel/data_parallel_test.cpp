// DataParallel on CPU workers: results compared with one device and the whole batch, and errors.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <optional>
#include <sstream>
#include <thread>

#include <ATen/autocast_mode.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "parallel/data_parallel_modules.h"

namespace lockstep::testing {
namespace {

namespace nn = torch::nn;

TEST(DataParallel, gives_the_results_and_gradients_of_one_device) {
  torch::manual_seed(1);
  for (const int workers : {2, 3, 4})
    for (const int batch : {1, 2, 5, 7, 16}) {
      Mlp model;
      model->to(torch::kDouble);
      DataParallel dp(model, cpus(workers));
      const auto x = torch::randn({batch, 6}, torch::kDouble), y = torch::randn({batch, 3}, torch::kDouble);
      const auto expected = model(x);
      const auto wanted = gradients_of(model, torch::mse_loss(expected, y));
      const auto out = dp(x);
      EXPECT_TRUE(torch::allclose(out, expected, 1e-12, 1e-12)) << workers << " workers, batch " << batch;
      expect_close(gradients_of(model, torch::mse_loss(out, y)), wanted, 1e-12);
    }
}

TEST(DataParallel, splits_as_chunk_does) {
  Watch watch;
  DataParallel dp(watch, cpus(4));
  for (const int batch : {1, 2, 3, 4, 5, 6, 9, 10}) {
    std::vector<std::int64_t> chunks;
    for (const auto& each : torch::ones({batch, 2}).chunk(4)) chunks.push_back(each.size(0));
    const auto lengths = std::get<1>(dp(torch::ones({batch, 2})));
    EXPECT_EQ(std::vector<std::int64_t>(lengths.data_ptr<std::int64_t>(),
                                        lengths.data_ptr<std::int64_t>() + lengths.numel()),
              chunks);
  }
}

TEST(DataParallel, an_empty_batch_goes_to_every_replica) {
  Mlp model;
  DataParallel dp(model, cpus(2));
  const auto out = dp(torch::ones({0, 6}));
  EXPECT_EQ(out.sizes(), (at::IntArrayRef{0, 3}));
  out.sum().backward();
  EXPECT_EQ(model->first->weight.grad().abs().sum().item<float>(), 0);
}

TEST(DataParallel, sums_gradients_by_the_aligned_tree_and_gives_the_same_bits_each_time) {
  torch::manual_seed(2);
  for (const int workers : {2, 3, 4, 5}) {
    Wide model;  // Large enough for all workers to sum together.
    DataParallel dp(model, cpus(workers));
    const auto x = torch::randn({workers * 3, 64});
    std::vector<std::vector<at::Tensor>> parts;
    for (const auto& piece : x.chunk(workers))
      parts.push_back(gradients_of(model, model(piece).square().sum()));
    for (std::size_t n = parts.size(); n > 1; n = (n + 1) / 2)
      for (std::size_t i = 0; i < n; i += 2)
        for (std::size_t p = 0; p < parts[0].size(); ++p)
          parts[i / 2][p] = i + 1 < n ? parts[i][p] + parts[i + 1][p] : parts[i][p];
    for (int run = 0; run < 3; ++run) {
      const auto found = gradients_of(model, dp(x).square().sum());
      for (std::size_t p = 0; p < found.size(); ++p)
        EXPECT_TRUE(at::equal(found[p], parts[0][p])) << workers << " " << p;
    }
  }
}

TEST(DataParallel, training_on_two_workers_stays_with_one_device) {
  torch::manual_seed(10);
  nn::Linear one(10, 1), two(10, 1);
  two->weight.set_data(one->weight.detach().clone());
  two->bias.set_data(one->bias.detach().clone());
  DataParallel dp(two, cpus(2));
  torch::optim::Adam of_one(one->parameters(), 1e-3), of_two(two->parameters(), 1e-3);
  for (int step = 0; step < 320; ++step) {
    const auto x = torch::randn({step % 32 == 31 ? 8 : 32, 10}), y = torch::randn({x.size(0), 1});
    of_one.zero_grad();
    of_two.zero_grad();
    const auto expected = torch::mse_loss(one(x), y), loss = torch::mse_loss(dp(x), y);
    expected.backward();
    loss.backward();
    of_one.step();
    of_two.step();
    ASSERT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5) << step;
  }
}

TEST(DataParallel, shares_the_modules_memory) {
  Wide model;
  std::vector<void*> seen(2);
  model->look = [&](WideImpl& replica, int index) {
    seen.at(static_cast<std::size_t>(index)) = replica.layer->weight.data_ptr();
  };
  DataParallel dp(model, cpus(2));
  dp(torch::stack({torch::zeros({64}), torch::ones({64})}));
  EXPECT_EQ(seen, std::vector<void*>(2, model->layer->weight.data_ptr()));
}

TEST(DataParallel, gradients_accumulate_under_both_forms_of_zero_grad) {
  torch::manual_seed(3);
  Mlp model;
  DataParallel dp(model, cpus(2));
  const auto x = torch::randn({6, 6});
  const auto once = gradients_of(model, dp(x).sum());
  dp(x).sum().backward();
  dp(x).sum().backward();
  for (std::size_t i = 0; i < once.size(); ++i)
    EXPECT_TRUE(at::equal(model->parameters()[i].grad(), once[i] + once[i]));
  const auto* memory = model->parameters()[0].grad().data_ptr();
  model->zero_grad(/*set_to_none=*/false);
  dp(x).sum().backward();
  EXPECT_EQ(model->parameters()[0].grad().data_ptr(), memory);
  expect_close(grads(*model), once, 0);
  model->zero_grad(/*set_to_none=*/true);
  dp(x).sum().backward();
  expect_close(grads(*model), once, 0);
}

TEST(DataParallel, hooks_of_parameters_see_one_gradient_of_the_whole_batch) {
  Mlp model;
  DataParallel dp(model, cpus(3));
  const auto x = torch::randn({6, 6});
  const auto expected = gradients_of(model, dp(x).sum());
  int calls = 0;
  model->first->weight.register_hook([&](at::Tensor gradient) {
    ++calls;
    EXPECT_TRUE(at::equal(gradient, expected[0]));
    return gradient * 2;
  });
  dp(x).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(at::equal(model->first->weight.grad(), expected[0] * 2));
}

TEST(DataParallel, gradients_flow_to_inputs_and_are_taken_where_they_are_asked_for) {
  torch::manual_seed(4);
  Mlp model;
  DataParallel dp(model, cpus(3));
  const auto x = torch::randn({7, 6}, torch::requires_grad());
  const auto ours = torch::autograd::grad({dp(x * 2).square().sum()}, {x, model->first->bias});
  const auto theirs = torch::autograd::grad({model(x * 2).square().sum()}, {x, model->first->bias});
  expect_close(ours, theirs, 1e-5);
  EXPECT_FALSE(model->first->weight.grad().defined());
  EXPECT_FALSE(x.grad().defined());
}

TEST(DataParallel, an_input_that_gets_no_gradient_in_some_replicas_gets_zeros_there) {
  Branch model;
  DataParallel dp(model, cpus(2));
  const auto x = torch::tensor({{1.f}, {-1.f}}, torch::requires_grad());
  dp(x).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), torch::tensor({{1.f}, {0.f}})));
  EXPECT_EQ(model->scale.grad().item<float>(), 1);
}

TEST(DataParallel, double_backward_is_refused) {
  Mlp model;
  DataParallel dp(model, cpus(2));
  const auto x = torch::randn({4, 6}, torch::requires_grad());
  const auto loss = dp(x).square().sum();
  EXPECT_THAT(error_of<Error>([&] { torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true); }),
              HasSubstr("create_graph"));
  loss.backward();  // The graph has been kept.
  EXPECT_TRUE(x.grad().defined());
}

TEST(DataParallel, backward_twice_needs_retain_graph) {
  Mlp model;
  DataParallel dp(model, cpus(2));
  const auto loss = dp(torch::randn({4, 6})).sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = grads(*model);
  loss.backward();
  for (std::size_t i = 0; i < once.size(); ++i)
    EXPECT_TRUE(at::equal(model->parameters()[i].grad(), once[i] * 2));
  // sum's own graph saves nothing, so backward reaches DataParallel's node.
  EXPECT_THAT(error_of<Error>([&] { loss.backward(); }), HasSubstr("retain_graph"));
}

TEST(DataParallel, several_forwards_may_come_before_their_backwards) {
  torch::manual_seed(5);
  Mlp model;
  DataParallel dp(model, cpus(2));
  const auto a = torch::randn({4, 6}), b = torch::randn({5, 6});
  const auto first = dp(a).square().sum(), second = dp(b).square().sum();
  first.backward();
  second.backward();
  auto found = grads(*model);
  expect_close(found, gradients_of(model, model(a).square().sum() + model(b).square().sum()), 1e-5);
  expect_close(gradients_of(model, dp(a).square().sum() + dp(b).square().sum()), found, 1e-5);
}

TEST(DataParallel, a_parameter_changed_between_forward_and_backward_is_an_error_as_on_one_device) {
  Mlp model;
  DataParallel dp(model, cpus(2));
  const auto loss = dp(torch::randn({4, 6})).square().sum();
  {
    torch::NoGradGuard no_grad;
    for (auto& each : model->parameters()) each.add_(1);
  }
  EXPECT_THAT(error_of<ReplicaError>([&] { loss.backward(); }),
              HasSubstr("modified by an inplace operation"));
}

TEST(DataParallel, follows_optimizers_and_other_changes_of_values) {
  torch::manual_seed(6);
  Mlp model;
  DataParallel dp(model, cpus(2));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto x = torch::randn({4, 6});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    dp(x).square().sum().backward();
    optimizer.step();
    expect_close({dp(x)}, {model(x)}, 1e-6);
  }
  model->first->weight.set_data(torch::randn({8, 6}));  // In other memory.
  expect_close({dp(x)}, {model(x)}, 1e-6);
  std::stringstream saved;
  torch::save(Mlp(), saved);
  torch::load(model, saved);
  expect_close({dp(x)}, {model(x)}, 1e-6);
  model->to(torch::kDouble);
  expect_close({dp(x.to(torch::kDouble))}, {model(x.to(torch::kDouble))}, 1e-12);
  expect_close(gradients_of(model, dp(x.to(torch::kDouble)).sum()),
               gradients_of(model, model(x.to(torch::kDouble)).sum()), 1e-12);
}

TEST(DataParallel, follows_requires_grad) {
  Mlp model;
  DataParallel dp(model, cpus(2));
  const auto x = torch::randn({4, 6});
  dp(x).sum().backward();
  model->zero_grad();
  model->first->weight.set_requires_grad(false);
  const auto out = dp(x);
  dp(x).sum().backward();
  EXPECT_FALSE(model->first->weight.grad().defined());
  EXPECT_TRUE(model->second->weight.grad().defined());
  for (auto& each : model->parameters()) each.set_requires_grad(false);
  EXPECT_FALSE(dp(x).requires_grad());
  for (auto& each : model->parameters()) each.set_requires_grad(true);
  dp(x).sum().backward();
  EXPECT_TRUE(model->first->weight.grad().defined());
}

TEST(DataParallel, follows_train_and_eval_of_every_submodule) {
  nn::Sequential model(nn::Dropout(0.999), nn::Dropout(0.999));
  DataParallel dp(model, cpus(2));
  const auto ones = torch::ones({64, 4});
  EXPECT_FALSE(at::equal(dp(ones), ones));
  model->eval();
  EXPECT_TRUE(at::equal(dp(ones), ones));
  model->children()[1]->train();  // One of them.
  EXPECT_FALSE(at::equal(dp(ones), ones));
  model->train();
  model->children()[0]->eval();
  model->children()[1]->eval();
  EXPECT_TRUE(at::equal(dp(ones), ones));
}

TEST(DataParallel, replicas_run_with_the_callers_settings) {
  Wide model;
  std::atomic<int> wrong = 0;
  const auto with = [&](std::function<bool()> holds) {
    model->look = [&wrong, holds](WideImpl&, int) { wrong += holds() ? 0 : 1; };
    DataParallel dp(model, cpus(2));
    const auto x = torch::stack({torch::zeros({64}), torch::ones({64})});
    dp(x);
    return wrong.exchange(0) == 0;
  };
  EXPECT_TRUE(with([] { return torch::GradMode::is_enabled(); }));
  {
    torch::NoGradGuard guard;
    EXPECT_TRUE(with([] { return !torch::GradMode::is_enabled(); }));
  }
  {
    c10::InferenceMode guard;
    EXPECT_TRUE(with([] { return c10::InferenceMode::is_enabled(); }));
  }
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  EXPECT_TRUE(with([] {
    return at::autocast::is_autocast_enabled(at::kCPU) &&
           at::autocast::get_autocast_dtype(at::kCPU) == at::kHalf;
  }));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::clear_cache();
  EXPECT_TRUE(with([] { return !at::autocast::is_autocast_enabled(at::kCPU); }));
}

TEST(DataParallel, results_under_no_grad_inference_mode_and_autocast_are_those_of_one_device) {
  torch::manual_seed(7);
  Mlp model;
  DataParallel dp(model, cpus(2));
  const auto x = torch::randn({4, 6});
  const auto expected = model(x).detach();
  {
    torch::NoGradGuard guard;
    EXPECT_FALSE(dp(x).requires_grad());
    expect_close({dp(x)}, {expected}, 1e-6);
  }
  {
    c10::InferenceMode guard;
    const auto out = dp(x);
    EXPECT_TRUE(out.is_inference());
    expect_close({out}, {expected}, 1e-6);
  }
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto out = dp(x);
  const auto low = model(x);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  const auto wanted = gradients_of(model, low.to(at::kFloat).sum());
  expect_close(gradients_of(model, out.to(at::kFloat).sum()), wanted, 0.05);
  dp(x).sum().backward();  // Back to float.
}

TEST(DataParallel, denormals_are_flushed_where_the_caller_flushes_them) {
  Wide model;
  std::atomic<int> zeros = 0;
  model->look = [&](WideImpl&, int) { zeros += (torch::full({64}, 1e-39f) * 1).eq(0).all().item<bool>(); };
  DataParallel dp(model, cpus(2));
  const auto x = torch::ones({2, 64});
  dp(x);
  EXPECT_EQ(zeros.exchange(0), 0);
  at::globalContext().setFlushDenormal(true);
  dp(x);
  at::globalContext().setFlushDenormal(false);
  EXPECT_EQ(zeros.exchange(0), 2);
  dp(x);
  EXPECT_EQ(zeros.exchange(0), 0);
}

TEST(DataParallel, replicas_divide_the_threads_and_leave_those_of_others_alone) {
  const int before = at::get_num_threads();
  at::set_num_threads(6);
  const auto threads_with = [](DataParallelOptions options) {
    Wide model;
    std::vector<int> seen(2);
    model->look = [&](WideImpl&, int index) {
      seen.at(static_cast<std::size_t>(index)) = at::get_num_threads();
    };
    DataParallel dp(model, cpus(2), options);
    dp(torch::stack({torch::zeros({64}), torch::ones({64})}));
    return seen;
  };
  EXPECT_EQ(threads_with({}), (std::vector<int>{3, 3}));
  EXPECT_EQ(threads_with({.threads_per_replica = 1}), (std::vector<int>{1, 1}));
  EXPECT_EQ(at::get_num_threads(), 6);
  EXPECT_EQ(std::async(std::launch::async, [] { return at::get_num_threads(); }).get(), 6);
  at::set_num_threads(before);
}

TEST(DataParallel, forward_and_backward_run_on_all_workers_at_once) {
  Meeting model;
  DataParallel dp(model, cpus(3));
  model->number->store(3);
  const auto out = dp(torch::ones({3, 2}));
  out.sum().backward();
  EXPECT_EQ(model->number->met_in_forward, 3);
  EXPECT_EQ(model->number->met_in_backward, 3);
}

TEST(DataParallel, an_error_in_forward_names_replica_and_device_and_keeps_its_type) {
  Touchy model;
  DataParallel dp(model, cpus(3));
  const auto x = torch::tensor({0.f, 1.f, 0.f});
  try {
    dp(x);
    FAIL() << "no error";
  } catch (const ReplicaError& e) {
    EXPECT_STREQ(e.what(), "DataParallel: forward of replica 1 of 3, on cpu: the input hurts");
    EXPECT_EQ(e.replica(), 1u);
    EXPECT_EQ(e.device(), at::Device(at::kCPU));
    EXPECT_THROW(std::rethrow_if_nested(e), Pain);
  }
  EXPECT_THAT(error_of<ReplicaError>([&] { dp(torch::tensor({1.f, 0.f, 1.f})); }),
              HasSubstr("replica 0 of 3, on cpu (and 1 more)"));
  // LibTorch's errors are shown without a backtrace.
  EXPECT_THAT(error_of<ReplicaError>([&] { dp(torch::tensor({0.f, 2.f, 0.f})); }),
              AllOf(HasSubstr("replica 1 of 3"), Not(HasSubstr("frame #"))));
  EXPECT_THAT(error_of<ReplicaError>([&] { dp(torch::tensor({3.f, 0.f, 0.f})); }),
              HasSubstr("not a std::exception"));
  EXPECT_EQ(dp(torch::zeros(3)).sum().item<float>(), 0);  // It still works.
}

TEST(DataParallel, an_error_in_backward_reaches_the_caller_of_backward) {
  Touchy model;
  DataParallel dp(model, cpus(3));
  const auto out = dp(torch::tensor({0.f, 0.f, 4.f}));
  const auto text = error_of<ReplicaError>([&] { out.sum().backward(); });
  EXPECT_THAT(text, HasSubstr("backward of replica 2 of 3, on cpu: backward hurts"));
  dp(torch::zeros(3)).sum().backward();
  EXPECT_EQ(model->scale.grad().item<float>(), 0);
}

TEST(DataParallel, calls_from_inside_a_replica_are_refused) {
  Wide model;
  std::function<void()> again;
  model->look = [&again](WideImpl&, int) { again(); };
  DataParallel dp(model, cpus(2));
  again = [dp]() mutable { dp(torch::ones({2, 64})); };
  EXPECT_THAT(error_of<ReplicaError>([&] { dp(torch::ones({2, 64})); }),
              HasSubstr("inside one of its own replicas"));
  again = nullptr;
}

TEST(DataParallel, one_inside_another_works) {
  torch::manual_seed(8);
  Nested model;
  DataParallel dp(model, cpus(2));
  const auto x = torch::randn({8, 6});
  expect_close({dp(x)}, {model->inner(x)}, 1e-6);
  const auto wanted = gradients_of(model, model->inner(x).square().sum());
  expect_close(gradients_of(model, dp(x).square().sum()), wanted, 1e-5);
}

TEST(DataParallel, several_threads_use_one_and_two_at_once) {
  torch::manual_seed(9);
  Mlp a, b;
  DataParallel first(a, cpus(2)), second(b, cpus(3));
  const auto x = torch::randn({6, 6});
  const auto expected_a = a(x).detach(), expected_b = b(x).detach();
  const auto input_gradient = [&](Mlp& model) {
    const auto in = x.clone().requires_grad_();
    return torch::autograd::grad({model(in).square().sum()}, {in})[0];
  };
  const auto wanted_a = input_gradient(a), wanted_b = input_gradient(b);
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        auto& dp = t % 2 ? first : second;
        const auto in = x.clone().requires_grad_();
        const auto out = dp(in);
        wrong += !torch::allclose(out, t % 2 ? expected_a : expected_b, 1e-5, 1e-6);
        const auto gradient = torch::autograd::grad({out.square().sum()}, {in})[0];
        wrong += !torch::allclose(gradient, t % 2 ? wanted_a : wanted_b, 1e-4, 1e-5);
      }
    });
  for (auto& each : threads) each.join();
  EXPECT_EQ(wrong, 0);
}

TEST(DataParallel, results_and_copies_outlive_it) {
  Mlp model;
  const auto x = torch::randn({4, 6});
  const auto expected = gradients_of(model, model(x).sum());
  auto dp = std::make_optional<DataParallel<MlpImpl>>(model, cpus(2));
  auto copy = *dp;
  auto loss = (*dp)(x).sum();
  dp.reset();
  loss.backward();
  expect_close(grads(*model), expected, 1e-5);
  // One thread destroys its copy while another uses its own.
  auto other = std::make_optional(copy);
  std::thread going([&] { other.reset(); });
  for (int i = 0; i < 20; ++i) copy(x).sum().backward();
  going.join();
}

TEST(DataParallel, a_forked_child_gets_an_error_and_ends_in_order) {
  Mlp model;
  auto dp = std::make_optional<DataParallel<MlpImpl>>(model, cpus(2));
  const auto x = torch::ones({2, 6});
  const pid_t child = ::fork();
  if (child == 0) {
    bool refused = false;
    try {
      (*dp)(x);
    } catch (const Error& e) {
      refused = std::string(e.what()).find("forked") != std::string::npos;
    }
    dp.reset();
    ::_exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  (*dp)(x);
}

// The replica of the first row runs the backward pass of an earlier call.
struct InsideImpl : torch::nn::Cloneable<InsideImpl> {
  InsideImpl() { reset(); }
  void reset() override { linear = register_module("linear", torch::nn::Linear(6, 2)); }
  at::Tensor forward(const at::Tensor& x) {
    if (earlier->defined() && x[0][0].item<float>() == 1) earlier->sum().backward();
    return linear(x);
  }
  torch::nn::Linear linear{nullptr};
  std::shared_ptr<at::Tensor> earlier = std::make_shared<at::Tensor>();
};

TEST(DataParallel, a_backward_from_inside_a_replica_is_refused) {
  auto model = std::make_shared<InsideImpl>();
  DataParallel dp(model, cpus(2));
  auto x = at::zeros({4, 6});
  x[0][0] = 1;
  *model->earlier = dp(x);
  EXPECT_THAT(error_of<ReplicaError>([&] { dp(x); }), HasSubstr("inside one of its own replicas"));
}

TEST(DataParallel, one_device_or_none_is_the_module_itself) {
  Plain model;  // Cannot be replicated, and need not be.
  const auto x = torch::randn({4, 6}, torch::requires_grad());
  for (const auto& devices : {cpus(1), std::vector<at::Device>{}}) {
    DataParallel dp(model, devices);
    if (!dp.devices().empty() && dp.devices()[0].is_cuda()) continue;
    EXPECT_TRUE(at::equal(dp(x), model(x)));
    torch::autograd::grad({torch::autograd::grad({dp(x).square().sum()}, {x}, {}, true, true)[0].sum()}, {x});
  }
}

TEST(DataParallel, devices_that_do_not_go_together_are_refused) {
  Mlp model;
  const auto with = [&](std::vector<at::Device> devices, DataParallelOptions options = {}) {
    return error_of<ConfigError>([&] { DataParallel(model, devices, options); });
  };
  if (!torch::cuda::is_available()) {
    EXPECT_THAT(with({at::kCPU, {at::kCUDA, 0}}), HasSubstr("finds no CUDA device"));
    EXPECT_THAT(with(cpus(2), {.output_device = at::Device(at::kCUDA, 0)}),
                HasSubstr("finds no CUDA device"));
  } else {
    EXPECT_THAT(with({at::kCPU, {at::kCUDA, 0}}),
                HasSubstr("devices must be of one type, got cpu and cuda:0"));
  }
  EXPECT_THAT(with({at::kMeta, at::kMeta}), HasSubstr("expected a cpu or cuda device, got meta"));
  EXPECT_THAT(with(cpus(2), {.threads_per_replica = -1}),
              HasSubstr("threads_per_replica: expected at least 0 (0: automatic), got -1"));
  EXPECT_THAT(error_of<ConfigError>([] { DataParallel(std::shared_ptr<MlpImpl>(), cpus(2)); }),
              HasSubstr("module holder is empty"));
  EXPECT_THAT(error_of<ConfigError>([] { DataParallel(Mlp(nullptr), cpus(2)); }),
              HasSubstr("module holder is empty"));
}

// Masks depend on samples, not on the replica that processes them.
TEST(DataParallel, dropout_of_lockstep_drops_what_one_device_drops) {
  nn::Sequential model(nn::Linear(6, 32), lockstep::nn::Dropout(0.3), nn::Linear(32, 2));
  lockstep::nn::name_layers(*model);
  DataParallel parallel(model, cpus(3));
  const auto x = torch::randn({7, 6});
  const lockstep::nn::DropoutScope scope({.seed = 4, .step = 2, .first_sample = 10});
  EXPECT_TRUE(torch::allclose(parallel(x), model->forward(x), 1e-5, 1e-6));
}

}  // namespace
}  // namespace lockstep::testing
