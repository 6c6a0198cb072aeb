// The Profiler in a program, with ranks as threads.
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <lockstep/profile/record/rank_profile.h>
#include <nlohmann/json.hpp>

#include "support/folder.h"

namespace lockstep {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

std::filesystem::path folder(const char* name) {
  static const testing::Folder all;
  const auto path = all / name;
  std::filesystem::remove_all(path);
  return path;
}

std::set<std::string> names_of(const profile::RankProfile& profile, profile::SpanKind kind) {
  std::set<std::string> names;
  for (const auto& event : profile.events)
    if (event.kind == kind) names.insert(profile.names[static_cast<std::size_t>(event.name)]);
  return names;
}

TEST(Profiler, records_its_window_and_puts_ranks_together) {
  const auto directory = folder("together");
  run_threads(2, [&](World& world) {
    Profiler profiler(world, {.first = 2, .last = 4, .directory = directory.string(), .samples_per_step = 8});
    auto weight = torch::ones({8, 8});
    auto group = world.group();
    for (int i = 0; i < 6; ++i) {
      const ProfileRange whole("my range");
      auto product = at::mm(weight, weight);
      group.all_reduce(product, {.tag = "mine"}).wait();
      {
        const ProfileRange range("optimizer");
        weight.mul_(0.5);
      }
      profiler.step();
    }
    profiler.finish();
    // Wait until rank 0 has combined the files.
    group.barrier().wait();
    const auto mine = profile::read(directory / ("rank-" + std::to_string(world.rank()) + ".json"));
    ASSERT_EQ(mine.steps.size(), 3u);
    EXPECT_EQ(mine.steps.front().step, 2);
    EXPECT_EQ(mine.steps.back().step, 4);
    EXPECT_EQ(mine.transfers.size(), 3u);
    EXPECT_THAT(names_of(mine, profile::SpanKind::operation), Contains("aten::mm"));
    EXPECT_THAT(names_of(mine, profile::SpanKind::range), Contains("my range"));
    EXPECT_THAT(names_of(mine, profile::SpanKind::optimizer), Contains("optimizer"));
    EXPECT_THAT(names_of(mine, profile::SpanKind::wait), Contains("all_reduce"));
    std::int64_t flops = 0;
    for (const auto& event : mine.events) flops += event.flops;
    EXPECT_EQ(flops, 3 * 2 * 8 * 8 * 8);
  });
  for (const char* file : {"trace.json.gz", "summary.json", "report.html"})
    EXPECT_TRUE(std::filesystem::exists(directory / file)) << file;
  std::ifstream stream(directory / "summary.json");
  const auto summary = nlohmann::json::parse(stream);
  EXPECT_EQ(summary["job"]["ranks"], 2);
  EXPECT_GT(summary["overall"]["samples_per_s"], 0);
}

TEST(Profiler, counts_what_operators_compute) {
  const auto directory = folder("flops");
  run_threads(1, [&](World& world) {
    Profiler profiler(world, {.first = 2, .last = 2, .directory = directory.string()});
    profiler.step();
    auto input = torch::ones({2, 3, 8, 8}).requires_grad_(),
         kernel = torch::ones({4, 3, 3, 3}).requires_grad_();
    auto output = at::conv2d(input, kernel);
    output.sum().backward();
    at::bmm(torch::ones({5, 2, 3}), torch::ones({5, 3, 4}));
    auto query = torch::ones({1, 2, 16, 8});
    at::scaled_dot_product_attention(query, query, query);
    profiler.step();
  });
  std::map<std::string, std::int64_t> flops;
  const auto profile = profile::read(directory / "rank-0.json");
  for (const auto& event : profile.events)
    flops[profile.names[static_cast<std::size_t>(event.name)]] += event.flops;
  const std::int64_t forward = 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3);
  EXPECT_EQ(flops["aten::convolution"], forward);
  EXPECT_EQ(flops["aten::convolution_backward"], 2 * forward);
  EXPECT_EQ(flops["aten::bmm"], 2 * 5 * 2 * 3 * 4);
  EXPECT_EQ(flops["aten::_scaled_dot_product_flash_attention_for_cpu"], 4 * 2 * 16 * 16 * 8);
}

