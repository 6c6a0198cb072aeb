// One rank of bench_gpt2. Prints "ready", then answers the conductor, gpt2.py: "ddp 10" and "local 10" with
// the milliseconds per step, "loss 0" with the last loss, "memory 0" with the peak of the device's memory in
// GiB, "kernels 5" with the milliseconds of a step's kernels, which it lists on stderr.
#include <lockstep/lockstep.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <map>

#include <ATen/DeviceAccelerator.h>

#include "bench/gpt2/model.h"
#include "bench/serve.h"
#include "cmake/multicall.h"

namespace lockstep::bench::gpt2 {
namespace {

void settle() {
  if (torch::cuda::is_available()) torch::cuda::synchronize();
}

double peak_gib() {
  if (!torch::cuda::is_available()) return 0;
  using c10::CachingAllocator::StatType;
  const auto stats = at::accelerator::getDeviceStats(0);
  return static_cast<double>(stats.allocated_bytes[static_cast<std::size_t>(StatType::AGGREGATE)].peak) /
         (1 << 30);
}

// Uses LibTorch's own profiler.
double list_kernels(int steps, const std::function<void()>& step) {
  namespace profiler = torch::autograd::profiler;
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  const std::set<profiler::ActivityType> activities = {profiler::ActivityType::CPU,
                                                       profiler::ActivityType::CUDA};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  for (int i = 0; i < steps; ++i) step();
  settle();
  const auto result = profiler::disableProfiler();
  struct Row {
    double ms = 0;
    int launches = 0;
  };
  std::map<std::string, Row> rows;
  double total = 0;
  int launches = 0;
  for (const auto& event : result->events()) {
    if (event.deviceType() != c10::DeviceType::CUDA) continue;
    const double ms = static_cast<double>(event.durationNs()) / 1e6 / steps;
    auto& row = rows[event.name().substr(0, 110)];
    row.ms += ms, total += ms;
    ++row.launches, ++launches;
  }
  std::vector<std::pair<std::string, Row>> sorted(rows.begin(), rows.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.second.ms > b.second.ms; });
  fmt::print(stderr, "kernels of a step: {:.2f} ms in {} launches\n", total, launches / steps);
  for (const auto& [name, row] : sorted)
    if (row.ms > 0.02)
      fmt::print(stderr, "{:8.3f} ms {:5.1f} %  {:6.1f} x  {}\n", row.ms, 100 * row.ms / total,
                 static_cast<double>(row.launches) / steps, name);
  return total;
}

// A model with its optimizer.
struct Learner {
  Learner(const Shape& shape, at::Device device, bool capturable) : model(shape) {
    model->to(device, device.is_cuda() ? at::kBFloat16 : at::kFloat);
    optimizer =
        std::make_unique<AdamW>(model->parameters(), AdamWOptions{.lr = 3e-4,
                                                                  .betas = {0.9, 0.95},
                                                                  .weight_decay = 0.1,
                                                                  .master_weights = device.is_cuda(),
                                                                  .capturable = capturable,
                                                                  .implementation = Implementation::fused});
  }
  template <typename Call>
  at::Tensor step(Call&& call, const at::Tensor& inputs, const at::Tensor& targets) {
    optimizer->zero_grad();
    auto loss = call(inputs, targets);
    loss.backward();
    optimizer->step();
    return loss.detach();
  }

  Gpt2 model;
  std::unique_ptr<AdamW> optimizer;
};

void run(const Shape& shape, std::int64_t batch, bool captured) {
  torch::manual_seed(1);
  auto world = World::from_environment();
  const at::Device device = torch::cuda::is_available() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  const bool cuda = device.is_cuda();
  std::optional<GraphStream> stream;
  if (captured) stream.emplace(device);
  const auto text = torch::randint(shape.vocabulary, {batch, shape.context + 1}).to(device);
  const auto inputs = text.narrow(1, 0, shape.context).contiguous();
  const auto targets = text.narrow(1, 1, shape.context).contiguous();
  auto group = world.group();
  Learner with(shape, device, cuda && captured);
  DistributedDataParallel ddp(with.model, group);
  std::optional<Learner> without;  // Constructed on demand, because it takes as much memory.
  at::Tensor loss;
  std::int64_t count = 0;
  StepGraph graph([&](const at::Tensor& x, const at::Tensor& y) { return with.step(ddp, x, y); });
  const std::map<std::string, std::function<void()>> kinds = {
      {"ddp", [&] { loss = captured ? graph.run(inputs, targets) : with.step(ddp, inputs, targets); }},
      {"local",
       [&] {
         const auto call = [&](const auto& x, const auto& y) { return without->model->forward(x, y); };
         loss = without->step(call, inputs, targets);
       }},
  };
  serve(group, [&](const std::string& kind, int steps) {
    if (kind == "memory") return peak_gib();
    if (kind == "loss") return loss.item<double>();
    if (kind == "kernels") return list_kernels(steps, kinds.at("ddp"));
    if (kind == "local" && !without) without.emplace(shape, device, false);
    settle();
    const auto ms = milliseconds_of_a_step(1, [&] {
      for (int i = 0; i < steps; ++i) {
        kinds.at(kind)();
        world.step(++count);  // Lets a profiler record the steps.
      }
      settle();
    });
    // After the warm-up, make sure that the requested variant is measured.
    if (captured && cuda && !graph.captured() && count > 10)
      throw Error(fmt::format("the step was not captured as a CUDA graph: {}", graph.reason()));
    return ms / steps;
  });
}

}  // namespace

MULTICALL_MAIN(gpt2_step) {
  const bool captured = argc == 4 && std::string(argv[3]) == "graph";
  if (argc != 3 && !captured) {
    fmt::print(stderr, "usage: gpt2_step gpt2|tiny BATCH [graph]\n");
    return 2;
  }
  const bool tiny = std::string(argv[1]) == "tiny";
  const Shape small{.layers = 2, .heads = 2, .width = 32, .context = 16, .vocabulary = 64};
  run(tiny ? small : Shape{}, std::stoll(argv[2]), captured);
  return 0;
}

}  // namespace lockstep::bench::gpt2
