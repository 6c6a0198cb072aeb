// A small GPT, trained on any number of ranks. The loss does not depend on how the ranks share the work.
//
//   05_gpt                                            one rank
//   lockstep run -n 2 05_gpt --dp 2                   each rank takes half of every batch
//   lockstep run -n 8 05_gpt --pp 2 --dp 2 --tp 2     also half of the layers, and half of each layer
//   05_gpt --data book.txt --layers 6 --width 256     any text
//
// tests/parity/gpt_twin.py is the same training in PyTorch; it starts from the output of --dump.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

#include "model.h"
#include "text.h"

namespace {

namespace ls = lockstep;

struct Options {
  gpt::Config model;
  std::string data, dump, dtype = "float", schedule = "1f1b";
  std::int64_t steps = 50, batch = 16;
  double lr = 3e-4, clip = 1.0;
  std::uint64_t seed = 0;
  int dp = 0, tp = 1, pp = 1, microbatches = 1;
};

constexpr std::size_t kMadeUp = 1 << 18;  // Bytes of synthetic text.

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("Train a small GPT on bytes of text");
  app.option_defaults()->always_capture_default();
  app.add_option("--data", options.data, "Text file to train on (default: synthetic text)");
  app.add_option("--steps", options.steps)->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--batch", options.batch, "Samples per step, over all ranks")
      ->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--context", options.model.context, "Bytes per sample");
  app.add_option("--layers", options.model.layers);
  app.add_option("--heads", options.model.heads);
  app.add_option("--width", options.model.width);
  app.add_option("--dropout", options.model.dropout);
  app.add_flag("!--untied", options.model.tied, "Give the head its own weight");
  app.add_option("--lr", options.lr);
  app.add_option("--clip", options.clip, "Maximum norm of the gradients; 0 disables clipping")
      ->check(CLI::Range(0.0, 1e30));
  app.add_option("--seed", options.seed, "Seed of the text, the batches and the initial weights");
  app.add_option("--dtype", options.dtype)->check(CLI::IsMember({"float", "double"}));
  app.add_option("--dp", options.dp, "Number of ranks that share a batch; 0: all remaining ranks");
  app.add_option("--tp", options.tp, "Number of ranks that share a layer; must divide the heads and 256")
      ->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--pp", options.pp, "Number of pipeline ranks, which share the layers")
      ->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--schedule", options.schedule,
                 "Pipeline schedule: gpipe, 1f1b, interleaved1f1b, loopedbfs, zbh1, zbv or dualpipev");
  app.add_option("--microbatches", options.microbatches, "Number of micro-batches per rank and step")
      ->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--dump", options.dump, "Write the initial weights and all batches to this folder");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error) == 0 ? 0 : 2);
  }
  return options;
}

void check_layout(Options& options, int ranks) {
  const std::int64_t others = std::int64_t{options.tp} * options.pp;
  if (options.dp == 0 && others <= ranks) options.dp = static_cast<int>(ranks / others);
  if (options.dp * others != ranks)
    throw ls::ConfigError(
        fmt::format("--pp {} --dp {} --tp {}: expected a product of {}, the number of ranks", options.pp,
                    options.dp, options.tp, ranks));
  if (options.batch % (std::int64_t{options.dp} * options.microbatches) != 0)
    throw ls::ConfigError(
        fmt::format("--batch {} cannot be divided among {} ranks with {} micro-batches each", options.batch,
                    options.dp, options.microbatches));
  if (!(options.clip >= 0))
    throw ls::ConfigError(fmt::format("--clip: expected at least 0, got {}", options.clip));
  if (!options.dump.empty() && options.model.dropout > 0)
    throw ls::ConfigError(fmt::format(
        "--dump cannot be combined with --dropout {}, because PyTorch draws different random numbers",
        options.model.dropout));
  if (options.model.heads % options.tp != 0)
    throw ls::ConfigError(
        fmt::format("{} heads cannot be divided among --tp {} ranks", options.model.heads, options.tp));
}

// How each layer is split: attention by heads, the MLP by its inner features, embedding and head by the
// vocabulary.
ls::ParallelPlan plan() {
  return {{"tokens", ls::Rowwise{}},
          {"blocks.*.attn.qkv", ls::Colwise{.parts = 3}},
          {"blocks.*.attn.out", ls::Rowwise{}},
          {"blocks.*.mlp.up", ls::Colwise{}},
          {"blocks.*.mlp.down", ls::Rowwise{}},
          {"head", ls::Colwise{}}};
}

