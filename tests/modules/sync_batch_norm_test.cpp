// SyncBatchNorm, Unit and the hooks of DistributedDataParallel.
#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

// Rank r's rows of the global batch; optionally uneven.
struct Share {
  std::int64_t begin, rows;
};
Share share_of(int rank, int size, std::int64_t total, bool uneven) {
  if (!uneven || size == 1)
    return {total / size * rank, rank + 1 == size ? total - total / size * rank : total / size};
  // Rank 0 has one row, the last rank has the rest, the ranks between have one each.
  return {rank, rank + 1 == size ? total - rank : 1};
}

struct NormedImpl : torch::nn::Module {
  explicit NormedImpl(torch::nn::BatchNormOptions options) : norm(options) {
    register_module("first", first);
    register_module("norm", norm);
    register_module("last", last);
    fill_parameters(*this, 40);
  }
  at::Tensor forward(const at::Tensor& x) { return last(norm(first(x).tanh()).flatten(2).mean(2)); }
  torch::nn::Conv2d first{torch::nn::Conv2dOptions(2, 5, 3)};
  Unit<torch::nn::BatchNorm2d> norm;
  torch::nn::Linear last{5, 2};
};
TORCH_MODULE(Normed);

TEST(SyncBatchNorm, ranks_normalise_as_one_with_the_global_batch) {
  on_every_rank([](World& world) {
    for (const bool uneven : {false, true})
      for (const bool affine : {true, false}) {
        const auto options = torch::nn::BatchNormOptions(5).affine(affine).momentum(0.2);
        constexpr std::int64_t kRows = 12;
        Normed model(options), one(options);
        EXPECT_EQ(convert_sync_batchnorm(*model, world.group()), 1);
        EXPECT_EQ(convert_sync_batchnorm(*model, world.group()), 0);  // Already converted.
        DistributedDataParallel ddp(model, world.group(), {.broadcast_buffers = false});
        torch::optim::SGD mine(model->parameters(), 0.1), theirs(one->parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          const auto x = numbers(300 + step, {kRows, 2, 6, 6}), y = numbers(400 + step, {kRows, 2});
          auto global = x.clone().requires_grad_();
          theirs.zero_grad();
          const auto expected = one(global);
          (expected - y).square().sum().div(kRows).backward();
          const auto [begin, rows] = share_of(world.rank(), world.size(), kRows, uneven);
          auto local = x.narrow(0, begin, rows).clone().requires_grad_();
          mine.zero_grad();
          const auto output = ddp(local);
          // The average over ranks of size times this rank's part is the gradient of the global mean.
          (output - y.narrow(0, begin, rows)).square().sum().mul(world.size()).div(kRows).backward();
          EXPECT_TRUE(at::allclose(output, expected.narrow(0, begin, rows), 1e-4, 1e-5));
          EXPECT_TRUE(
              at::allclose(local.grad() / world.size(), global.grad().narrow(0, begin, rows), 1e-3, 1e-5));
          EXPECT_TRUE(all_close(gradients_of(*model), gradients_of(*one), 1e-4));
          for (std::size_t i = 0; i < one->buffers().size(); ++i)
            EXPECT_TRUE(at::allclose(model->buffers()[i], one->buffers()[i], 1e-5, 1e-6));
          mine.step();
          theirs.step();
        }
        model->eval();
        one->eval();
        const auto x = numbers(500, {3, 2, 6, 6});
        EXPECT_TRUE(at::allclose(model(x), one(x), 1e-3, 1e-5));
      }
  });
}

TEST(SyncBatchNorm, a_rank_may_have_no_rows) {
  on_every_rank([](World& world) {
    if (world.size() == 1) return;
    SyncBatchNorm1d norm(torch::nn::BatchNorm1dOptions(3).momentum(std::nullopt), world.group());
    torch::nn::BatchNorm1d one(torch::nn::BatchNorm1dOptions(3).momentum(std::nullopt));
    for (int step = 0; step < 2; ++step) {
      const auto x = numbers(600 + step, {5, 3});
      auto local = (world.rank() == 0 ? x : at::empty({0, 3})).clone().requires_grad_();
      auto global = x.clone().requires_grad_();
      const auto output = norm(local), expected = one(global);
      EXPECT_EQ(output.size(0), local.size(0));
      output.pow(3).sum().backward();
      expected.pow(3).sum().backward();
      EXPECT_TRUE(at::allclose(norm->running_var, one->running_var, 1e-5, 1e-6));
      if (world.rank() == 0) {
        EXPECT_TRUE(at::allclose(output, expected, 1e-4, 1e-5));
        EXPECT_TRUE(at::allclose(local.grad(), global.grad(), 1e-3, 1e-4));
      }
    }
    EXPECT_THAT(error_of<ConfigError>([&] { norm(at::ones({2, 4})); }),
                AllOf(HasSubstr("3 channels"), HasSubstr("[2, 4]")));
    const auto few = at::ones({world.rank() == 0 ? 1 : 0, 3});
    EXPECT_THAT(error_of<ConfigError>([&] { norm(few); }), HasSubstr("more than one value per channel"));
  });
}

