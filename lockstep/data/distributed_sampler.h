// This rank's share of the samples of each epoch.
//
//   DistributedSampler sampler(dataset.size(), world.group(), {.shuffle = true});
//   DataLoader loader(dataset, sampler, {.batch_size = 32});
//   for (auto epoch = sampler.epoch(); epoch < 10; ++epoch) {
//     sampler.set_epoch(epoch);
//     for (auto& [x, y] : loader) { ...; if (time_to_save) state = sampler.state(); }
//   }
//
// By default the indices of torch.utils.data.DistributedSampler for the same seed, epoch, number of ranks,
// shuffle and drop_last. Whatever the options, each step takes the next batch_size * ranks samples of one
// sequence that does not depend on the number of ranks. So a run that was saved in the middle of an epoch
// goes on at that sample on any number of ranks, with no sample twice and none left out.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <lockstep/comm/group.h>
#include <lockstep/data/sampler.h>

namespace lockstep {

struct DistributedSamplerOptions {
  bool shuffle = true;
  std::int64_t seed = 0;  // the same on every rank
  // What becomes of the samples that are left when the rest is divided evenly. By default some samples are
  // given out twice, so that every rank has as many. drop_last: they are left out. exact: they are given to
  // the first ranks, which then have one more (for evaluation, or under join).
  bool drop_last = false;
  bool exact = false;
  // Another random order, which takes no memory and no time to make or to enter in the middle, however many
  // samples there are; and each rank has one piece of the global batch, not every ranks-th sample.
  bool elastic = false;
};

class DistributedSampler : public Sampler {
 public:
  DistributedSampler(std::int64_t size, const Group& group, DistributedSamplerOptions options = {});
  DistributedSampler(std::int64_t size, int rank, int num_replicas, DistributedSamplerOptions options = {});

  std::int64_t size() const override;  // of this rank's share of a whole epoch
  std::unique_ptr<Pass> pass() override;

  // Before each epoch, on every rank: another order. The epoch of a state that was loaded goes on where it
  // was.
  void set_epoch(std::int64_t epoch);
  std::int64_t epoch() const;
  // Samples of this epoch that the ranks have together, with the batch that the loop is at.
  std::int64_t position() const;

  // All of it, in numbers, the same on every rank: what the loop has got, not what was fetched ahead. Loading
  // takes a state of any number of ranks; ConfigError where size, seed or order are others. The next pass
  // goes on from there, and so do the ones of its workers' random numbers; those after it are whole.
  using State = std::map<std::string, std::int64_t>;
  State state() const;
  void load_state(const State& state);

 private:
  struct Shared;
  class Share;
  std::shared_ptr<Shared> shared_;
};

}  // namespace lockstep
