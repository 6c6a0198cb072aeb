// DataParallel on CUDA devices. Using one GPU twice exercises the same paths as two: engine threads, streams
// and copies.
#include <thread>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "parallel/data_parallel_modules.h"

namespace lockstep::testing {
namespace {

namespace nn = torch::nn;

class DataParallelCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  }
  // All devices, with at least two entries.
  static std::vector<at::Device> devices() {
    std::vector<at::Device> result;
    for (int i = 0; i < static_cast<int>(torch::cuda::device_count()); ++i) result.emplace_back(at::kCUDA, i);
    if (result.size() == 1) result.push_back(result[0]);
    return result;
  }
};

TEST_F(DataParallelCuda, gives_the_results_and_gradients_of_one_device) {
  torch::manual_seed(1);
  for (const auto output : {at::Device(at::kCUDA, 0), at::Device(at::kCPU)})
    for (const int batch : {1, 5, 16}) {
      Mlp model;
      model->to(torch::kDouble);
      model->to(at::Device(at::kCUDA, 0));
      DataParallel dp(model, devices(), {.output_device = output});
      // Inputs on the CPU and on the device.
      for (const auto source : {at::Device(at::kCPU), at::Device(at::kCUDA, 0)}) {
        const auto x = torch::randn({batch, 6}, torch::dtype(torch::kDouble).device(source)).requires_grad_();
        const auto expected = model(x.to(at::kCUDA));
        const auto wanted = gradients_of(model, expected.square().sum());
        const auto wanted_x = x.grad().clone();
        x.mutable_grad().reset();
        const auto out = dp(x);
        EXPECT_EQ(out.device(), output);
        expect_close({out.to(at::kCUDA)}, {expected}, 1e-10);
        expect_close(gradients_of(model, out.square().sum()), wanted, 1e-10);
        expect_close({x.grad()}, {wanted_x}, 1e-10);
      }
    }
}

TEST_F(DataParallelCuda, trains_as_one_device_does) {
  torch::manual_seed(2);
  nn::Sequential one(nn::Conv2d(3, 8, 3), nn::ReLU(), nn::Flatten(), nn::Linear(8 * 36, 5));
  one->to(at::Device(at::kCUDA, 0));
  auto two = nn::Sequential(std::dynamic_pointer_cast<nn::SequentialImpl>(one->clone()));
  DataParallel dp(two, devices());
  torch::optim::SGD of_one(one->parameters(), 0.05), of_two(two->parameters(), 0.05);
  for (int step = 0; step < 30; ++step) {
    const auto x = torch::randn({7, 3, 8, 8}).to(at::kCUDA);
    of_one.zero_grad();
    of_two.zero_grad();
    const auto expected = one->forward(x).square().mean(), loss = dp(x).square().mean();
    expected.backward();
    loss.backward();
    of_one.step();
    of_two.step();
    ASSERT_NEAR(loss.item<double>(), expected.item<double>(), 1e-4) << step;
  }
}

TEST_F(DataParallelCuda, keeps_the_first_replicas_buffers) {
  nn::BatchNorm1d model(4), expected(4);
  model->to(at::Device(at::kCUDA, 0));
  expected->to(at::Device(at::kCUDA, 0));
  DataParallel dp(model, devices());
  const auto x = torch::randn({6, 4}).to(at::kCUDA);
  dp(x).sum().backward();
  expected(x.slice(0, 0, (6 + static_cast<int>(devices().size()) - 1) / static_cast<int>(devices().size())));
  expect_close({model->running_mean, model->running_var}, {expected->running_mean, expected->running_var},
               1e-6);
}

TEST_F(DataParallelCuda, works_on_a_stream_of_the_callers) {
  Mlp model;
  model->to(at::Device(at::kCUDA, 0));
  DataParallel dp(model, devices());
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  for (int i = 0; i < 20; ++i) {
    const auto wanted_in = torch::randn({64, 6}).to(at::kCUDA);
    const auto wanted = gradients_of(model, model(wanted_in).square().sum());
    c10::StreamGuard guard(cuda.getStreamFromGlobalPool(at::Device(at::kCUDA, 0)));
    torch::cuda::synchronize();
    expect_close(gradients_of(model, dp(wanted_in * 1).square().sum()), wanted, 1e-3);
  }
}

TEST_F(DataParallelCuda, several_threads_run_backward_at_once) {
  Mlp model;
  model->to(at::Device(at::kCUDA, 0));
  DataParallel dp(model, devices());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 30; ++i) {
        const auto x = torch::randn({6, 6}).to(at::kCUDA).requires_grad_();
        torch::autograd::grad({dp(x).square().sum()}, {x});
      }
    });
  for (auto& each : threads) each.join();
}

TEST_F(DataParallelCuda, errors_name_the_device) {
  Touchy model;
  model->to(at::Device(at::kCUDA, 0));
  DataParallel dp(model, devices());
  EXPECT_THAT(error_of<ReplicaError>([&] { dp(torch::tensor({1.f, 0.f}).to(at::kCUDA)); }),
              HasSubstr("forward of replica 0 of 2, on cuda:0: the input hurts"));
  EXPECT_THAT(error_of<Error>([&] { dp(torch::tensor({0.f, 4.f}).to(at::kCUDA)).sum().backward(); }),
              AllOf(HasSubstr("backward of the replicas on cuda:0, cuda:"), HasSubstr(": backward hurts")));
  Mlp elsewhere;
  EXPECT_THAT(error_of<ConfigError>([&] { DataParallel(elsewhere, devices()); }),
              HasSubstr("must be on the first device, cuda:0, but its parameter 'first.weight' is on cpu"));
}

TEST_F(DataParallelCuda, cpu_workers_may_give_their_results_to_a_gpu) {
  Mlp model;
  DataParallel dp(model, cpus(2), {.output_device = at::Device(at::kCUDA, 0)});
  const auto x = torch::randn({4, 6});
  const auto wanted = gradients_of(model, model(x).square().sum());
  const auto out = dp(x);
  EXPECT_TRUE(out.is_cuda());
  expect_close(gradients_of(model, out.square().sum()), wanted, 1e-5);
}

}  // namespace
}  // namespace lockstep::testing
