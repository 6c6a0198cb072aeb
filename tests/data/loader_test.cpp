#include <lockstep/data/loader.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>
#include <ranges>
#include <thread>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "support/errors.h"
#include "support/eventually.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

using Numbers = std::vector<std::int64_t>;
using std::chrono::milliseconds;

Numbers values(const at::Tensor& tensor) {
  const auto dense = tensor.to(at::kLong).contiguous();
  return {dense.const_data_ptr<std::int64_t>(), dense.const_data_ptr<std::int64_t>() + dense.numel()};
}

// Returns the samples of each batch.
template <typename Loader>
std::vector<Numbers> batches(const Loader& loader) {
  std::vector<Numbers> all;
  for (auto& batch : loader) {
    if constexpr (std::same_as<std::remove_cvref_t<decltype(batch)>, at::Tensor>)
      all.push_back(values(batch));
    else
      all.push_back(values(std::get<0>(batch)));
  }
  return all;
}

void nap(std::int64_t i) { std::this_thread::sleep_for(std::chrono::microseconds(i * 7919 % 400)); }

// Number of worker threads. Waits a moment, because a thread that has ended stays listed briefly.
int worker_threads(std::chrono::seconds moment = std::chrono::seconds(60)) {
  int count = 0;
  eventually(
      [&] {
        count = 0;
        for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
          std::string name;
          std::getline(std::ifstream(entry.path() / "comm"), name);
          count += name == "ls_data";
        }
        return count == 0;
      },
      moment);
  return count;
}

TEST(DataLoader, gives_batches_to_a_loop_that_may_change_them) {
  const auto x = at::randn({10, 3}), y = at::arange(10);
  TensorDataset dataset(x, y);
  DataLoader loader(dataset, {.batch_size = 4});
  EXPECT_EQ(loader.size(), 3u);
  std::int64_t seen = 0;
  for (auto& [bx, by] : loader) {
    EXPECT_SAME(bx, x.narrow(0, seen, bx.size(0)));
    EXPECT_SAME(by, y.narrow(0, seen, by.size(0)));
    seen += bx.size(0);
    bx.zero_();
    bx = at::Tensor();
  }
  EXPECT_EQ(seen, 10);
  EXPECT_GT(x.abs().sum().item<float>(), 0);
}

TEST(DataLoader, sizes_and_ends_are_pythons) {
  for (const int workers : {0, 2})
    for (const bool shuffle : {false, true})
      for (const auto& [size, batch, drop_last, expected] :
           std::vector<std::tuple<int, int, bool, Numbers>>{{10, 4, false, {4, 4, 2}},
                                                            {10, 4, true, {4, 4}},
                                                            {8, 4, false, {4, 4}},
                                                            {8, 4, true, {4, 4}},
                                                            {3, 4, false, {3}},
                                                            {3, 4, true, {}},
                                                            {0, 4, false, {}},
                                                            {0, 4, true, {}},
                                                            {1, 1, true, {1}},
                                                            {5, 1 << 30, false, {5}}}) {
        DataLoader loader(
            TensorDataset{at::arange(size)},
            {.batch_size = batch, .shuffle = shuffle, .drop_last = drop_last, .num_workers = workers});
        Numbers sizes;
        for (const auto& each : batches(loader)) sizes.push_back(std::ssize(each));
        EXPECT_EQ(sizes, expected);
        EXPECT_EQ(loader.size(), expected.size());
      }
}

TEST(DataLoader, is_an_input_range) {
  TensorDataset dataset(at::arange(10));
  DataLoader loader(dataset, {.batch_size = 2});
  static_assert(std::ranges::input_range<decltype(loader)>);
  static_assert(std::ranges::input_range<const decltype(loader)>);
  static_assert(std::same_as<std::ranges::range_reference_t<decltype(loader)>, std::array<at::Tensor, 1>&>);
  Numbers firsts;
  for (auto& [x] : loader | std::views::drop(1) | std::views::take(3))
    firsts.push_back(x[0].item<std::int64_t>());
  EXPECT_EQ(firsts, (Numbers{2, 4, 6}));
  EXPECT_EQ(std::ranges::count_if(loader, [](auto& batch) { return batch[0][0].template item<int>() > 3; }),
            3);
}

