// A GPT in plain LibTorch: token and position embeddings, pre-norm blocks of attention and MLP (GPT-2's
// layout), a final norm, and a head that shares its weight with the token embedding.
//
//   gpt::Gpt model(gpt::Config{.layers = 4, .heads = 4, .width = 128});
//   auto logits = model(tokens);   // [batch, length] int64 -> [batch, length, vocabulary]
//
// The model does not depend on ranks. Layers are held as lockstep::Unit, so that techniques can intercept
// their calls. Attention derives the number of its heads from the output of qkv, which may compute only some
// of them. The model is a sequence of pieces (an input, each block, an output), from which pipeline stages
// are built.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/unit.h>
#include <lockstep/nn/dropout.h>
#include <lockstep/nn/linear.h>
#include <lockstep/parallel/pipeline_stage.h>
#include <torch/torch.h>

namespace gpt {

using at::Tensor;
namespace nn = torch::nn;

// Change these to use other layers throughout the model.
using Linear = lockstep::Unit<lockstep::nn::Linear>;
using LayerNorm = lockstep::Unit<nn::LayerNorm>;
using Embedding = lockstep::Unit<nn::Embedding>;
// Its masks depend on the sample, not on the rank that processes it.
using Dropout = lockstep::Unit<lockstep::nn::Dropout>;

struct Config {
  std::int64_t layers = 4;
  std::int64_t heads = 4;
  std::int64_t width = 128;       // Number of features passed from block to block.
  std::int64_t context = 128;     // Maximum number of tokens in a sequence.
  std::int64_t vocabulary = 256;  // Bytes.
  double dropout = 0;
  bool tied = true;  // The head shares the weight of the token embedding.
};

inline const Config& checked(const Config& config) {
  for (const auto& [name, value] : {std::pair("layers", config.layers), std::pair("heads", config.heads),
                                    std::pair("width", config.width), std::pair("context", config.context),
                                    std::pair("vocabulary", config.vocabulary)})
    if (value < 1) throw lockstep::ConfigError(fmt::format("{}: expected at least 1, got {}", name, value));
  if (config.width % config.heads != 0)
    throw lockstep::ConfigError(
        fmt::format("width {} cannot be divided among {} heads", config.width, config.heads));
  if (!(config.dropout >= 0 && config.dropout < 1))
    throw lockstep::ConfigError(
        fmt::format("dropout: expected at least 0 and below 1, got {}", config.dropout));
  return config;
}

struct AttentionImpl : nn::Module {
  explicit AttentionImpl(const Config& config)
      : qkv(config.width, 3 * config.width),
        out(config.width, config.width),
        dropout(config.dropout),
        head_dim(config.width / config.heads) {
    register_module("qkv", qkv), register_module("out", out), register_module("dropout", dropout);
  }

  // Causal attention: each token attends to itself and the tokens before it.
  Tensor forward(const Tensor& x) {
    const auto all = qkv(x);  // Queries, keys and values of this rank's heads, concatenated.
    const auto heads = all.size(-1) / (3 * head_dim);
    const auto parts =
        all.view({all.size(0), all.size(1), 3, heads, head_dim}).permute({2, 0, 3, 1, 4}).unbind();
    const auto seen = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{},
                                                       /*dropout_p=*/0.0, /*is_causal=*/true);
    return dropout(out(seen.transpose(1, 2).flatten(2)));
  }

  Linear qkv, out;
  Dropout dropout;
  std::int64_t head_dim;
};
TORCH_MODULE(Attention);

struct MlpImpl : nn::Module {
  explicit MlpImpl(const Config& config)
      : up(config.width, 4 * config.width), down(4 * config.width, config.width), dropout(config.dropout) {
    register_module("up", up), register_module("down", down), register_module("dropout", dropout);
  }
  Tensor forward(const Tensor& x) { return dropout(down(at::gelu(up(x), "tanh"))); }

  Linear up, down;
  Dropout dropout;
};
TORCH_MODULE(Mlp);

// The pieces: each takes one tensor and returns one.

struct InputImpl : nn::Module {
  explicit InputImpl(const Config& config)
      : tokens(config.vocabulary, config.width),
        positions(config.context, config.width),
        dropout(config.dropout) {
    register_module("tokens", tokens), register_module("positions", positions);
    register_module("dropout", dropout);
  }
  Tensor forward(const Tensor& text) {
    return dropout(tokens(text) + positions(at::arange(text.size(1), text.options())));
  }

