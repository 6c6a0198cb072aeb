// DistributedDataParallel and SyncBatchNorm with models on CUDA, over NCCL or between ranks that share a GPU:
// same code, same results.
#include <numeric>
#include <set>
#include <thread>

#include <torch/csrc/autograd/profiler_kineto.h>

#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

constexpr std::int64_t kRows = 8;
at::Tensor input_of(int rank, int step) { return numbers(1000 + 100 * step + rank, {kRows, 6}); }

std::vector<at::Tensor> on_cpu(std::vector<at::Tensor> tensors) {
  for (auto& each : tensors) each = each.cpu();
  return tensors;
}

// The result of one model on the CPU with all ranks' inputs.
std::vector<at::Tensor> trained_alone(int ranks, int steps) {
  Mlp model;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    std::vector<at::Tensor> inputs;
    for (int rank = 0; rank < ranks; ++rank) inputs.push_back(input_of(rank, step));
    model(at::cat(inputs)).square().mean().backward();
    optimizer.step();
  }
  return values_of(*model);
}

TEST(DdpCuda, ranks_learn_what_one_learns_with_both_forms_of_zero_grad) {
  on_every_rank([](World& world) {
    for (const bool to_none : {true, false}) {
      Mlp model;
      model->to(world.device());
      DistributedDataParallel ddp(model, world.group(), {.bucket_bytes = 200, .first_bucket_bytes = 1});
      torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 6; ++step) {
        optimizer.zero_grad(to_none);
        ddp(input_of(world.rank(), step).to(world.device())).square().mean().backward();
        optimizer.step();
      }
      for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.grad().device(), world.device());
      EXPECT_TRUE(all_close(on_cpu(values_of(*model)), trained_alone(world.size(), 6), 1e-4));
      check_replicas(*model, world.group());
    }
  });
}

TEST(DdpCuda, accumulation_under_no_sync_is_one_large_batch) {
  on_every_rank([](World& world) {
    Mlp model, one;
    model->to(world.device());
    DistributedDataParallel ddp(model, world.group());
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      one->zero_grad();
      {
        const auto local = ddp.no_sync();
        ddp(input_of(world.rank(), step).to(world.device())).square().mean().backward();
      }
      ddp(input_of(world.rank(), step + 50).to(world.device())).square().mean().backward();
      for (int rank = 0; rank < world.size(); ++rank)
        for (const int each : {step, step + 50})
          one(input_of(rank, each)).square().mean().div(world.size()).backward();
      EXPECT_TRUE(all_close(on_cpu(gradients_of(*model)), gradients_of(*one), 1e-4));
    }
  });
}

// Exercises the transport even with one rank, where DDP by itself sends nothing.
TEST(DdpCuda, hooks_send_the_buckets_over_the_transport) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for (int which = 0; which < 3; ++which) {
      Mlp model;
      model->to(world.device());
      DistributedDataParallel ddp(model, group);
      if (which == 0) ddp.register_comm_hook(bf16_compress_hook());
      if (which == 1) ddp.register_comm_hook(fp16_compress_hook());
      if (which == 2)
        ddp.register_comm_hook([&](GradBucket& bucket) -> std::function<void()> {
          auto work = std::make_shared<Work>(group.all_reduce(bucket.buffer(), {.op = ReduceOp::AVG}));
          return [work] { work->wait(); };
        });
      Mlp one;
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        one->zero_grad();
        ddp(input_of(world.rank(), step).to(world.device())).square().mean().backward();
        for (int rank = 0; rank < world.size(); ++rank)
          one(input_of(rank, step)).square().mean().div(world.size()).backward();
        EXPECT_TRUE(all_close(on_cpu(gradients_of(*model)), gradients_of(*one), which == 2 ? 1e-4 : 1e-2))
            << which << ' ' << step;
      }
    }
  });
}