TEST(Profiler, world_step_moves_it_where_its_own_is_not_called) {
  const auto directory = folder("world_step");
  run_threads(1, [&](World& world) {
    Profiler profiler(world, {.first = 11, .last = 12, .directory = directory.string()});
    for (int i = 8; i < 20; ++i) world.step(i);
  });
  const auto profile = profile::read(directory / "rank-0.json");
  ASSERT_EQ(profile.steps.size(), 2u);
  EXPECT_EQ(profile.steps[0].step, 11);
}

TEST(Profiler, a_run_that_ends_early_leaves_what_there_is) {
  const auto directory = folder("early");
  run_threads(1, [&](World& world) {
    Profiler profiler(world, {.first = 2, .last = 100, .directory = directory.string()});
    for (int i = 0; i < 5; ++i) profiler.step();
  });
  EXPECT_EQ(profile::read(directory / "rank-0.json").steps.size(), 4u);
}

TEST(Profiler, without_operators_there_are_none) {
  const auto directory = folder("without");
  run_threads(1, [&](World& world) {
    Profiler profiler(
        world, {.first = 2, .last = 2, .directory = directory.string(), .operators = OperatorSource::none});
    profiler.step();
    at::mm(torch::ones({2, 2}), torch::ones({2, 2}));
    profiler.step();
  });
  EXPECT_TRUE(names_of(profile::read(directory / "rank-0.json"), profile::SpanKind::operation).empty());
}

TEST(Profiler, a_window_may_begin_with_the_first_step) {
  const auto directory = folder("first");
  run_threads(1, [&](World& world) {
    Profiler profiler(world, {.first = 1, .last = 1, .directory = directory.string()});
    at::mm(torch::ones({2, 2}), torch::ones({2, 2}));
    profiler.step();
    profiler.step();
  });
  const auto profile = profile::read(directory / "rank-0.json");
  ASSERT_EQ(profile.steps.size(), 1u);
  EXPECT_EQ(profile.steps[0].step, 1);
  EXPECT_THAT(names_of(profile, profile::SpanKind::operation), Contains("aten::mm"));
}

TEST(Profiler, numbers_that_begin_anew_end_the_window_too) {
  const auto directory = folder("epochs");
  run_threads(1, [&](World& world) {
    Profiler profiler(world, {.first = 3, .last = 8, .directory = directory.string()});
    for (int epoch = 0; epoch < 50; ++epoch)
      for (int i = 0; i < 5; ++i) world.step(i);
  });
  EXPECT_LE(profile::read(directory / "rank-0.json").steps.size(), 6u);
}

TEST(Profiler, products_under_autocast_are_counted_once) {
  const auto directory = folder("autocast");
  run_threads(1, [&](World& world) {
    Profiler profiler(world, {.first = 1, .last = 1, .directory = directory.string()});
    Autocast autocast(at::kCPU, at::kBFloat16);
    at::mm(torch::ones({8, 8}), torch::ones({8, 8}));
    profiler.step();
  });
  const auto profile = profile::read(directory / "rank-0.json");
  std::int64_t flops = 0;
  for (const auto& event : profile.events) flops += event.flops;
  EXPECT_EQ(flops, 2 * 8 * 8 * 8);
}

TEST(Profiler, one_at_a_time_and_another_when_it_is_over) {
  const auto two = folder("two");
  run_threads(1, [&](World& world) {
    Profiler profiler(world, {.first = 1, .last = 1, .directory = folder("one").string()});
    EXPECT_THROW(Profiler(world, {.directory = two.string()}), ConfigError);
    profiler.step();
    Profiler second(world, {.first = 1, .last = 1, .directory = two.string()});
    at::mm(torch::ones({2, 2}), torch::ones({2, 2}));
    second.step();
    EXPECT_TRUE(std::filesystem::exists(two / "rank-0.json"));
  });
}