  Embedding tokens, positions;
  Dropout dropout;
};
TORCH_MODULE(Input);

struct BlockImpl : nn::Module {
  explicit BlockImpl(const Config& config)
      : norm1(nn::LayerNormOptions({config.width})),
        norm2(nn::LayerNormOptions({config.width})),
        attn(config),
        mlp(config) {
    register_module("norm1", norm1), register_module("attn", attn);
    register_module("norm2", norm2), register_module("mlp", mlp);
  }
  Tensor forward(const Tensor& x) {
    const auto attended = x + attn(norm1(x));
    return attended + mlp(norm2(attended));
  }

  LayerNorm norm1, norm2;
  Attention attn;
  Mlp mlp;
};
TORCH_MODULE(Block);

// A Linear whose weight can be another layer's. `head->weight = tokens->weight` alone would leave the head's
// own weight registered but never trained.
struct TiedLinearImpl : nn::LinearImpl {
  using nn::LinearImpl::LinearImpl;
  void tie(const Tensor& other) { weight = parameters_["weight"] = other; }
};
TORCH_MODULE(TiedLinear);

struct OutputImpl : nn::Module {
  explicit OutputImpl(const Config& config)
      : norm(nn::LayerNormOptions({config.width})),
        head(nn::LinearOptions(config.width, config.vocabulary).bias(false)) {
    register_module("norm", norm), register_module("head", head);
  }
  Tensor forward(const Tensor& x) { return head(norm(x)); }

  LayerNorm norm;
  lockstep::Unit<TiedLinear> head;
};
TORCH_MODULE(Output);

struct GptImpl : nn::Module {
  explicit GptImpl(const Config& config) : input(checked(config)), output(config) {
    for (std::int64_t i = 0; i < config.layers; ++i) blocks.emplace_back(config);
    if (config.tied) output->head->tie(input->tokens->weight);

    register_module("tokens", input->tokens), register_module("positions", input->positions);
    register_module("dropout", input->dropout);
    auto list = register_module("blocks", nn::ModuleList());
    for (auto& block : blocks) list->push_back(block.ptr());
    register_module("norm", output->norm), register_module("head", output->head);
    reset_parameters();
  }

  Tensor forward(const Tensor& text) {
    auto x = input(text);
    for (auto& block : blocks) x = block(x);
    return output(x);
  }

  // The pieces in order, for a pipeline. Layers keep the names that they have here.
  std::vector<lockstep::PipelineStage> pieces() {
    std::vector<lockstep::PipelineStage> result = {{input, ""}};
    for (std::size_t i = 0; i < blocks.size(); ++i)
      result.emplace_back(blocks[i], fmt::format("blocks.{}", i));
    result.emplace_back(output, "");
    return result;
  }

  // Lists a tensor that two layers share once, as in Python.
  std::vector<Tensor> parameters() const {
    std::vector<Tensor> result;
    for (const auto& each : nn::Module::parameters())
      if (std::none_of(result.begin(), result.end(),
                       [&](const Tensor& other) { return each.is_same(other); }))
        result.push_back(each);
    return result;
  }

  // GPT-2's initialisation: normal, with a smaller deviation for layers whose output is added to the residual
  // stream, so that the sum over all blocks does not exceed the scale of a single layer.
  void reset_parameters() {
    constexpr double kDeviation = 0.02;
    const double residual = kDeviation / std::sqrt(2.0 * static_cast<double>(blocks.size()));
    for (const auto& item : named_modules("", /*include_self=*/false)) {
      if (const auto* linear = item.value()->as<nn::Linear>()) {
        const bool adds = item.key().ends_with("attn.out") || item.key().ends_with("mlp.down");
        nn::init::normal_(linear->weight, 0, adds ? residual : kDeviation);
        if (linear->bias.defined()) nn::init::zeros_(linear->bias);
      } else if (const auto* embedding = item.value()->as<nn::Embedding>()) {
        nn::init::normal_(embedding->weight, 0, kDeviation);
      }
    }
  }

  Input input;
  std::vector<lockstep::Unit<Block>> blocks;
  Output output;
};
TORCH_MODULE(Gpt);

}  // namespace gpt