TEST(DataLoader, keeps_handles_and_temporaries_and_refers_to_variables) {
  const auto make = [] {
    TensorDataset local(at::arange(4));
    return DataLoader(Subset(local, {3, 1}), {.batch_size = 2});
  };
  EXPECT_EQ(batches(make()), (std::vector<Numbers>{{3, 1}}));
  struct Own {
    std::int64_t size() const { return 2; }
    std::int64_t get(std::int64_t i) { return i + add; }
    std::int64_t add = 0;
  } own;
  DataLoader by_reference(own, {.batch_size = 2});
  DataLoader moved_in(Own{.add = 5}, {.batch_size = 2});
  DataLoader shared(std::make_shared<Own>(Own{.add = 7}), {.batch_size = 2});
  own.add = 10;
  EXPECT_EQ(batches(by_reference), (std::vector<Numbers>{{10, 11}}));
  EXPECT_EQ(batches(moved_in), (std::vector<Numbers>{{5, 6}}));
  EXPECT_EQ(batches(shared), (std::vector<Numbers>{{7, 8}}));
}

struct Picture {
  at::Tensor image, mask;
};
struct Labelled {
  at::Tensor image;
  int label;
  double weight;
};

// The type that the callable returns is the type of a sample.
TEST(DataLoader, puts_samples_of_many_types_together) {
  const auto batch_of = [](auto f) {
    DataLoader loader(MapDataset(2, f), {.batch_size = 2});
    return *loader.begin();
  };
  const auto at_ = [](std::int64_t i) { return at::full({2}, i, at::kFloat); };
  const auto both = at::stack({at_(0), at_(1)});
  EXPECT_SAME(batch_of(at_), both);
  EXPECT_SAME(batch_of([](std::int64_t i) { return static_cast<int>(i); }), at::tensor({0, 1}, at::kLong));
  EXPECT_SAME(batch_of([](std::int64_t i) { return static_cast<std::uint8_t>(i); }),
              at::tensor({0, 1}, at::kLong));
  EXPECT_SAME(batch_of([](std::int64_t i) { return i == 1; }), at::tensor({0, 1}, at::kLong).to(at::kBool));
  EXPECT_SAME(batch_of([](std::int64_t i) { return static_cast<float>(i); }), at::tensor({0, 1}, at::kFloat));
  EXPECT_SAME(batch_of([](std::int64_t i) { return static_cast<double>(i); }),
              at::tensor({0, 1}, at::kDouble));
  EXPECT_EQ(batch_of([](std::int64_t i) { return std::to_string(i); }), (std::vector<std::string>{"0", "1"}));
  {
    auto [x, y] = batch_of([&](std::int64_t i) { return std::pair(at_(i), i); });
    EXPECT_SAME(x, both);
    EXPECT_SAME(y, at::arange(2));
  }
  {
    std::tuple<at::Tensor, std::vector<std::string>, at::Tensor> batch =
        batch_of([&](std::int64_t i) { return std::tuple(at_(i), std::to_string(i), true); });
    EXPECT_SAME(std::get<0>(batch), both);
  }
  {
    std::array<at::Tensor, 3> batch = batch_of([&](std::int64_t i) { return std::array{i, i + 1, i + 2}; });
    EXPECT_SAME(batch[2], at::tensor({2, 3}, at::kLong));
  }
  {
    Picture batch = batch_of([&](std::int64_t i) { return Picture{at_(i), -at_(i)}; });
    EXPECT_SAME(batch.image, both);
    EXPECT_SAME(batch.mask, -both);
  }
  {
    auto [image, label, weight] =
        batch_of([&](std::int64_t i) { return Labelled{at_(i), static_cast<int>(i), 0.5}; });
    EXPECT_SAME(image, both);
    EXPECT_SAME(label, at::arange(2));
    EXPECT_SAME(weight, at::full({2}, 0.5, at::kDouble));
  }
  {
    std::vector<at::Tensor> batch = batch_of([&](std::int64_t i) { return std::vector{at_(i), at_(i + 1)}; });
    EXPECT_EQ(batch.size(), 2u);
    EXPECT_SAME(batch[1], both + 1);
  }
  {
    std::map<std::string, at::Tensor> batch =
        batch_of([&](std::int64_t i) { return std::map<std::string, std::int64_t>{{"a", i}, {"b", -i}}; });
    EXPECT_SAME(batch.at("b"), -at::arange(2));
  }
  {
    auto [pair, flag] = batch_of([&](std::int64_t i) { return std::pair(std::pair(at_(i), i), false); });
    EXPECT_SAME(pair.first, both);
    EXPECT_SAME(pair.second, at::arange(2));
  }
  EXPECT_THAT(
      error_of<LoadError>([&] {
        batch_of([](std::int64_t i) { return std::vector<std::int64_t>(static_cast<std::size_t>(i)); });
      }),
      HasSubstr("different lengths (0 and 1)"));
  EXPECT_THAT(error_of<LoadError>([&] { batch_of([](std::int64_t i) { return at::ones({i + 1}); }); }),
              AllOf(HasSubstr("DataLoader: batch of samples 0, 1"),
                    HasSubstr("stack expects each tensor to be equal size")));
}

