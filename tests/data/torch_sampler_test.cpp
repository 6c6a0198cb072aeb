// Lockstep's samplers in torch::data's loader, and the reverse.
#include <ATen/CPUGeneratorImpl.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <algorithm>
#include <numeric>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using Numbers = std::vector<std::int64_t>;

Numbers in_order(Numbers numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

// A dataset of torch::data whose samples are their numbers.
struct NumberSet : torch::data::datasets::BatchDataset<NumberSet, Numbers> {
  explicit NumberSet(std::size_t given) : count(given) {}
  Numbers get_batch(at::ArrayRef<std::size_t> indices) override { return {indices.begin(), indices.end()}; }
  std::optional<std::size_t> size() const override { return count; }
  std::size_t count;
};

Numbers numbers_of(const Numbers& batch) { return batch; }
Numbers numbers_of(const at::Tensor& batch) {  // the batch that our loader makes
  const auto* begin = batch.const_data_ptr<std::int64_t>();
  return {begin, begin + batch.numel()};
}

template <typename Loader>
std::vector<Numbers> batches_of(Loader& loader) {
  std::vector<Numbers> batches;
  for (auto& batch : loader) batches.push_back(numbers_of(batch));
  return batches;
}

TEST(TorchSamplers, give_our_loader_the_batches_of_torchs) {
  namespace samplers = torch::data::samplers;
  for (const int workers : {0, 2}) {
    const DataLoaderOptions options{.batch_size = 4, .num_workers = workers};
    const auto expect_same = [&](auto make) {
      auto theirs = torch::data::make_data_loader(NumberSet(10), make(), 4);
      auto sampler = make();
      DataLoader ours(NumberSet(10), sampler, options);
      const auto first = batches_of(*theirs), second = batches_of(*theirs);
      EXPECT_EQ(batches_of(ours), first);
      EXPECT_EQ(batches_of(ours), second);
      EXPECT_EQ(ours.size(), first.size());
    };
    expect_same([] { return samplers::SequentialSampler(10); });
    expect_same([] { return samplers::DistributedSequentialSampler(10, 2, 1); });
    expect_same([] { return samplers::DistributedRandomSampler(10, 3, 1); });
  }
  // As in LibTorch: a new order for each pass.
  DataLoader shuffled(NumberSet(10), samplers::RandomSampler(10), {.batch_size = 4});
  const auto generator = at::detail::getDefaultCPUGenerator();
  const auto before = generator.get_state();
  EXPECT_EQ(shuffled.size(), 3u);
  EXPECT_TRUE(at::equal(generator.get_state(), before));  // counting them draws no random numbers
  const auto first = batches_of(shuffled), second = batches_of(shuffled);
  ASSERT_EQ(first.size(), 3u);
  EXPECT_NE(first, second);
  for (const auto& pass : {first, second}) {
    Numbers all;
    for (const auto& batch : pass) all.insert(all.end(), batch.begin(), batch.end());
    Numbers expected(10);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(in_order(all), expected);
  }
  // A variable is held by reference, and two passes do not interfere.
  samplers::DistributedRandomSampler sampler(10, 2, 0);
  DataLoader loader(NumberSet(10), sampler, {.batch_size = 4});
  const auto epoch0 = batches_of(loader);
  sampler.set_epoch(1);
  EXPECT_NE(batches_of(loader), epoch0);
  auto one = loader.begin(), other = loader.begin();
  EXPECT_EQ(numbers_of(*one), numbers_of(*other));
}

// Returns fewer indices than requested, and cannot be copied.
struct OneByOne : torch::data::samplers::Sampler<> {
  OneByOne() = default;
  OneByOne(OneByOne&&) = default;
  void reset(std::optional<std::size_t>) override { left = 5; }
  std::optional<std::vector<std::size_t>> next(std::size_t count) override {
    if (left == 0) return std::nullopt;
    return std::vector<std::size_t>(too_many ? count + 1 : 1, --left);
  }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}
  std::size_t left = 5;
  bool too_many = false;
};

TEST(TorchSamplers, of_a_users_own_fill_whole_batches) {
  OneByOne sampler;
  DataLoader loader(NumberSet(5), sampler, {.batch_size = 2});
  EXPECT_EQ(batches_of(loader), (std::vector<Numbers>{{4, 3}, {2, 1}, {0}}));
  EXPECT_THAT(error_of<ConfigError>([&] { (void)loader.size(); }), HasSubstr("cannot be copied"));
  sampler.too_many = true;
  EXPECT_THAT(error_of<ConfigError>([&] { batches_of(loader); }),
              HasSubstr("the sampler returned 3 indices"));
}

TEST(OurSamplers, give_torchs_loader_the_batches_of_ours) {
  for (const bool drop_last : {false, true}) {
    DistributedSampler sampler(11, 1, 2, {.seed = 4}), twin(11, 1, 2, {.seed = 4});
    DataLoader ours(NumberSet(11), twin, {.batch_size = 4, .drop_last = drop_last});
    auto theirs = torch::data::make_data_loader(
        NumberSet(11), sampler, torch::data::DataLoaderOptions(4).workers(2).drop_last(drop_last));
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
      sampler.set_epoch(epoch);  // reaches the loader's copy
      twin.set_epoch(epoch);
      EXPECT_EQ(batches_of(*theirs), batches_of(ours)) << epoch;
    }
  }
  auto weighted = torch::data::make_data_loader(NumberSet(3), WeightedRandomSampler({0, 1, 0}, 5), 2);
  EXPECT_EQ(batches_of(*weighted), (std::vector<Numbers>{{1, 1}, {1, 1}, {1}}));
  EXPECT_THAT(error_of<ConfigError>([] { SequentialSampler(3).reset(4); }),
              HasSubstr("create a new sampler"));
}

TEST(OurSamplers, can_be_saved_in_the_middle_of_torchs_loop) {
  DistributedSampler sampler(12, 0, 2, {.seed = 4});
  auto loader = torch::data::make_data_loader(NumberSet(12), sampler, 2);
  std::vector<Numbers> rest;
  DistributedSampler::State state;
  for (auto& batch : *loader) {
    if (!state.empty()) rest.push_back(numbers_of(batch));
    if (state.empty()) state = sampler.state();
  }
  EXPECT_EQ(rest.size(), 2u);
  EXPECT_EQ(state.at("position"), 4);
  DistributedSampler resumed(12, 0, 2, {.seed = 4});
  resumed.load_state(state);
  auto other = torch::data::make_data_loader(NumberSet(12), resumed, 2);
  EXPECT_EQ(batches_of(*other), rest);
  EXPECT_EQ(batches_of(*other).size(), 3u);  // the next pass is whole
}

}  // namespace
}  // namespace lockstep::testing