// Writes everything that the PyTorch twin needs to repeat the training.
void dump(const Options& options, const std::string& text, gpt::Gpt model) {
  std::filesystem::create_directories(options.dump);
  ls::save(options.dump + "/model.safetensors", {.model = model,
                                                 .values = {{"heads", options.model.heads},
                                                            {"tied", options.model.tied ? 1 : 0},
                                                            {"lr", options.lr},
                                                            {"clip", options.clip}}});
  std::vector<at::Tensor> batches;
  for (std::int64_t step = 0; step < options.steps; ++step)
    batches.push_back(gpt::batch(
        text,
        {.seed = options.seed, .step = step, .count = options.batch, .context = options.model.context}));
  torch::nn::Module holder;
  holder.register_buffer("batches", at::stack(batches));
  ls::save(options.dump + "/batches.safetensors", {.model = holder});
}

void train(Options options) {
  auto world = ls::World::from_environment();
  check_layout(options, world.size());
  ls::DeviceMesh mesh(world, {{"pp", options.pp}, {"dp", options.dp}, {"tp", options.tp}});
  auto dp = mesh["dp"], tp = mesh["tp"], whole_model = mesh.group({"pp", "tp"});

  const auto text =
      options.data.empty() ? gpt::synthetic_text(options.seed, kMadeUp) : gpt::read_text(options.data);
  torch::manual_seed(options.seed);
  gpt::Gpt model(options.model);
  model->to(world.device(), options.dtype == "double" ? torch::kDouble : torch::kFloat);
  if (!options.dump.empty() && world.is_main()) dump(options, text, model);

  ls::nn::name_layers(*model);
  ls::parallelize_module(*model, tp, plan());
  ls::Pipeline pipeline(model->pieces(), mesh["pp"],
                        ls::ScheduleNamed{options.schedule, options.microbatches});
  model = nullptr;  // The pipeline keeps this rank's pieces.
  ls::DistributedDataParallel ddp(pipeline.module(), dp, {.reduce_in_backward = false});
  ls::AdamW optimizer(pipeline.parameters(), {.lr = options.lr});
  const auto counted = ls::own_parameters(*pipeline.module(), tp, pipeline.own_parameters());
  const auto cross_entropy = [&](const at::Tensor& logits, const at::Tensor& targets) {
    return ls::vocab_parallel_cross_entropy(logits.flatten(0, 1), targets.flatten(), tp);
  };

  const std::int64_t samples = options.batch / options.dp, first = dp.rank() * samples;
  const auto context = options.model.context;
  const char* line = options.dtype == "double" ? "step %ld loss %.12f\n" : "step %ld loss %.6f\n";
  for (std::int64_t step = 0; step < options.steps; ++step) {
    const auto tokens =
        gpt::batch(text,
                   {.seed = options.seed, .step = step, .first = first, .count = samples, .context = context})
            .to(world.device());
    const ls::nn::DropoutScope scope(
        {.seed = options.seed, .step = static_cast<std::uint64_t>(step), .first_sample = first});
    optimizer.zero_grad();
    pipeline.step(tokens.narrow(1, 0, context), tokens.narrow(1, 1, context), cross_entropy);
    ddp.reduce();
    if (options.clip > 0)
      ls::clip_grad_norm(pipeline.parameters(), options.clip, {.group = whole_model, .counted = counted});
    optimizer.step();
    world.step(step + 1);

    auto loss = pipeline.loss();
    dp.all_reduce(loss, {.op = ls::ReduceOp::AVG, .tag = "loss"}).wait();
    if (world.is_main())
      std::printf(line, static_cast<long>(step + 1), loss.item<double>()), std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = parse(argc, argv);
  try {
    train(options);
  } catch (const ls::ConfigError& error) {
    std::fprintf(stderr, "05_gpt: %s\n", error.what());
    return 2;
  } catch (const std::filesystem::filesystem_error& error) {
    std::fprintf(stderr, "05_gpt: %s\n", error.what());
    return 2;
  }
}