TEST(DataLoader, a_collate_of_ones_own_makes_the_batch) {
  TensorDataset dataset(at::arange(5), at::arange(5) * 2);
  const auto sum = [](std::vector<std::array<at::Tensor, 2>> samples) {
    std::int64_t total = 0;
    for (const auto& [x, y] : samples) total += x.item<std::int64_t>() + y.item<std::int64_t>();
    return std::make_unique<std::int64_t>(total);  // any type, even one that cannot be copied
  };
  Numbers sums;
  for (auto& each : DataLoader(dataset, {.batch_size = 2, .num_workers = 1}, sum)) sums.push_back(*each);
  EXPECT_EQ(sums, (Numbers{3, 15, 12}));
  RandomSampler sampler(5);
  std::int64_t total = 0;
  for (auto& each : DataLoader(dataset, sampler, {.batch_size = 2}, sum)) total += *each;
  EXPECT_EQ(total, 30);
}

TEST(DataLoader, workers_change_nothing_but_the_time) {
  MapDataset dataset(101, [](std::int64_t i) {
    nap(i);
    return std::pair(at::full({2}, i), i);
  });
  torch::manual_seed(5);
  const auto expected = batches(DataLoader(dataset, {.batch_size = 4, .shuffle = true}));
  const auto after = at::rand({1});
  for (const int workers : {1, 2, 4})
    for (const int prefetch : {1, 3}) {
      torch::manual_seed(5);
      EXPECT_EQ(batches(DataLoader(
                    dataset,
                    {.batch_size = 4, .shuffle = true, .num_workers = workers, .prefetch_factor = prefetch})),
                expected);
      EXPECT_SAME(at::rand({1}), after);
    }
  EXPECT_EQ(worker_threads(), 0);
}

TEST(DataLoader, no_more_is_fetched_ahead_than_was_asked_for) {
  std::atomic<int> fetched = 0;
  MapDataset dataset(100, [&](std::int64_t i) {
    ++fetched;
    return i;
  });
  int received = 0;
  const auto ahead = [&] { return fetched / 2 - received; };
  for (auto& batch : DataLoader(dataset, {.batch_size = 2, .num_workers = 2, .prefetch_factor = 3})) {
    (void)batch;
    ++received;
    if (received == 1) {
      EXPECT_TRUE(eventually([&] { return ahead() >= 4; }));
    }
    std::this_thread::sleep_for(milliseconds(2));
    EXPECT_LE(ahead(), 6);
  }
}

struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(DataLoader, an_exception_comes_to_the_loop_with_its_index_and_the_loop_may_go_on) {
  MapDataset dataset(20, [](std::int64_t i) {
    if (i == 9 || i == 10) throw Broken("picture " + std::to_string(i) + " is broken");
    return i;
  });
  for (const int workers : {0, 1, 3}) {
    DataLoader loader(dataset, {.batch_size = 4, .num_workers = workers});
    for (int round = 0; round < 2; ++round) {
      Numbers seen;
      auto it = loader.begin();
      try {
        for (; it != loader.end(); ++it)
          for (const auto each : values(*it)) seen.push_back(each);
        FAIL() << "no error";
      } catch (const LoadError& error) {
        EXPECT_EQ(error.index(), 9);
        EXPECT_THAT(error.what(), ContainsRegex("sample 9 \\(worker [0-2]\\): picture 9 is broken"));
        EXPECT_THROW(std::rethrow_if_nested(error), Broken);
      }
      for (; it != loader.end(); ++it)
        for (const auto each : values(*it)) seen.push_back(each);
      EXPECT_EQ(seen, (Numbers{0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15, 16, 17, 18, 19}));
    }
  }
  DataLoader whole(Subset(TensorDataset{at::arange(5)}, {1, 2}), SequentialSampler(5), {.batch_size = 5});
  EXPECT_THAT(error_of<LoadError>([&] { batches(whole); }),
              HasSubstr("samples 0, 1, 2, 3, 4 (worker 0): index 2 is out of range for a dataset"));
  MapDataset rude(1, [](std::int64_t) -> std::int64_t { throw 5; });
  EXPECT_THAT(error_of<LoadError>([&] { batches(DataLoader(rude, {.num_workers = 1})); }),
              HasSubstr("not a std::exception"));
}

TEST(DataLoader, a_loop_that_is_left_early_leaves_no_thread_and_can_be_begun_again) {
  std::atomic<int> inside = 0;
  MapDataset dataset(1000, [&](std::int64_t i) {
    ++inside;
    nap(i);
    --inside;
    return i;
  });
  DataLoader loader(dataset, {.batch_size = 8, .num_workers = 3});
  for (int round = 0; round < 20; ++round) {
    std::int64_t first = -1;
    for (auto& batch : loader) {
      first = batch[0].item<std::int64_t>();
      EXPECT_LE(worker_threads(std::chrono::seconds(0)), 3);
      break;
    }
    EXPECT_EQ(first, 0);
    EXPECT_EQ(inside, 0);
    EXPECT_EQ(worker_threads(), 0);
  }
  try {
    for (auto& batch : loader) throw Broken(std::to_string(batch.size(0)));
  } catch (const Broken&) {
  }
  EXPECT_EQ(worker_threads(), 0);
  loader.begin();  // no batch is requested
  EXPECT_EQ(worker_threads(), 0);
}

TEST(DataLoader, several_passes_may_be_under_way) {
  MapDataset dataset(12, [](std::int64_t i) {
    nap(i);
    return i;
  });
  for (const int workers : {0, 2}) {
    DataLoader loader(dataset, {.batch_size = 2, .num_workers = workers});
    Numbers firsts;
    for (auto& outer : loader) {
      std::int64_t sum = 0;
      for (auto& inner : loader) sum += inner.sum().item<std::int64_t>();
      EXPECT_EQ(sum, 66);
      firsts.push_back(outer[0].item<std::int64_t>());
    }
    EXPECT_EQ(firsts, (Numbers{0, 2, 4, 6, 8, 10}));
  }
  std::vector<std::thread> threads;  // each iterates over its own pass
  DataLoader loader(dataset, {.batch_size = 2, .num_workers = 1});
  std::atomic<int> right = 0;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { right += batches(loader).size() == 6; });
  for (auto& each : threads) each.join();
  EXPECT_EQ(right, 4);
}

TEST(DataLoader, the_passs_iterator_may_outlive_the_loader) {
  auto it = [] {
    DataLoader loader(MapDataset(6, [](std::int64_t i) { return i; }), {.batch_size = 3, .num_workers = 2});
    return loader.begin();
  }();
  EXPECT_EQ(values(*it), (Numbers{0, 1, 2}));
  ++it;
  EXPECT_EQ(values(*it), (Numbers{3, 4, 5}));
  ++it;
  EXPECT_TRUE(it == std::default_sentinel);
}

