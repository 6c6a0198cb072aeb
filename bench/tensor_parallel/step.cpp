// One rank of bench_tensor_parallel. Prints "ready", then answers each line with the milliseconds per step:
// "plain 10" (split layers), "sequence 10" (also split along the sequence between layers) or "floor 10" (the
// same slices without communication).
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <map>

#include "bench/serve.h"
#include "cmake/multicall.h"

namespace lockstep::bench::tensor_parallel {
namespace {

constexpr std::int64_t kWidth = 256, kHead = 64, kBlocks = 4, kBatch = 8, kTokens = 128;

// slices: number of ranks that split the inner features of attention and the MLP; the outer width is whole.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t slices = 1)
      : first(torch::nn::LayerNormOptions({kWidth})),
        second(torch::nn::LayerNormOptions({kWidth})),
        qkv(kWidth, 3 * kWidth / slices),
        out(kWidth / slices, kWidth),
        up(kWidth, 4 * kWidth / slices),
        down(4 * kWidth / slices, kWidth) {
    register_module("first", first);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("second", second);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto all = qkv(first(x));
    const auto heads = all.size(-1) / (3 * kHead);
    const auto parts =
        all.view({all.size(0), all.size(1), 3, heads, kHead}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto seen =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    const auto y = x + out(seen.transpose(1, 2).flatten(2));
    return y + down(at::gelu(up(second(y))));
  }
  Unit<torch::nn::LayerNorm> first, second;
  Unit<nn::Linear> qkv, out, up, down;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t slices = 1) {
    for (int i = 0; i < kBlocks; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(slices)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return x;
  }
  std::vector<Block> blocks;
};
TORCH_MODULE(Net);

ParallelPlan plan(bool sequence) {
  const auto dim = sequence ? std::optional<std::int64_t>(1) : std::nullopt;
  ParallelPlan result = {{"*.qkv", Colwise{.sequence_dim = dim, .parts = 3}},
                         {"*.out", Rowwise{.sequence_dim = dim}},
                         {"*.up", Colwise{.sequence_dim = dim}},
                         {"*.down", Rowwise{.sequence_dim = dim}}};
  if (sequence)
    result.insert(result.end(), {{"*.first", SequenceParallel{}}, {"*.second", SequenceParallel{}}});
  return result;
}

}  // namespace

MULTICALL_MAIN(tensor_parallel_step) {
  at::set_num_threads(1);
  at::globalContext().setFlushDenormal(true);
  auto world = World::from_environment();
  auto group = world.group();
  torch::manual_seed(1);
  Net plain, sequence, floor(world.size());
  parallelize_module(*plain, group, plan(false));
  parallelize_module(*sequence, group, plan(true));
  std::map<std::string, std::pair<Net, std::unique_ptr<SGD>>> nets;
  for (auto& [name, net] :
       {std::pair("plain", plain), std::pair("sequence", sequence), std::pair("floor", floor)})
    nets.emplace(name, std::pair(net, std::make_unique<SGD>(net->parameters(), SGDOptions{.lr = 1e-3})));
  serve(group, [&](const std::string& kind, int steps) {
    auto& [net, optimizer] = nets.at(kind);
    torch::manual_seed(2);  // Every rank has the same data.
    return milliseconds_of_a_step(steps, [&, &net = net, &optimizer = optimizer] {
      auto inputs = torch::randn({kBatch, kTokens, kWidth}),
           targets = torch::randn({kBatch, kTokens, kWidth});
      if (kind == "sequence") {
        inputs = scatter_to_group(inputs, group, 1);
        targets = scatter_to_group(targets, group, 1);
      }
      optimizer->zero_grad();
      torch::mse_loss(net(inputs), targets).backward();
      optimizer->step();
    });
  });
  return 0;
}

}  // namespace lockstep::bench::tensor_parallel
