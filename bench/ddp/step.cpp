// One rank of bench_ddp. Prints "ready", then answers the conductor, ddp.py, which sends the same lines to
// every rank: "local 10" or "ddp 10" with the milliseconds per step, "memory 0" with the peak memory of the
// process in MiB, "pss 0" with its current share of memory.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>

#include "bench/ddp/models.h"
#include "bench/serve.h"
#include "cmake/multicall.h"

namespace lockstep::bench::ddp {
namespace {

double mib_in(const char* file, const std::string& what) {
  std::ifstream status(file);
  for (std::string word; status >> word;)
    if (word == what) return status >> word, std::stod(word) / 1024;
  return 0;
}

// Makes the optimizer that every rank runs itself, or the one that the ranks share.
template <typename Inner, typename M, typename Options>
std::unique_ptr<torch::optim::Optimizer> optimizer_of(DistributedDataParallel<M>& ddp, const Options& options,
                                                      const std::string& variant) {
  if (variant == "fused" || variant == "shared")
    return std::make_unique<DistributedOptimizer<Inner>>(
        ddp, options, DistributedOptimizerOptions{.share_weights = variant == "shared"});
  return std::make_unique<Inner>(ddp.module()->parameters(), options);
}

template <typename M>
void run(World& world, M model, const std::string& name, const std::string& optimizer_name,
         const std::string& variant) {
  auto group = world.group();
  // The bare model is a separate one, because hooks stay on DDP's model. Their addresses can affect the
  // times, so they swap places from one process to the next.
  M bare = std::getenv("BENCH_STATE") != nullptr ? model : M();  // With BENCH_STATE, measure one model only.
  if (std::getenv("BENCH_SWAP") != nullptr) std::swap(model, bare);
  DistributedDataParallel ddp(model, group, {.zero_copy = variant != "plain"});
  const SGDOptions sgd{.lr = 1e-3};
  const AdamWOptions adamw{.lr = 1e-3};
  auto optimizer = optimizer_name == "sgd" ? optimizer_of<SGD>(ddp, sgd, variant)
                                           : optimizer_of<AdamW>(ddp, adamw, variant);
  std::unique_ptr<torch::optim::Optimizer> bare_optimizer;
  if (optimizer_name == "sgd")
    bare_optimizer = std::make_unique<SGD>(bare->parameters(), sgd);
  else
    bare_optimizer = std::make_unique<AdamW>(bare->parameters(), adamw);
  const auto step = [&](auto&& call, torch::optim::Optimizer& with) {
    auto [inputs, targets] = batch_of(name);
    with.zero_grad();
    loss_of(name, call(inputs), targets).backward();
    with.step();
  };
  const std::map<std::string, std::function<void()>> kinds = {
      {"ddp", [&] { step(ddp, *optimizer); }},
      {"local", [&] { step([&](const at::Tensor& x) { return bare->forward(x); }, *bare_optimizer); }},
      {"no_sync",
       [&] {
         auto guard = ddp.no_sync();
         step(ddp, *optimizer);
       }},
  };
  bench::serve(group, [&](const std::string& kind, int steps) {
    if (kind == "memory") return mib_in("/proc/self/status", "VmHWM:");
    if (kind == "pss") {
      empty_cpu_cache();  // Counts the model's memory only, not the cache for its next step.
      return mib_in("/proc/self/smaps_rollup", "Pss:");
    }
    return milliseconds_of_a_step(steps, kinds.at(kind));
  });
}

}  // namespace

MULTICALL_MAIN(ddp_step) {
  if (argc != 4) return 2;
  const std::string name = argv[1], optimizer = argv[2], variant = argv[3];
  at::set_num_threads(1);
  at::globalContext().setFlushDenormal(true);
  torch::manual_seed(1);
  auto world = lockstep::World::from_environment();
  torch::manual_seed(2 + world.rank());
  if (name == "mlp") run(world, Mlp(), name, optimizer, variant);
  if (name == "gpt") run(world, Gpt(), name, optimizer, variant);
  if (name == "conv") run(world, Conv(), name, optimizer, variant);
  if (name == "seed") run(world, Seed(), name, optimizer, variant);
  return 0;
}

}  // namespace lockstep::bench::ddp