TEST(DataLoader, random_numbers_of_a_sample_depend_on_the_pass_and_its_place_alone) {
  MapDataset dataset(20, [](std::int64_t i, at::Generator& random) {
    return at::randint(1 << 30, {1}, random, at::kLong).add_(i * 0);
  });
  const auto drawn = [&](int workers, std::uint64_t seed) {
    torch::manual_seed(seed);
    DataLoader loader(dataset, {.batch_size = 3, .num_workers = workers});
    return std::array{batches(loader), batches(loader)};
  };
  const auto expected = drawn(0, 1);
  EXPECT_NE(expected[0], expected[1]);
  Numbers all;
  for (const auto& batch : expected[0]) all.insert(all.end(), batch.begin(), batch.end());
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::adjacent_find(all.begin(), all.end()), all.end());
  for (const int workers : {1, 3}) EXPECT_EQ(drawn(workers, 1), expected);
  EXPECT_NE(drawn(0, 2), expected);
  // Through a Subset and a ConcatDataset.
  torch::manual_seed(1);
  ConcatDataset joined(Subset(dataset, {4, 5, 6}), dataset);
  EXPECT_EQ(batches(DataLoader(joined, {.batch_size = 3}))[0], expected[0][0]);
}

// The augmented samples do not depend on the number of ranks.
TEST(DataLoader, ranks_draw_the_random_numbers_of_one_rank) {
  MapDataset dataset(30, [](std::int64_t i, at::Generator& random) {
    return i * 1000000 + at::randint(1000000, {1}, random, at::kLong).item<std::int64_t>();
  });
  for (const bool elastic : {false, true}) {
    std::vector<Numbers> runs;
    for (const int ranks : {1, 2, 3, 5}) {
      auto& all = runs.emplace_back();
      for (int rank = 0; rank < ranks; ++rank) {
        torch::manual_seed(3);
        DistributedSampler sampler(30, rank, ranks, {.elastic = elastic});
        for (auto& batch : DataLoader(dataset, sampler, {.batch_size = 2}))
          for (const auto each : values(batch)) all.push_back(each);
      }
      std::sort(all.begin(), all.end());
    }
    for (const auto& run : runs) EXPECT_EQ(run, runs[0]);
  }
}

TEST(DataLoader, a_sampler_that_is_a_variable_is_referred_to) {
  TensorDataset dataset(at::arange(16));
  DistributedSampler sampler(16, 0, 2, {.seed = 1});
  DataLoader loader(dataset, sampler, {.batch_size = 4});
  EXPECT_EQ(loader.size(), 2u);
  const auto first = batches(loader);
  EXPECT_EQ(batches(loader), first);
  sampler.set_epoch(1);
  EXPECT_NE(batches(loader), first);
  EXPECT_EQ(batches(DataLoader(dataset, SubsetRandomSampler(Numbers{5}), {.batch_size = 4})),
            (std::vector<Numbers>{{5}}));
}

class EverySecond : public Sampler {
 public:
  std::int64_t size() const override { return 3; }
  std::unique_ptr<Pass> pass() override { return pass_over({0, 2, 4}); }
};

TEST(DataLoader, takes_a_sampler_of_ones_own) {
  EXPECT_EQ(batches(DataLoader(TensorDataset{at::arange(6)}, EverySecond(), {.batch_size = 2})),
            (std::vector<Numbers>{{0, 2}, {4}}));
}

