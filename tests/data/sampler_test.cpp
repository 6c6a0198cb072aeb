// Behaviour beyond PyTorch's samplers; tests/parity compares the rest with PyTorch.
#include <numeric>
#include <random>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "support/errors.h"
#include "support/processor_time.h"

namespace lockstep::testing {
namespace {

using Numbers = std::vector<std::int64_t>;
using Options = DistributedSamplerOptions;

// A job: a sampler and its pass on each rank.
struct Ranks {
  Ranks(std::int64_t size, int ranks, const Options& options) {
    for (int r = 0; r < ranks; ++r) samplers.emplace_back(size, r, ranks, options);
  }
  void set_epoch(std::int64_t epoch) {
    for (auto& each : samplers) each.set_epoch(epoch);
  }
  void load(const DistributedSampler::State& state) {
    for (auto& each : samplers) each.load_state(state);
  }
  void begin() {
    passes.clear();
    for (auto& each : samplers) passes.push_back(each.pass());
  }
  // What each rank gets in a step; all empty at the end.
  std::vector<Numbers> step(std::size_t batch) {
    std::vector<Numbers> got;
    for (auto& pass : passes) {
      Numbers some(batch);
      some.resize(pass->next(some));
      if (some.empty())
        pass->delivered(std::nullopt);
      else
        pass->delivered(pass->position());
      got.push_back(std::move(some));
    }
    return got;
  }
  std::vector<DistributedSampler> samplers;
  std::vector<std::unique_ptr<Pass>> passes;
};

Numbers joined(const std::vector<Numbers>& lists) {
  Numbers all;
  for (const auto& each : lists) all.insert(all.end(), each.begin(), each.end());
  return all;
}

Numbers sorted(Numbers numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

Numbers range(std::int64_t size) {
  Numbers all(static_cast<std::size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

Numbers rest_of(Ranks& job, std::size_t batch) {
  Numbers all;
  for (;;) {
    const auto more = joined(job.step(batch));
    if (more.empty()) return all;
    all.insert(all.end(), more.begin(), more.end());
  }
}

const std::vector<std::int64_t> kSizes = {0, 1, 2, 5, 16, 33, 100, 257, 5001};

TEST(DistributedSampler, exact_gives_every_sample_once_and_shares_differ_by_one_at_most) {
  for (const bool elastic : {false, true})
    for (const bool shuffle : {false, true})
      for (const auto size : kSizes)
        for (const int ranks : {1, 2, 3, 8})
          for (const std::size_t batch : {1, 4, 1000}) {
            Ranks job(size, ranks, {.shuffle = shuffle, .exact = true, .elastic = elastic});
            job.begin();
            EXPECT_EQ(sorted(rest_of(job, batch)), range(size));
            std::int64_t sum = 0;
            for (auto& each : job.samplers) {
              sum += each.size();
              EXPECT_LE(each.size() - size / ranks, 1);
              EXPECT_GE(each.size(), size / ranks);
            }
            EXPECT_EQ(sum, size);
          }
}

TEST(DistributedSampler, the_elastic_order_is_cut_evenly_like_the_other_one) {
  for (const bool drop_last : {false, true})
    for (const auto size : kSizes)
      for (const int ranks : {1, 2, 3, 8})
        for (const std::size_t batch : {1, 4, 1000}) {
          Ranks job(size, ranks, {.drop_last = drop_last, .elastic = true});
          job.begin();
          std::vector<Numbers> shares(static_cast<std::size_t>(ranks));
          for (auto got = job.step(batch); !joined(got).empty(); got = job.step(batch))
            for (std::size_t r = 0; r < shares.size(); ++r) {
              EXPECT_EQ(got[r].size(), got[0].size());
              shares[r].insert(shares[r].end(), got[r].begin(), got[r].end());
            }
          const auto each = drop_last || size % ranks == 0 ? size / ranks : size / ranks + 1;
          for (std::size_t r = 0; r < shares.size(); ++r) {
            EXPECT_EQ(std::ssize(shares[r]), each);
            EXPECT_EQ(job.samplers[r].size(), each);
          }
          auto all = sorted(joined(shares));
          all.erase(std::unique(all.begin(), all.end()), all.end());
          EXPECT_EQ(std::ssize(all), drop_last ? each * ranks : size);
        }
}

TEST(DistributedSampler, epochs_and_seeds_have_orders_of_their_own_and_the_same_one_again) {
  for (const bool elastic : {false, true}) {
    std::vector<Numbers> orders;
    for (const std::int64_t seed : {0, 1})
      for (const std::int64_t epoch : {0, 1, 0}) {
        Ranks job(5001, 2, {.seed = seed, .elastic = elastic});
        job.set_epoch(epoch);
        job.begin();
        orders.push_back(rest_of(job, 8));
      }
    EXPECT_EQ(orders[0], orders[2]);
    EXPECT_NE(orders[0], orders[1]);
    EXPECT_NE(orders[0], orders[3]);
    EXPECT_EQ(orders[1] == orders[3], !elastic);  // PyTorch adds seed and epoch
  }
}

TEST(DistributedSampler, the_same_global_batches_come_on_any_number_of_ranks) {
  for (const bool elastic : {false, true}) {
    std::vector<std::vector<Numbers>> runs;
    for (const int ranks : {1, 2, 4, 8}) {
      Ranks job(1000, ranks, {.exact = true, .elastic = elastic});
      job.begin();
      auto& batches = runs.emplace_back();
      for (;;) {
        auto got = job.step(static_cast<std::size_t>(24 / ranks));
        if (joined(got).empty()) break;
        // An elastic rank gets one piece of the global batch; otherwise only the set is the same.
        batches.push_back(elastic ? joined(got) : sorted(joined(got)));
      }
    }
    for (const auto& run : runs) EXPECT_EQ(run, runs[0]);
  }
}

// Jobs that repeatedly stop at random points and resume with other numbers of ranks and batch sizes.
TEST(DistributedSampler, every_sample_comes_once_through_any_changes_of_ranks) {
  std::mt19937 random(1);
  int changes = 0;
  for (int run = 0; run < 400; ++run) {
    const std::int64_t size = random() % 3000 + 1;
    Options options{.shuffle = random() % 4 != 0,
                    .seed = static_cast<std::int64_t>(random() % 5),
                    .elastic = run % 2 == 0};
    const int tail = run % 3;
    options.exact = tail == 0;
    options.drop_last = tail == 1;
    DistributedSampler::State state;
    Numbers seen;
    int last_ranks = 1;
    std::size_t last_batch = 1;
    for (bool ended = false; !ended;) {
      last_ranks = static_cast<int>(random() % 9) + 1;
      last_batch = random() % 20 + 1;
      Ranks job(size, last_ranks, options);
      job.set_epoch(3);
      if (!state.empty()) {
        job.load(state);
        ++changes;
      }
      job.begin();
      const auto steps = random() % 12;
      for (std::size_t step = 0; step < steps && !ended; ++step) {
        const auto got = joined(job.step(last_batch));
        ended = got.empty();
        seen.insert(seen.end(), got.begin(), got.end());
      }
      if (steps == 0) continue;
      state = job.samplers[0].state();
      // Ranks differ only where an exact epoch ends earlier for some of them.
      for (auto& each : job.samplers) EXPECT_TRUE(options.exact || each.state() == state);
    }
    const auto count = std::ssize(seen);
    auto all = sorted(seen);
    all.erase(std::unique(all.begin(), all.end()), all.end());
    if (options.exact) {
      EXPECT_EQ(count, size);
      EXPECT_EQ(std::ssize(all), size);
    } else if (options.drop_last) {
      EXPECT_EQ(count, std::ssize(all));
      EXPECT_GT(count, size - 9);
    } else {
      EXPECT_EQ(std::ssize(all), size);
      EXPECT_LT(count, size + 9);
    }
  }
  EXPECT_GT(changes, 1000);
}

TEST(DistributedSampler, goes_on_with_the_same_sequence_after_a_change_of_ranks) {
  for (const bool elastic : {false, true}) {
    const Options options{.elastic = elastic};
    Ranks undisturbed(960, 4, options);
    undisturbed.begin();
    std::vector<Numbers> expected;
    for (int i = 0; i < 10; ++i) expected.push_back(sorted(joined(undisturbed.step(24))));
    DistributedSampler::State state;
    std::vector<Numbers> got;
    for (const int ranks : {4, 2, 8, 1, 4}) {  // global batches of 96, two from each number of ranks
      Ranks job(960, ranks, options);
      if (!state.empty()) job.load(state);
      job.begin();
      for (int i = 0; i < 2; ++i)
        got.push_back(sorted(joined(job.step(static_cast<std::size_t>(96 / ranks)))));
      state = job.samplers[0].state();
    }
    EXPECT_EQ(got, expected);
  }
}

TEST(DistributedSampler, an_elastic_epoch_of_a_million_million_samples_is_entered_at_once) {
  const std::int64_t size = 1'000'000'000'000;
  const auto begin = thread_processor_time();
  DistributedSampler sampler(size, 5, 64, {.elastic = true});
  auto state = sampler.state();
  state["position"] = size / 2;
  sampler.load_state(state);
  const auto pass = sampler.pass();
  Numbers some(32);
  EXPECT_EQ(pass->next(some), 32u);
  for (const auto each : some) EXPECT_TRUE(each >= 0 && each < size);
  EXPECT_EQ(pass->places()->first, size / 2 + 5 * 32);
  EXPECT_EQ(pass->position(), size / 2 + 64 * 32);
  EXPECT_LT(thread_processor_time() - begin, std::chrono::seconds(5));
}

TEST(DistributedSampler, a_loaded_epoch_goes_on_once_and_passes_after_it_are_whole) {
  DistributedSampler sampler(100, 0, 2, {});
  sampler.set_epoch(4);
  auto state = sampler.state();
  state["position"] = 60;
  const auto count = [&] {
    Numbers some(1000);
    return sampler.pass()->next(some);
  };
  sampler.load_state(state);
  EXPECT_EQ(sampler.epoch(), 4);
  EXPECT_EQ(sampler.position(), 60);
  sampler.set_epoch(4);  // like a loop that resumes in the saved epoch
  EXPECT_EQ(count(), 20u);
  EXPECT_EQ(count(), 50u);
  sampler.load_state(state);
  sampler.set_epoch(5);
  EXPECT_EQ(count(), 50u);
  state["position"] = 100;  // saved at the end: the epoch is over and is not repeated
  sampler.load_state(state);
  EXPECT_EQ(count(), 0u);
  EXPECT_EQ(count(), 50u);
}

TEST(DistributedSampler, a_state_that_does_not_fit_is_refused_and_changes_nothing) {
  DistributedSampler sampler(100, 0, 2, {.seed = 3});
  sampler.set_epoch(2);
  const auto good = sampler.state();
  const auto refused = [&](const std::string& key, std::int64_t value) {
    auto state = good;
    state["epoch"] = 7;
    state[key] = value;
    const auto text = error_of<ConfigError>([&] { sampler.load_state(state); });
    EXPECT_EQ(sampler.state(), good);
    return text;
  };
  EXPECT_THAT(refused("size", 99), HasSubstr("size: expected 100, got 99"));
  EXPECT_THAT(refused("seed", 4), HasSubstr("seed: expected 3, got 4"));
  EXPECT_THAT(refused("elastic", 1), HasSubstr("elastic: expected 0, got 1"));
  EXPECT_THAT(refused("shuffle", 0), HasSubstr("sequence of samples would differ"));
  EXPECT_THAT(refused("position", -1), HasSubstr("position: expected 0 to 100, got -1"));
  EXPECT_THAT(refused("position", 101), HasSubstr("position: expected 0 to 100, got 101"));
  for (const auto& [key, _] : good) {
    auto state = good;
    state.erase(key);
    EXPECT_THAT(error_of<ConfigError>([&] { sampler.load_state(state); }),
                HasSubstr("missing key '" + key + "'"));
  }
}

TEST(DistributedSampler, impossible_options_are_refused) {
  EXPECT_THAT(error_of<ConfigError>([] { DistributedSampler(10, 2, 2); }),
              HasSubstr("rank 2 is out of range for 2"));
  EXPECT_THAT(error_of<ConfigError>([] { DistributedSampler(10, -1, 2); }),
              HasSubstr("rank -1 is out of range for 2"));
  EXPECT_THAT(error_of<ConfigError>([] { DistributedSampler(10, 0, 0); }),
              HasSubstr("rank 0 is out of range for 0"));
  EXPECT_THAT(error_of<ConfigError>([] { DistributedSampler(-1, 0, 1); }), HasSubstr("got -1"));
  EXPECT_THAT(error_of<ConfigError>([] { DistributedSampler(10, 0, 1, {.drop_last = true, .exact = true}); }),
              HasSubstr("set only one of them"));
}

TEST(DistributedSampler, takes_rank_and_size_from_a_group) {
  std::mutex mutex;
  Numbers all;
  run_threads(3, [&](World& world) {
    DistributedSampler sampler(10, world.group(), {.exact = true});
    Numbers some(10);
    some.resize(sampler.pass()->next(some));
    const std::lock_guard lock(mutex);
    all.insert(all.end(), some.begin(), some.end());
  });
  EXPECT_EQ(sorted(all), range(10));
}

TEST(Samplers, impossible_options_are_refused) {
  EXPECT_THAT(error_of<ConfigError>([] { RandomSampler(-1); }), HasSubstr("of -1"));
  EXPECT_THAT(error_of<ConfigError>([] { RandomSampler(0, {.num_samples = 3}); }),
              HasSubstr("cannot draw 3 samples from a dataset of 0"));
  EXPECT_THAT(error_of<ConfigError>([] { WeightedRandomSampler({1, -1}, 2); }),
              HasSubstr("expected 0 or more, got -1"));
  EXPECT_THAT(error_of<ConfigError>([] { WeightedRandomSampler({1, NAN}, 2); }),
              HasSubstr("expected 0 or more, got"));
  EXPECT_THAT(error_of<ConfigError>([] { WeightedRandomSampler({0, 0}, 2); }), HasSubstr("sum, got 0"));
  EXPECT_THAT(error_of<ConfigError>([] { WeightedRandomSampler({}, 2); }), HasSubstr("sum, got 0"));
  EXPECT_THAT(error_of<ConfigError>([] { WeightedRandomSampler({1}, 0); }),
              HasSubstr("num_samples: expected at least 1, got 0"));
  EXPECT_THAT(error_of<ConfigError>([] { WeightedRandomSampler({1, 0, 1}, 3, {.replacement = false}); }),
              HasSubstr("only 2 weights are above 0"));
}

TEST(Samplers, an_empty_one_gives_nothing) {
  Numbers some(4);
  EXPECT_EQ(SequentialSampler(0).pass()->next(some), 0u);
  EXPECT_EQ(RandomSampler(0).pass()->next(some), 0u);
  EXPECT_EQ(SubsetRandomSampler(Numbers{}).pass()->next(some), 0u);
  EXPECT_EQ(pass_over({})->next(some), 0u);
}

}  // namespace
}  // namespace lockstep::testing
