// One rank of bench_pipeline. Prints "ready", then answers each line it reads.
//
// "1f1b 10": the milliseconds per step of that schedule.
// "bubble:1f1b 10": the idle fraction of the ranks' time over as many steps, minus that of a simulation with
// each step's own durations, in percentage points. Rank 0's answer counts; the other ranks answer 0.
// "split:linear 10" and "split:blocks 10": time of the two parts of a backward pass relative to a whole one,
// over as many passes in turns, through nn::Linear only and through transformer blocks.
#include <lockstep/lockstep.h>
#include <lockstep/parallel/pipeline/backward.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "bench/ddp/models.h"
#include "bench/serve.h"
#include "cmake/multicall.h"

namespace lockstep::bench::pipeline {
namespace {

constexpr int kBlocks = 8, kMicrobatches = 8;

struct Contestant {
  Contestant(World& world, const std::string& name)
      : pipeline(make(), world.group(), ScheduleNamed{name, kMicrobatches}) {
    optimizer = std::make_unique<SGD>(pipeline.parameters(), SGDOptions{.lr = 1e-3});
  }
  static std::vector<PipelineStage> make() {
    torch::manual_seed(1);
    std::vector<PipelineStage> pieces;
    for (int i = 0; i < kBlocks; ++i) pieces.emplace_back(Block());
    return pieces;
  }
  void step() {
    const auto inputs = torch::randn({kMicrobatches, kTokens, kWidth}),
               targets = torch::randn({kMicrobatches, kTokens, kWidth});
    optimizer->zero_grad();
    pipeline.step(inputs, targets, [](const at::Tensor& output, const at::Tensor& target) {
      return torch::mse_loss(output, target);
    });
    optimizer->step();
  }
  Pipeline pipeline;
  std::unique_ptr<SGD> optimizer;
};

bool computes(PipelineAction action) { return action.op < PipelineOp::send_forward; }

// Gathers every rank's timings of computing actions on every rank.
std::vector<std::vector<ActionTiming>> gather(Group group, const std::vector<ActionTiming>& mine) {
  std::string bytes;
  for (const auto& each : mine)
    if (computes(each.action)) bytes.append(reinterpret_cast<const char*>(&each), sizeof each);
  std::vector<std::vector<ActionTiming>> all;
  for (const auto& text : group.all_gather_values(std::string_view(bytes))) {
    auto& moments = all.emplace_back(text.size() / sizeof(ActionTiming));
    text.copy(reinterpret_cast<char*>(moments.data()), text.size());
  }
  return all;
}

double bubble_beyond_the_simulators(Group group, Contestant& contestant, const PipelineSchedule& bare) {
  contestant.step();
  const auto all = gather(group, contestant.pipeline.moments());
  double first = all[0][0].begin, last = 0, busy = 0;
  std::vector<std::vector<double>> durations;
  for (const auto& moments : all) {
    auto& times = durations.emplace_back();
    for (const auto& each : moments) {
      first = std::min(first, each.begin);
      last = std::max(last, each.end);
      busy += each.end - each.begin;
      times.push_back(each.end - each.begin);
    }
  }
  const double measured = 1 - busy / ((last - first) * static_cast<double>(all.size()));
  return 100 * (measured - replay_schedule(bare, durations).bubble);
}

double ratio_of_parts(const PipelineStage::Forward& forward, int passes) {
  std::vector<double> ratios;
  for (int i = 0; i < passes + 2; ++i) {
    double times[2] = {};
    for (const bool parts : {i % 2 == 0, i % 2 != 0}) {
      const auto x = torch::randn({1, kTokens, kWidth}).requires_grad_();
      const auto y = forward({x});
      lockstep::detail::PipelineBackward pass(y, {torch::ones_like(y[0])}, {x});
      const auto begin = std::chrono::steady_clock::now();
      if (parts) {
        pass.input_part();
        pass.weight_part();
      } else {
        pass.whole();
      }
      times[parts] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
    if (i > 1) ratios.push_back(times[1] / times[0]);
  }
  std::sort(ratios.begin(), ratios.end());
  return ratios[ratios.size() / 2];
}

double ratio_of_parts(const std::string& what, int passes) {
  torch::manual_seed(3);
  std::vector<Block> blocks;
  std::vector<lockstep::nn::Linear> linears;
  for (int i = 0; i < 4; ++i) {
    blocks.emplace_back();
    linears.emplace_back(kWidth, 4 * kWidth);
    linears.emplace_back(4 * kWidth, kWidth);
  }
  return ratio_of_parts(
      [&](const StageValues& values) {
        auto x = values[0];
        if (what == "blocks")
          for (auto& each : blocks) x = each(x);
        else
          for (auto& each : linears) x = each(x);
        return StageValues{x};
      },
      passes);
}

}  // namespace

MULTICALL_MAIN(pipeline_step) {
  at::set_num_threads(1);
  at::globalContext().setFlushDenormal(true);
  auto world = World::from_environment();
  auto group = world.group();
  std::map<std::string, Contestant> contestants;
  for (int i = 1; i < argc; ++i) contestants.try_emplace(argv[i], world, argv[i]);
  torch::manual_seed(2 + world.rank());
  serve(group, [&](const std::string& kind, int steps) {
    const auto colon = kind.find(':');
    if (kind.starts_with("split:")) return ratio_of_parts(kind.substr(colon + 1), steps);
    auto& contestant = contestants.at(kind.substr(colon == std::string::npos ? 0 : colon + 1));
    if (colon == std::string::npos) return milliseconds_of_a_step(steps, [&] { contestant.step(); });
    const auto bare =
        make_schedule(kind.substr(colon + 1), {.ranks = world.size(), .microbatches = kMicrobatches});
    std::vector<double> points;
    for (int i = 0; i < steps; ++i) points.push_back(bubble_beyond_the_simulators(group, contestant, bare));
    std::sort(points.begin(), points.end());
    return world.is_main() ? points[points.size() / 2] : 0.0;
  });
  return 0;
}

}  // namespace lockstep::bench::pipeline