// The state counts what the loop has received, not what was prefetched; a resumed run repeats no draws.
TEST(DataLoader, a_run_that_is_saved_anywhere_goes_on_as_if_it_had_not_stopped) {
  MapDataset dataset(61, [](std::int64_t i, at::Generator& random) {
    return i * 1000000 + at::randint(1000000, {1}, random, at::kLong).item<std::int64_t>();
  });
  struct Saved {
    DistributedSampler::State sampler;
    at::Tensor random;
  };
  // Runs three epochs, drawing from the default generator in between; stops after `stop` batches.
  const auto run = [&](bool elastic, int workers, bool drop_last, Numbers& log, int stop,
                       std::optional<Saved> from) {
    DistributedSampler sampler(61, 1, 2, {.elastic = elastic});
    DataLoader loader(dataset, sampler, {.batch_size = 4, .drop_last = drop_last, .num_workers = workers});
    auto generator = at::globalContext().defaultGenerator(at::kCPU);
    torch::manual_seed(9);
    if (from) {
      sampler.load_state(from->sampler);
      generator.set_state(from->random);
    }
    for (auto epoch = sampler.epoch(); epoch < 3; ++epoch) {
      sampler.set_epoch(epoch);
      for (auto& batch : loader) {
        for (const auto each : values(batch)) log.push_back(each);
        log.push_back(at::randint(1000, {1}, at::kLong).item<std::int64_t>());
        if (--stop == 0) return Saved{sampler.state(), generator.get_state()};
      }
    }
    return Saved{sampler.state(), generator.get_state()};
  };
  for (const bool elastic : {false, true})
    for (const bool drop_last : {false, true}) {
      Numbers undisturbed;
      run(elastic, 0, drop_last, undisturbed, -1, {});
      for (const int workers : {0, 2})
        for (int stop = 1; stop <= 24; ++stop) {
          Numbers log;
          const auto saved = run(elastic, workers, drop_last, log, stop, {});
          run(elastic, workers, drop_last, log, -1, saved);
          EXPECT_EQ(log, undisturbed) << elastic << " " << drop_last << " " << workers << " " << stop;
        }
    }
}

TEST(DataLoader, a_wait_for_workers_ends_at_its_deadline) {
  std::atomic<bool> is_at_1 = false, go_on = false;
  MapDataset dataset(3, [&](std::int64_t i) {
    is_at_1 = i == 1;
    while (!go_on && i == 1) std::this_thread::sleep_for(milliseconds(1));
    return i;
  });
  DataLoader loader(dataset, {.num_workers = 1, .timeout = milliseconds(50)});
  auto it = loader.begin();
  // No batch is lost, however many deadlines pass.
  const auto patiently = [&] {
    for (int tries = 0; tries < 1000; ++tries) try {
        return values(*it);
      } catch (const LoadError&) {
      }
    return Numbers{};
  };
  EXPECT_EQ(patiently(), (Numbers{0}));
  ++it;
  EXPECT_TRUE(eventually([&] { return is_at_1.load(); }));
  EXPECT_THAT(error_of<LoadError>([&] { *it; }), HasSubstr("no batch after 50 ms: worker 0 is at index 1"));
  go_on = true;
  EXPECT_EQ(patiently(), (Numbers{1}));
  ++it;
  EXPECT_EQ(patiently(), (Numbers{2}));
}

TEST(DataLoader, each_worker_has_one_thread_of_libtorchs_and_prepares_itself) {
  const int before = at::get_num_threads();
  at::set_num_threads(4);
  std::mutex mutex;
  std::vector<int> begun;
  MapDataset dataset(20, [](std::int64_t) { return at::get_num_threads(); });
  const auto init = [&](int worker) {
    const std::lock_guard lock(mutex);
    begun.push_back(worker);
  };
  for (auto& batch : DataLoader(dataset, {.batch_size = 5, .num_workers = 2, .worker_init = init}))
    EXPECT_EQ(values(batch), Numbers(5, 1));
  EXPECT_EQ(at::get_num_threads(), 4);
  int elsewhere = 0;
  std::thread([&] { elsewhere = at::get_num_threads(); }).join();
  EXPECT_EQ(elsewhere, 4);
  at::set_num_threads(before);
  std::sort(begun.begin(), begun.end());
  EXPECT_EQ(begun, (std::vector<int>{0, 1}));
  const auto broken = [](int worker) { throw Broken("worker " + std::to_string(worker)); };
  EXPECT_THAT(
      error_of<Broken>([&] { batches(DataLoader(dataset, {.num_workers = 1, .worker_init = broken})); }),
      HasSubstr("worker 0"));
}

