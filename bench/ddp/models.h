// The models of bench_ddp; step.py has the same for PyTorch.
#pragma once

#include <torch/torch.h>

namespace lockstep::bench {

// Uses at::linear, like Python's nn.Linear; torch::nn::Linear multiplies and then adds the bias.
struct DenseImpl : torch::nn::LinearImpl {
  using LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
};
TORCH_MODULE(Dense);

struct MlpImpl : torch::nn::Module {
  Dense a{1024, 2048}, b{2048, 2048}, c{2048, 2048}, d{2048, 10};
  MlpImpl() {
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
    register_module("d", d);
  }
  at::Tensor forward(const at::Tensor& x) { return d(c(b(a(x).relu()).relu()).relu()); }
};
TORCH_MODULE(Mlp);

constexpr int kWidth = 256, kHeads = 4, kVocabulary = 4096, kTokens = 128;

struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm first{torch::nn::LayerNormOptions({kWidth})},
      second{torch::nn::LayerNormOptions({kWidth})};
  Dense qkv{kWidth, 3 * kWidth}, out{kWidth, kWidth}, up{kWidth, 4 * kWidth}, down{4 * kWidth, kWidth};
  BlockImpl() {
    register_module("first", first);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("second", second);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(at::Tensor x) {
    const auto batch = x.size(0), tokens = x.size(1);
    const auto parts =
        qkv(first(x)).view({batch, tokens, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4}).unbind(0);
    auto attention =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + out(attention.transpose(1, 2).reshape({batch, tokens, kWidth}));
    return x + down(at::gelu(up(second(x))));
  }
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  torch::nn::Embedding token{kVocabulary, kWidth}, position{kTokens, kWidth};
  std::vector<Block> blocks;
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kWidth})};
  Dense head{torch::nn::LinearOptions(kWidth, kVocabulary).bias(false)};
  GptImpl() {
    register_module("token", token);
    register_module("position", position);
    for (int i = 0; i < 4; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block()));
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = token(ids) + position->weight.narrow(0, 0, ids.size(1));
    for (auto& block : blocks) x = block(x);
    return head(norm(x));
  }
};
TORCH_MODULE(Gpt);

// Used only by --allocator, so step.py does not have it.
struct ConvImpl : torch::nn::Module {
  torch::nn::Conv2d a{torch::nn::Conv2dOptions(3, 32, 3).padding(1)},
      b{torch::nn::Conv2dOptions(32, 64, 3).padding(1)}, c{torch::nn::Conv2dOptions(64, 64, 3).padding(1)};
  torch::nn::BatchNorm2d norm{64};
  Dense d{64 * 8 * 8, 10};
  ConvImpl() {
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
    register_module("norm", norm);
    register_module("d", d);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = torch::max_pool2d(b(a(x).relu()).relu(), 2);
    return d(torch::max_pool2d(norm(c(y)).relu(), 2).flatten(1));
  }
};
TORCH_MODULE(Conv);

struct SeedImpl : torch::nn::Module {
  Dense linear{10, 1};
  SeedImpl() { register_module("linear", linear); }
  at::Tensor forward(const at::Tensor& x) { return linear(x); }
};
TORCH_MODULE(Seed);

// A batch of the case. loss_of() computes the loss of a model's output.
struct Batch {
  at::Tensor inputs, targets;
};
inline Batch batch_of(const std::string& name) {
  if (name == "mlp") return {torch::randn({32, 1024}), torch::randint(10, {32})};
  if (name == "conv") return {torch::randn({16, 3, 32, 32}), torch::randint(10, {16})};
  if (name == "gpt")
    return {torch::randint(kVocabulary, {4, kTokens}), torch::randint(kVocabulary, {4 * kTokens})};
  return {torch::randn({32, 10}), torch::randn({32, 1})};
}
inline at::Tensor loss_of(const std::string& name, const at::Tensor& output, const at::Tensor& targets) {
  if (name == "seed") return torch::mse_loss(output, targets);
  return at::cross_entropy_loss(output.reshape({-1, output.size(-1)}), targets);
}

}  // namespace lockstep::bench
