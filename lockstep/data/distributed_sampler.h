// This rank's share of the samples of each epoch.
//
//   DistributedSampler sampler(dataset.size(), world.group(), {.shuffle = true});
//   DataLoader loader(dataset, sampler, {.batch_size = 32});
//   for (auto epoch = sampler.epoch(); epoch < 10; ++epoch) {
//     sampler.set_epoch(epoch);
//     for (auto& [x, y] : loader) { ...; if (time_to_save) state = sampler.state(); }
//   }
//
// By default, yields the same indices as torch.utils.data.DistributedSampler for the same seed, epoch, number
// of ranks, shuffle and drop_last. With any options, each step takes the next batch_size * ranks samples of
// one sequence that does not depend on the number of ranks. A run saved in the middle of an epoch therefore
// resumes at that sample on any number of ranks, without repeating or omitting a sample.
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
  std::int64_t seed = 0;  // must be the same on every rank
  // What to do with the samples left over when the rest is divided evenly. By default, some samples are
  // repeated so that every rank has equally many. drop_last: omit them. exact: give them to the first ranks,
  // which then have one more (for evaluation, or under join).
  bool drop_last = false;
  bool exact = false;
  // Use a different random order that needs no memory and no setup time, wherever a run resumes and however
  // many samples there are. Each rank takes one contiguous piece of the global batch, not every ranks-th
  // sample.
  bool elastic = false;
};

class DistributedSampler : public Sampler {
 public:
  DistributedSampler(std::int64_t size, const Group& group, DistributedSamplerOptions options = {});
  DistributedSampler(std::int64_t size, int rank, int num_replicas, DistributedSamplerOptions options = {});

  std::int64_t size() const override;  // of this rank's share of a whole epoch
  std::unique_ptr<Pass> pass() override;

  // Call before each epoch, on every rank, to change the order. The epoch of a loaded state resumes where it
  // stopped.
  void set_epoch(std::int64_t epoch);
  std::int64_t epoch() const;
  // Number of samples of this epoch that all ranks have consumed together, including the loop's current
  // batch.
  std::int64_t position() const;

  // The state in numbers, the same on every rank. It covers what the loop has received, not what was
  // prefetched. load_state accepts the state of any number of ranks, and throws ConfigError if the size, seed
  // or order differs. The next pass resumes from there, with the same random numbers in its workers; later
  // passes are whole.
  using State = std::map<std::string, std::int64_t>;
  State state() const;
  void load_state(const State& state);

 private:
  struct Shared;
  class Share;
  std::shared_ptr<Shared> shared_;
};

}  // namespace lockstep