TEST(DataLoader, impossible_options_are_refused) {
  TensorDataset dataset(at::arange(4));
  SequentialSampler sampler(4);
  const auto refused = [&](DataLoaderOptions options) {
    return error_of<ConfigError>([&] { DataLoader(dataset, std::move(options)); });
  };
  EXPECT_THAT(refused({.batch_size = 0}), HasSubstr("batch_size: expected at least 1, got 0"));
  EXPECT_THAT(refused({.num_workers = -1}), HasSubstr("num_workers: expected 0 or more, got -1"));
  EXPECT_THAT(refused({.prefetch_factor = 0}), HasSubstr("prefetch_factor: expected at least 1, got 0"));
  EXPECT_THAT(refused({.timeout = milliseconds(0)}), HasSubstr("timeout in ms: expected at least 1, got 0"));
  EXPECT_THAT(refused({.generator = at::globalContext().defaultGenerator(at::kCPU), .seed = 3}),
              HasSubstr("mutually exclusive"));
  EXPECT_THAT(error_of<ConfigError>([&] { DataLoader(dataset, sampler, {.shuffle = true}); }),
              HasSubstr("mutually exclusive"));
}

TEST(DataLoader, a_seed_is_an_order_of_its_own_that_leaves_the_default_generator_alone) {
  TensorDataset dataset(at::arange(50));
  const auto state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  DataLoader loader(dataset, {.batch_size = 50, .shuffle = true, .seed = 3});
  const auto first = batches(loader), second = batches(loader);
  EXPECT_NE(first, second);
  DataLoader again(dataset, {.batch_size = 50, .shuffle = true, .num_workers = 1, .seed = 3});
  EXPECT_EQ(batches(again), first);
  EXPECT_SAME(at::globalContext().defaultGenerator(at::kCPU).get_state(), state);
}

TEST(DataLoader, pinned_memory_is_used_where_cuda_is) {
  TensorDataset dataset(at::arange(8), at::arange(8));
  for (const int workers : {0, 2})
    for (auto& [x, y] : DataLoader(dataset, {.batch_size = 4, .num_workers = workers, .pin_memory = true})) {
      EXPECT_EQ(x.is_pinned(), torch::cuda::is_available());
      EXPECT_EQ(y.is_pinned(), torch::cuda::is_available());
    }
}

// ---- torch::data
// --------------------------------------------------------------------------------------------

namespace td = torch::data;

// Reports use by several threads at once.
class Unshared : public td::datasets::Dataset<Unshared> {
 public:
  td::Example<> get(std::size_t index) override {
    EXPECT_FALSE(busy_.exchange(true));
    nap(static_cast<std::int64_t>(index));
    busy_ = false;
    return {at::full({2}, static_cast<std::int64_t>(index)),
            at::scalar_tensor(static_cast<std::int64_t>(index))};
  }
  std::optional<std::size_t> size() const override { return 30; }
  Unshared() = default;
  Unshared(const Unshared&) {}

 private:
  std::atomic<bool> busy_ = false;
};

TEST(TorchData, datasets_are_taken_as_they_are) {
  const auto x = at::randn({10, 2});
  for (const int workers : {0, 2}) {
    const DataLoaderOptions options{.batch_size = 4, .num_workers = workers};
    std::int64_t seen = 0;
    for (auto& [data, target] : DataLoader(Unshared().map(td::transforms::Stack<>()), options)) {
      EXPECT_EQ(data.sizes(), at::IntArrayRef({target.size(0), 2}));
      for (const auto each : values(target)) EXPECT_EQ(each, seen++);
    }
    EXPECT_EQ(seen, 30);
    Unshared plain;  // no transform collates it, so the loader does
    const Unshared& constant = plain;
    for (auto& [data, target] : DataLoader(plain, options)) seen -= target.size(0);
    EXPECT_EQ(seen, 0);
    EXPECT_EQ(DataLoader(constant, options).size(), 8u);
    for (auto& batch :
         DataLoader(constant, options, [](std::vector<td::Example<>> samples) { return samples.size(); }))
      seen += static_cast<std::int64_t>(batch);
    EXPECT_EQ(seen, 30);
    std::vector<at::Tensor> parts;
    for (auto& batch : DataLoader(td::datasets::TensorDataset(x), options)) parts.push_back(batch.data);
    EXPECT_SAME(at::cat(parts), x);
    parts.clear();
    for (auto& batch :
         DataLoader(td::datasets::TensorDataset(x).map(td::transforms::Stack<td::TensorExample>()), options))
      parts.push_back(batch.data);
    EXPECT_SAME(at::cat(parts), x);
  }
  auto normalized = Unshared().map(td::transforms::Normalize<>(1.0, 2.0));
  auto [data, target] = *DataLoader(normalized, {.batch_size = 3}).begin();
  EXPECT_EQ(target.size(0), 3);
  Subset few(Unshared(), {3, 5});
  EXPECT_EQ(values((*DataLoader(few, {.batch_size = 2}).begin()).target), (Numbers{3, 5}));
}