TEST(DdpCuda, autocast_and_scaler_train_it) {
  on_every_rank([](World& world) {
    Mlp model;
    model->to(world.device());
    DistributedDataParallel ddp(model, world.group());
    AdamW optimizer(model->parameters(), {.lr = 0.01});
    GradScaler scaler;
    double first = 0, last = 0;
    for (int step = 0; step < 30; ++step) {
      optimizer.zero_grad();
      at::Tensor loss;
      {
        const Autocast half(at::kCUDA);
        loss = ddp(input_of(world.rank(), 0).to(world.device())).square().mean();
      }
      scaler.scale(loss).backward();
      scaler.unscale_(optimizer);
      clip_grad_norm(model->parameters(), 1.0);
      scaler.step(optimizer);
      scaler.update();
      (step == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, 0.5 * first);
    check_replicas(*model, world.group());
  });
}

TEST(DdpCuda, an_optimizer_that_ranks_share_has_the_masters_of_its_part) {
  on_every_rank([](World& world) {
    const AdamWOptions options{.lr = 1e-3, .master_weights = true};
    const auto learn = [&](bool shared) {
      Mlp model;
      model->to(world.device(), at::kBFloat16);
      DistributedDataParallel ddp(model, world.group(), {.bucket_bytes = 200, .first_bucket_bytes = 1});
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      if (shared)
        optimizer = std::make_unique<DistributedOptimizer<AdamW>>(ddp, options);
      else
        optimizer = std::make_unique<AdamW>(model->parameters(), options);
      for (int step = 0; step < 6; ++step) {
        optimizer->zero_grad();
        ddp(input_of(world.rank(), step).to(world.device(), at::kBFloat16)).square().mean().backward();
        optimizer->step();
      }
      check_replicas(*model, world.group());
      return on_cpu(values_of(*model));
    };
    const auto shared = learn(true), plain = learn(false);
    for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(shared[i], plain[i])) << i;
  });
}

TEST(DdpCuda, sync_batch_norm_normalises_as_one_with_the_global_batch) {
  on_every_rank([](World& world) {
    torch::nn::Sequential model(Unit<torch::nn::BatchNorm1d>(6), torch::nn::Linear(6, 3));
    torch::nn::BatchNorm1d norm(6);
    torch::nn::Linear last(6, 3);
    fill_parameters(*model, 70);
    fill_parameters(*norm, 70);
    fill_parameters(*last, 72);
    model->to(world.device());
    EXPECT_EQ(convert_sync_batchnorm(*model, world.group()), 1);
    DistributedDataParallel ddp(model, world.group(), {.broadcast_buffers = false});
    ddp(input_of(world.rank(), 0).to(world.device())).square().mean().backward();
    std::vector<at::Tensor> inputs;
    for (int rank = 0; rank < world.size(); ++rank) inputs.push_back(input_of(rank, 0));
    last(norm(at::cat(inputs))).square().mean().backward();
    auto expected = gradients_of(*norm);
    for (auto& each : gradients_of(*last)) expected.push_back(each);
    EXPECT_TRUE(all_close(on_cpu(gradients_of(*model)), expected, 1e-4));
    EXPECT_TRUE(at::allclose(model->buffers()[0].cpu(), norm->running_mean, 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(model->buffers()[1].cpu(), norm->running_var, 1e-4, 1e-5));
  });
}

// Uses LibTorch's profiler to list the driver calls of one step: launches, but nothing that waits.
TEST(DdpCuda, a_step_does_not_wait_for_the_device) {
  if (transport() != "nccl") GTEST_SKIP() << "ranks that share a GPU synchronise on the host";
  on_every_rank([](World& world) {
    namespace profiler = torch::autograd::profiler;
    auto group = world.group();
    Mlp model;
    model->to(world.device());
    DistributedDataParallel ddp(model, group, {.bucket_bytes = 200, .first_bucket_bytes = 1});
    ddp.register_comm_hook([&](GradBucket& bucket) -> std::function<void()> {
      auto work = std::make_shared<Work>(group.all_reduce(bucket.buffer(), {.op = ReduceOp::AVG}));
      return [work] { work->wait(); };
    });
    AdamW optimizer(model->parameters(), {.implementation = Implementation::fused});
    const auto input = input_of(world.rank(), 0).to(world.device());
    const auto step = [&] {
      optimizer.zero_grad();
      ddp(input).square().mean().backward();
      optimizer.step();
    };
    for (int i = 0; i < 3; ++i) step();
    torch::cuda::synchronize();
    const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
    const std::set<profiler::ActivityType> activities = {profiler::ActivityType::CPU,
                                                         profiler::ActivityType::CUDA};
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities);
    {
      RECORD_USER_SCOPE("the step");
      step();
    }
    torch::cuda::synchronize();
    const auto result = profiler::disableProfiler();
    std::uint64_t begin = 0, end = 0;
    for (const auto& event : result->events())
      if (event.name() == "the step" && event.deviceType() == at::kCPU)
        begin = event.startNs(), end = event.endNs();
    ASSERT_GT(end, begin);
    int launches = 0;
    for (const auto& event : result->events()) {
      if (event.deviceType() != at::kCPU || event.startNs() < begin || event.startNs() > end) continue;
      const auto name = event.name();
      launches += name.find("LaunchKernel") != std::string::npos;
      EXPECT_EQ(name.find("Synchronize"), std::string::npos) << name;
      EXPECT_NE(name, "cudaMemcpy");
    }
    EXPECT_GT(launches, 10);  // The profiler has recorded the step.
  });
}