TEST(SyncBatchNorm, sequentials_are_converted_and_plain_members_are_listed) {
  on_every_rank([](World& world) {
    torch::nn::BatchNorm1d shared(4);
    torch::nn::Sequential model(torch::nn::Linear(4, 4), shared, torch::nn::Linear(4, 4),
                                torch::nn::BatchNorm1d(4), shared);
    fill_parameters(*model, 70);
    const auto before = model->parameters();
    const auto names = model->named_parameters().keys();
    const auto x = numbers(700 + world.rank(), {4, 4});
    EXPECT_EQ(convert_sync_batchnorm(*model, world.group()), 2);
    EXPECT_EQ(model->named_parameters().keys(), names);
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(model->parameters()[i].is_same(before[i]));
    const auto output = model->forward(x);
    // Over all ranks together, but not on each rank, the outputs' mean is the bias.
    auto sum = output.detach().mean(0);
    world.group().all_reduce(sum, {.op = ReduceOp::AVG}).wait();
    EXPECT_TRUE(at::allclose(sum, shared->bias, 1e-3, 1e-4));
    EXPECT_EQ(shared->num_batches_tracked.item<std::int64_t>(), 2);

    struct Plain : torch::nn::Module {
      torch::nn::BatchNorm2d norm{3};
      torch::nn::Sequential rest{torch::nn::BatchNorm2d(3)};
      Plain() { register_module("norm", norm), register_module("rest", rest); }
    } plain;
    EXPECT_THAT(error_of<ConfigError>([&] { convert_sync_batchnorm(plain, world.group()); }),
                AllOf(HasSubstr("norm (BatchNorm2d)"), HasSubstr("Unit"), Not(HasSubstr("rest"))));
    EXPECT_EQ(plain.rest->ptr(0)->as<SyncBatchNorm2dImpl>(), nullptr);  // Nothing was changed.
  });
}

TEST(SyncBatchNorm, a_clone_synchronises_too) {
  on_every_rank([](World& world) {
    SyncBatchNorm2d norm(torch::nn::BatchNorm2dOptions(3), world.group());
    fill_parameters(*norm, 80);
    auto copy = std::dynamic_pointer_cast<SyncBatchNorm2dImpl>(norm->clone());
    ASSERT_TRUE(copy);
    EXPECT_TRUE(at::equal(copy->weight, norm->weight));
    EXPECT_NE(copy->weight.const_data_ptr(), norm->weight.const_data_ptr());
    EXPECT_EQ(copy->parameters().size(), 2U);
    EXPECT_TRUE(copy->parameters()[0].is_same(copy->weight));
    copy->forward(numbers(800 + world.rank(), {2, 3, 4, 4}));
    const auto sums = world.group().all_gather_values(copy->running_mean.sum().item<float>());
    for (const auto sum : sums) EXPECT_EQ(sum, sums[0]);
  });
}

struct Doubles : detail::Attachment {
  Doubles() : Attachment("Doubles") {}
  at::Tensor forward(const at::Tensor& x) override { return 2 * x * scale; }
  at::Tensor scale = at::ones({1});
};

TEST(Unit, it_is_the_holder_until_something_is_attached_to_the_module) {
  struct Net : torch::nn::Module {
    Unit<torch::nn::Linear> fc{nullptr};
    Net() { fc = register_module("fc", Unit<torch::nn::Linear>(3, 2)); }
  } net;
  auto copy = net.fc;
  torch::nn::Linear plain = net.fc;  // Converts to LibTorch's holder.
  const auto x = numbers(1, {4, 3});
  EXPECT_TRUE(at::equal(net.fc(x), plain(x)));
  EXPECT_EQ(net.named_parameters().keys(), (std::vector<std::string>{"fc.weight", "fc.bias"}));
  EXPECT_EQ(net.fc->options.in_features(), 3);
  detail::attach(*net.fc, "fc", std::make_shared<Doubles>());
  EXPECT_TRUE(at::equal(net.fc(x), 2 * x));
  EXPECT_TRUE(at::equal(copy(x), 2 * x));
  EXPECT_THAT(error_of<ConfigError>([&] { detail::attach(*copy, "fc", std::make_shared<Doubles>()); }),
              AllOf(HasSubstr("'fc'"), HasSubstr("Doubles attached")));
  Unit<torch::nn::Linear> by_default{torch::nn::LinearOptions(3, 2).bias(false)},
      moved = std::move(by_default);
  EXPECT_EQ(moved(x).size(1), 2);
  Unit<torch::nn::Linear> wrapped(std::make_shared<torch::nn::LinearImpl>(3, 2));
  EXPECT_EQ(wrapped(x).size(1), 2);
  EXPECT_EQ(detail::slot_of(wrapped.get()), nullptr);
  Unit<torch::nn::LSTM> lstm{torch::nn::LSTMOptions(3, 2)};
  EXPECT_EQ(std::get<0>(lstm(x.unsqueeze(0))).size(2), 2);
  detail::attach(*lstm, "lstm", std::make_shared<Doubles>());
  EXPECT_THAT(error_of<ConfigError>([&] { lstm(x.unsqueeze(0)); }), HasSubstr("one tensor"));
}

