// DistributedDataParallel and SyncBatchNorm with models on CUDA, over NCCL or between ranks that share
// a GPU: the same code, the same results.
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

// What one model on the CPU has learned from all ranks' inputs.
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

// The transport itself, also with one rank, where DDP alone has nothing to send.
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

}  // namespace
}  // namespace lockstep::testing
