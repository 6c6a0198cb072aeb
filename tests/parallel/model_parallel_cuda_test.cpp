// Tensor parallelism and pipelines with models on CUDA, compared with one model on the CPU.
#include <algorithm>

#include <c10/util/Exception.h>
#include <lockstep/parallel/pipeline.h>
#include <lockstep/parallel/tensor_parallel.h>

#include "parallel/models.h"
#include "parallel/tensor_parallel_models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

std::vector<at::Tensor> copied_to_cpu(std::vector<at::Tensor> tensors) {
  for (auto& each : tensors) each = each.cpu();
  return tensors;
}

class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { text += warning.msg() + "\n"; }
  std::string text;
};

// First, because LibTorch warns once in a process. Each stage but the last goes backward from a product of matrices.
TEST(ModelParallelCuda, a_pipeline_has_a_context_before_it_calls_cublas) {
  on_every_rank([](World& world) {
    if (!world.device().is_cuda()) GTEST_SKIP() << "no CUDA";
    Warnings warnings;
    {
      const c10::WarningUtils::WarningHandlerGuard collect(&warnings);
      std::vector<PipelineStage> pieces;
      for (int i = 0; i < std::max(2, world.size()); ++i) {
        torch::nn::Linear layer(6, 6);
        layer->to(world.device());
        pieces.emplace_back(layer, "layers." + std::to_string(i));
      }
      Pipeline pipeline(std::move(pieces), world.group(), Schedule1F1B{.num_microbatches = 2});
      const auto input = at::ones({4, 6}, at::TensorOptions(world.device()));
      pipeline.step(input, input, [](const at::Tensor& output, const at::Tensor& target) {
        return at::matmul(output, target.t()).sum();
      });
    }
    EXPECT_THAT(warnings.text, Not(HasSubstr("CUDA context")));
  });
}

TEST(ModelParallelCuda, split_layers_equal_one_ranks) {
  on_every_rank([](World& world) {
    torch::nn::Linear up(8, 24), down(24, 8);
    for (auto* each : {&up, &down}) fill_parameters(**each, 30), (*each)->to(at::kDouble);
    ColumnParallelLinear column(8, 24, world.group());
    RowParallelLinear row(24, 8, world.group());
    column->to(world.device()), row->to(world.device());
    take(*column, *up), take(*row, *down);
    const auto run = [&](const at::Device& device, const auto& body) {
      auto x = doubles(31, {2, 4, 8}).to(device).requires_grad_();
      const auto y = body(x);
      (y * y).sum().backward();
      return std::vector<at::Tensor>{y.detach().cpu(), x.grad().cpu()};
    };
    const auto expected = run(at::kCPU, [&](const auto& x) { return down(up(x).tanh()); });
    const auto split = run(world.device(), [&](const auto& x) { return row(column(x).tanh()); });
    EXPECT_TRUE(all_close(split, expected, 1e-10));
    EXPECT_TRUE(all_close(copied_to_cpu(full_gradients(*column)), gradients_of(*up), 1e-10));
    EXPECT_TRUE(all_close(copied_to_cpu(full_gradients(*row)), gradients_of(*down), 1e-10));
  });
}

std::vector<PipelineStage> pieces_of(int count, const at::Device& device) {
  std::vector<PipelineStage> pieces;
  for (int i = 0; i < count; ++i) {
    torch::nn::Linear layer(6, 6);
    fill_parameters(*layer, 1000 + 10 * static_cast<std::uint64_t>(i));
    layer->to(device, at::kDouble);
    pieces.emplace_back(layer, "layers." + std::to_string(i));
  }
  return pieces;
}

TEST(ModelParallelCuda, a_pipeline_equals_one_ranks) {
  on_every_rank([](World& world) {
    constexpr int kMicrobatches = 4;
    const auto loss_of = [](const at::Tensor& output, const at::Tensor& target) {
      return torch::mse_loss(output, target);
    };
    const int count = world.size() + 1;
    const auto input = doubles(100, {24, 6}), target = doubles(200, {24, 6});

    auto whole = pieces_of(count, at::kCPU);
    std::map<std::string, at::Tensor> expected;
    const auto inputs = input.chunk(kMicrobatches), targets = target.chunk(kMicrobatches);
    for (std::size_t m = 0; m < kMicrobatches; ++m) {
      StageValues values = {inputs[m]};
      for (const auto& piece : whole) values = piece(values);
      (loss_of(values[0], targets[m]) / kMicrobatches).backward();
    }
    for (const auto& piece : whole)
      for (const auto& item : piece.module()->named_parameters())
        expected[*piece.name() + "." + item.key()] = item.value().grad();

    Pipeline pipeline(pieces_of(count, world.device()), world.group(),
                      Schedule1F1B{.num_microbatches = kMicrobatches});
    for (int step = 0; step < 3; ++step) {
      for (auto& parameter : pipeline.parameters()) parameter.mutable_grad().reset();
      pipeline.step(input.to(world.device()), target.to(world.device()), loss_of);
      for (const auto& item : pipeline.module()->named_parameters()) {
        ASSERT_TRUE(item.value().grad().defined()) << item.key();
        EXPECT_TRUE(at::allclose(item.value().grad().cpu(), expected.at(item.key()), 1e-10, 1e-12))
            << item.key();
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::testing