TEST(Profiler, files_of_an_earlier_run_are_not_this_ones) {
  const auto directory = folder("earlier");
  for (const int ranks : {2, 1})
    run_threads(ranks, [&](World& world) {
      Profiler profiler(world, {.first = 1, .last = 1, .directory = directory.string()});
      profiler.step();
      profiler.finish();
    });
  std::ifstream stream(directory / "summary.json");
  EXPECT_EQ(nlohmann::json::parse(stream)["job"]["ranks"], 1);
}

TEST(Profiler, may_outlive_its_world) {
  auto world = std::make_unique<World>(World::from_environment());
  Profiler profiler(*world, {.first = 1, .last = 1, .directory = folder("outlives").string()});
  profiler.step();
  world.reset();
  EXPECT_THROW(profiler.finish(), ConfigError);
}

TEST(Profiler, its_world_may_be_moved) {
  const auto directory = folder("moved");
  World world = World::from_environment();
  Profiler profiler(world, {.first = 1, .last = 2, .directory = directory.string()});
  profiler.step();
  World elsewhere = std::move(world);
  elsewhere.group().barrier().wait();
  elsewhere.step(1);
  profiler.step();
  profiler.finish();
  EXPECT_EQ(profile::read(directory / "rank-0.json").transfers.size(), 1u);
  EXPECT_TRUE(std::filesystem::exists(directory / "summary.json"));
}

// Bytes of one bucket, in which gradients begin at multiples of 64 bytes.
TEST(Profiler, buckets_are_what_gradients_leave_of_them) {
  for (const bool wide : {false, true}) {
    const auto directory = folder(wide ? "wide_buckets" : "buckets");
    run_threads(2, [&](World& world) {
      Profiler profiler(world, {.first = 1, .last = 2, .directory = directory.string()});
      torch::nn::Linear model(100, 10);
      const auto type = wide ? at::kBFloat16 : at::kFloat;
      model->to(type);
      DistributedDataParallel<torch::nn::Linear> ddp(model, world.group(), {.micro_batches = wide ? 2 : 1});
      SGD optimizer(model->parameters(), {.lr = 0.1});
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        for (int i = 0; i < (wide ? 2 : 1); ++i) ddp(torch::ones({4, 100}, type)).sum().backward();
        optimizer.step();
        profiler.step();
      }
      profiler.finish();
    });
    const auto profile = profile::read(directory / "rank-1.json");
    const std::int64_t whole = (1008 + 16) * 4, gradients = (1000 + 10) * 4;
    EXPECT_EQ(profile.notes.at("memory.gradients"), std::to_string(wide ? gradients / 2 : gradients));
    // Sums of bfloat16 gradients are float, in buckets without gradient views.
    EXPECT_EQ(profile.notes.at("memory.buckets"), std::to_string(wide ? whole : whole - gradients));
    std::ifstream stream(directory / "summary.json");
    const auto summary = nlohmann::json::parse(stream);
    EXPECT_EQ(summary["ranks"][1]["memory_peak"]["buckets"], wide ? whole : whole - gradients);
    EXPECT_THAT(names_of(profile, profile::SpanKind::bucket), Contains("ddp bucket 0"));
  }
}

TEST(Profiler, says_what_is_allowed) {
  run_threads(1, [&](World& world) {
    EXPECT_THROW(Profiler(world, {.first = 0}), ConfigError);  // steps count from 1
    EXPECT_THROW(Profiler(world, {.first = 5, .last = 4}), ConfigError);
    EXPECT_THROW(Profiler(world, {.directory = ""}), ConfigError);
    EXPECT_THROW(Profiler(world, {.operators = OperatorSource::kineto}), ConfigError);  // ranks are threads
    EXPECT_THROW(Profiler(world, {.samples_per_step = -1}), ConfigError);
    Profiler never(world, {.first = 100, .last = 200, .directory = folder("never").string()});
    never.step();
    EXPECT_THROW(never.finish(), ConfigError);  // the window is already over
  });
}

}  // namespace
}  // namespace lockstep