// Ends by itself after 25 samples, in its own order.
class Stateful : public td::datasets::StatefulDataset<Stateful, std::vector<td::Example<>>, std::size_t> {
 public:
  std::optional<std::vector<td::Example<>>> get_batch(std::size_t count) override {
    const std::lock_guard lock(mutex_);
    std::vector<td::Example<>> batch;
    for (; next_ < 25 && batch.size() < count; ++next_)
      batch.emplace_back(at::scalar_tensor(next_), at::scalar_tensor(next_));
    if (batch.empty()) return std::nullopt;
    return batch;
  }
  std::optional<std::size_t> size() const override { return 25; }
  void reset() override { next_ = 0; }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}

 private:
  std::mutex mutex_;
  std::int64_t next_ = 0;
};

// Three workers ask at once: the first to ask sees the end, and the last batch comes from a later task.
class EndsFirst : public td::datasets::StatefulDataset<EndsFirst, std::vector<td::Example<>>, std::size_t> {
 public:
  std::optional<std::vector<td::Example<>>> get_batch(std::size_t) override {
    const auto turn = turns_++;
    if (turn == 0) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (turn != 2) return std::nullopt;
    return std::vector<td::Example<>>{{at::ones({1}), at::ones({1})}};
  }
  std::optional<std::size_t> size() const override { return 1; }
  void reset() override { turns_ = 0; }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}

 private:
  std::atomic<int> turns_ = 0;
};

TEST(TorchData, a_stream_that_ends_while_another_worker_has_its_last_batch_loses_nothing) {
  auto shared = td::datasets::make_shared_dataset<EndsFirst>();
  int count = 0;
  for (auto& batch : DataLoader(shared, {.batch_size = 1, .num_workers = 3}))
    count += static_cast<int>(batch.data.size(0));
  EXPECT_EQ(count, 1);
}

class Endless : public td::datasets::StreamDataset<Endless> {
 public:
  std::vector<td::Example<>> get_batch(std::size_t count) override {
    return std::vector<td::Example<>>(count, {at::ones({1}), at::ones({1})});
  }
  std::optional<std::size_t> size() const override { return limit; }
  std::optional<std::size_t> limit;
};

TEST(TorchData, streams_end_by_themselves_or_by_their_size) {
  auto shared = td::datasets::make_shared_dataset<Stateful>();
  for (const int workers : {0, 1, 3}) {
    DataLoader loader(shared, {.batch_size = 4, .num_workers = workers});
    EXPECT_EQ(loader.size(), 7u);
    for (int round = 0; round < 3; ++round) {
      Numbers all;
      for (auto& [data, target] : loader)
        for (const auto each : values(data)) all.push_back(each);
      std::sort(all.begin(), all.end());
      EXPECT_EQ(std::ssize(all), 25);
      EXPECT_EQ(all.back(), 24);
    }
  }
  Endless endless;
  int count = 0;
  for (auto& batch : DataLoader(endless, {.batch_size = 4, .num_workers = 1})) {
    EXPECT_EQ(batch.data.size(0), 4);
    if (++count == 100) break;
  }
  EXPECT_THAT(error_of<ConfigError>([&] { (void)DataLoader(endless).size(); }),
              HasSubstr("stream of unknown size"));
  endless.limit = 10;
  Numbers sizes;
  for (auto& batch : DataLoader(endless, {.batch_size = 4})) sizes.push_back(batch.data.size(0));
  EXPECT_EQ(sizes, (Numbers{4, 4, 2}));
  EXPECT_THAT(error_of<ConfigError>([&] { DataLoader(endless, {.shuffle = true}); }),
              HasSubstr("a stream has its own order"));
}

}  // namespace
}  // namespace lockstep::testing
