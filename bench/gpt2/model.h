// GPT-2 built from the layers in lockstep/nn. The next norm adds a layer's output to the residual.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace lockstep::bench::gpt2 {

struct Shape {
  std::int64_t layers = 12, heads = 12, width = 768, context = 1024, vocabulary = 50304;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Shape& shape)
      : norm1(torch::nn::LayerNormOptions({shape.width})),
        norm2(torch::nn::LayerNormOptions({shape.width})),
        qkv(shape.width, 3 * shape.width),
        out(shape.width, shape.width),
        down(4 * shape.width, shape.width),
        up(shape.width, 4 * shape.width),
        heads(shape.heads) {
    register_module("norm1", norm1), register_module("qkv", qkv), register_module("out", out);
    register_module("norm2", norm2), register_module("up", up), register_module("down", down);
  }

  nn::LayerNorm norm1, norm2;
  nn::Linear qkv, out, down;
  nn::LinearGELU up;
  std::int64_t heads;
};
TORCH_MODULE(Block);

struct Gpt2Impl : torch::nn::Module {
  explicit Gpt2Impl(const Shape& shape)
      : tokens(shape.vocabulary, shape.width),
        positions(shape.context, shape.width),
        last(torch::nn::LayerNormOptions({shape.width})) {
    register_module("tokens", tokens), register_module("positions", positions);
    for (std::int64_t i = 0; i < shape.layers; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(shape)));
    register_module("last", last);
    // Same initialisation as step.py, with a smaller deviation for layers that add to the residual.
    torch::manual_seed(2);
    at::NoGradGuard no_grad;
    const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(shape.layers));
    for (auto& each : {tokens->weight, positions->weight}) torch::nn::init::normal_(each, 0, 0.02);
    for (auto& block : blocks)
      for (auto* layer : std::initializer_list<torch::nn::LinearImpl*>{block->qkv.get(), block->out.get(),
                                                                       block->up.get(), block->down.get()}) {
        const bool adds = layer == block->out.get() || layer == block->down.get();
        torch::nn::init::normal_(layer->weight, 0, adds ? residual : 0.02);
        torch::nn::init::zeros_(layer->bias);
      }
  }

  // Returns the loss. The head shares the weight of the token embedding.
  at::Tensor forward(const at::Tensor& text, const at::Tensor& targets) {
    auto residual = tokens(text) + positions->weight.narrow(0, 0, text.size(1));
    at::Tensor added, normed;
    for (auto& block : blocks) {
      if (added.defined())
        std::tie(residual, normed) = block->norm1->add(added, residual);
      else
        normed = block->norm1(residual);
      added = block->out(nn::attention(block->qkv(normed), {.heads = block->heads, .causal = true}));
      std::tie(residual, normed) = block->norm2->add(added, residual);
      added = block->down(block->up(normed));
    }
    return nn::linear_cross_entropy(last->add(added, residual).second, tokens->weight, targets);
  }

  torch::nn::Embedding tokens, positions;
  std::vector<Block> blocks;
  nn::LayerNorm last;
};
TORCH_MODULE(Gpt2);

}  // namespace lockstep::bench::gpt2
