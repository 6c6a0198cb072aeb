// One rank of bench_ddp: says "ready", then answers each line it is told, "local 10" or "ddp 10", with the
// milliseconds of a step, and "memory 0" with the peak of the process's memory in MiB. The conductor, ddp.py,
// tells every rank.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>

#include "bench/ddp/models.h"

namespace lockstep::bench {
namespace {

double peak_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (word == "VmHWM:") return status >> word, std::stod(word) / 1024;
  return 0;
}

template <typename M>
void serve(World& world, M model, const std::string& name, const std::string& optimizer_name,
           const std::string& variant) {
  auto group = world.group();
  // The bare model is another: hooks stay with the one that has them. Which one lies where in memory can
  // make a difference, so they change places from one process to the next.
  M bare;
  if (std::getenv("BENCH_SWAP") != nullptr) std::swap(model, bare);
  DistributedDataParallel ddp(model, group, {.zero_copy = variant != "plain"});
  const auto optimizer_for = [&](M& of) -> std::unique_ptr<torch::optim::Optimizer> {
    if (optimizer_name == "sgd") return std::make_unique<SGD>(of->parameters(), SGDOptions{.lr = 1e-3});
    return std::make_unique<AdamW>(of->parameters(), AdamWOptions{.lr = 1e-3});
  };
  auto optimizer = optimizer_for(model), bare_optimizer = optimizer_for(bare);
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
  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string kind;
    int steps = 0;
    words >> kind >> steps;
    if (kind == "memory") {
      std::cout << peak_mib() << std::endl;
      continue;
    }
    group.barrier().wait();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) kinds.at(kind)();
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - begin;
    std::cout << elapsed.count() / steps << std::endl;
  }
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  if (argc != 4) return 2;
  const std::string name = argv[1], optimizer = argv[2], variant = argv[3];
  at::set_num_threads(1);
  at::globalContext().setFlushDenormal(true);
  torch::manual_seed(1);
  auto world = lockstep::World::from_environment();
  torch::manual_seed(2 + world.rank());
  if (name == "mlp") serve(world, Mlp(), name, optimizer, variant);
  if (name == "gpt") serve(world, Gpt(), name, optimizer, variant);
  if (name == "seed") serve(world, Seed(), name, optimizer, variant);
}