// A group of all ranks whose second all_reduce misses its deadline, because some seconds of work precede it.
Group group_that_is_late(World& world, const at::Tensor& tensor) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  auto group = world.group(ranks);
  group.all_reduce(tensor).wait();
  auto busy = at::rand({8192, 8192}, at::TensorOptions(world.device()).dtype(at::kDouble));
  for (int i = 0; i < 100; ++i) busy = at::mm(busy, busy).div_(8192);
  group.all_reduce(tensor, {.timeout = std::chrono::milliseconds(100)}).wait();
  return group;
}

// wait() only blocks the stream, but a missed deadline on the device is still reported.
TEST(DdpCuda, a_deadline_passes_on_the_device) {
  if (transport() != "nccl") GTEST_SKIP() << "only nccl waits on the device";
  on_every_rank([](World& world) {
    auto tensor = at::ones({16}, at::TensorOptions(world.device()));
    auto group = group_that_is_late(world, tensor);
    std::string told;
    for (int i = 0; i < 300 && told.empty(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      try {
        group.all_reduce(tensor).wait();
      } catch (const CommError& error) {
        told = error.what();
      }
    }
    EXPECT_THAT(told, ::testing::HasSubstr("all_reduce #1 did not complete on the device within"));
    torch::cuda::synchronize();
  });
}

// Lockstep's watchdog thread is not blocked by a program that waits for the device.
TEST(DdpCuda, a_deadline_passes_while_the_program_waits_for_the_device) {
  if (transport() != "nccl") GTEST_SKIP() << "only nccl waits on the device";
  on_every_rank([](World& world) {
    auto tensor = at::ones({16}, at::TensorOptions(world.device())), other = tensor.clone();
    auto group = group_that_is_late(world, tensor);
    using Clock = std::chrono::steady_clock;
    std::optional<Clock::time_point> told;
    std::thread asks([&] {
      for (int i = 0; i < 500 && !told; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        try {
          auto work = group.all_reduce(other);
        } catch (const CommError&) {
          told = Clock::now();
        }
      }
    });
    (void)tensor.sum().item<double>();
    const auto seen = Clock::now();
    asks.join();
    ASSERT_TRUE(told);
    EXPECT_LT(*told, seen);
  });
}

// If the step cannot be captured, training continues eagerly from the same state.
TEST(DdpCuda, a_step_as_a_graph_learns_the_same) {
  on_every_rank([](World& world) {
    const auto learn = [&](bool graph) {
      const GraphStream stream(world.device());
      Mlp model;
      model->to(world.device());
      DistributedDataParallel ddp(model, world.group(), {.bucket_bytes = 200, .first_bucket_bytes = 1});
      AdamW optimizer(model->parameters(), {.lr = 0.01, .capturable = true});
      StepGraph step(
          [&](const at::Tensor& input) {
            optimizer.zero_grad();
            const auto loss = ddp(input).square().mean();
            loss.backward();
            optimizer.step();
            return loss.detach();
          },
          {.enabled = graph});
      for (int i = 0; i < 8; ++i) step.run(input_of(world.rank(), i).to(world.device()));
      if (graph && transport() == "nccl") {
        EXPECT_EQ(step.replays(), 5) << step.reason();
      } else if (graph && world.size() > 1) {
        EXPECT_THAT(step.reason(), ::testing::HasSubstr("use nccl"));
      }
      return on_cpu(values_of(*model));
    };
    const auto captured = learn(true);
    EXPECT_TRUE(all_close(captured, learn(false), 1e-5));
  });
}

// A collective in a CUDA graph: each replay runs it once.
TEST(DdpCuda, collectives_are_captured_with_the_step) {
  on_every_rank([](World& world) {
    auto group = world.group();
    const auto cuda = at::TensorOptions(world.device());
    auto sum = at::zeros({16}, cuda);
    StepGraph step([&](const at::Tensor& input) {
      auto a = input * 2, b = input + 1;
      std::vector<Work> works;
      group.coalesce([&] {
        works.push_back(group.all_reduce(a));
        works.push_back(group.all_reduce(b, {.op = ReduceOp::MAX}));
      });
      for (auto& work : works) work.wait();
      sum.add_(a).add_(b);
      return sum.clone();
    });
    double wanted = 0;
    for (int i = 0; i < 8; ++i) {
      const auto input = at::full({16}, static_cast<double>(i), cuda);
      const auto got = step.run(input);
      wanted += 2.0 * i * world.size() + i + 1;
      EXPECT_EQ(got[3].item<double>(), wanted) << i;
    }
    if (transport() == "nccl")
      EXPECT_EQ(step.replays(), 5) << step.reason();
    else
      EXPECT_THAT(step.reason(), ::testing::HasSubstr("use nccl"));
  });
}

}  // namespace
}  // namespace lockstep::testing