TEST(Unit, a_call_round_it_is_an_error_in_the_same_step) {
  Unit<torch::nn::Linear> unit(3, 3);
  auto doubles = std::make_shared<Doubles>();
  doubles->scale = unit->bias;
  const auto x = numbers(1, {4, 3});
  unit->forward(x).sum().backward();  // Nothing attached: allowed.
  detail::attach(*unit, "block.fc", doubles);
  unit(x).sum().backward();
  auto first = unit(x), second = unit(x);
  first.sum().backward();
  second.sum().backward();
  EXPECT_THAT(error_of<ConfigError>([&] { unit->forward(x).sum().backward(); }),
              AllOf(HasSubstr("'block.fc' bypassed its Unit"), HasSubstr("block.fc(x)")));
  unit(x).sum().backward();
}

TEST(DdpHooks, low_precision_is_averaged_and_rounded_once) {
  on_every_rank([](World& world) {
    for (const bool half : {true, false}) {
      Mlp model;
      DistributedDataParallel ddp(model, world.group());
      ddp.register_comm_hook(half ? fp16_compress_hook() : bf16_compress_hook());
      const auto type = half ? at::kHalf : at::kBFloat16;
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        ddp(numbers(900 + world.rank(), {4, 6})).square().mean().backward();
        for (std::size_t i = 0; i < model->parameters().size(); ++i) {
          auto sum = at::zeros_like(model->parameters()[i]);
          for (int rank = 0; rank < world.size(); ++rank) {
            Mlp one;
            one(numbers(900 + rank, {4, 6})).square().mean().backward();
            sum += one->parameters()[i].grad().to(type).to(at::kFloat);
          }
          EXPECT_TRUE(at::allclose(model->parameters()[i].grad(),
                                   (sum / world.size()).to(type).to(at::kFloat), 1e-2, 1e-4));
        }
      }
    }
  });
}

TEST(DdpHooks, power_sgd_is_exact_for_matrices_of_its_rank_and_trains_with_feedback) {
  on_every_rank([](World& world) {
    // One row of data per rank, so the average's rank is at most the number of ranks.
    torch::nn::Linear model(40, 30);
    fill_parameters(*model, 90);
    DistributedDataParallel ddp(model, world.group());
    ddp.register_comm_hook(
        power_sgd_hook({.matrix_approximation_rank = world.size(), .start_power_sgd_iter = 2}));
    for (int step = 0; step < 6; ++step) {
      model->zero_grad();
      ddp(numbers(950 + world.rank(), {1, 40})).square().sum().backward();
      auto sum = at::zeros_like(model->weight);
      for (int rank = 0; rank < world.size(); ++rank) {
        torch::nn::Linear one(40, 30);
        fill_parameters(*one, 90);
        one(numbers(950 + rank, {1, 40})).square().sum().backward();
        sum += one->weight.grad();
      }
      EXPECT_TRUE(at::allclose(model->weight.grad(), sum / world.size(), 1e-3, 1e-3)) << step;
    }
    // A full-rank problem: converges even when compressed to rank 1, because of error feedback.
    torch::nn::Linear learner(20, 20);
    fill_parameters(*learner, 91);
    const auto target = numbers(92, {20, 20});
    DistributedDataParallel lossy(learner, world.group());
    lossy.register_comm_hook(power_sgd_hook({.start_power_sgd_iter = 2}));
    torch::optim::SGD optimizer(learner->parameters(), 0.3);
    float first = 0, last = 0;
    for (int step = 0; step < 300; ++step) {
      optimizer.zero_grad();
      const auto x = numbers(2000 + static_cast<std::uint64_t>(step * world.size() + world.rank()), {32, 20});
      auto loss = torch::mse_loss(lossy(x), x.mm(target));
      loss.backward();
      optimizer.step();
      (step == 0 ? first : last) = loss.item<float>();
    }
    EXPECT_LT(last, first / 50);
    check_replicas(*learner, world.group());
    EXPECT_THAT(error_of<ConfigError>([] { power_sgd_hook({.start_power_sgd_iter = 1}); }),
                HasSubstr("at least 2"));
  });
}

}  // namespace
}  // namespace lockstep::testing
