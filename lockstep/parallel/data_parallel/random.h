// Random numbers of replicas that are threads of one CPU. LibTorch has one CPU generator for all threads:
// which replica's dropout came first would decide what each gets. So each replica has a generator of its own
// for the length of a call. All are seeded by one number that the call takes from LibTorch's, at its first
// random operation: the same seed gives the same results, and a call without random operations takes nothing.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <lockstep/nn/dropout.h>

namespace lockstep::detail {

// What nn::Dropout goes by in each replica: the caller's scope, with the number of the replica's first
// sample. Nothing outside any scope. pieces: each replica's inputs, split along dim.
std::vector<std::optional<nn::DropoutStep>> dropout_steps(const std::vector<std::vector<at::Tensor>>& pieces,
                                                          std::int64_t dim);

class ReplicaRandom : public std::enable_shared_from_this<ReplicaRandom> {
 public:
  explicit ReplicaRandom(std::size_t replicas);
  const at::Generator& generator(std::size_t replica);

  // While it lives, random operations of this thread take the replica's numbers.
  class Guard {
   public:
    Guard(ReplicaRandom& random, std::size_t replica);
    ~Guard();

   private:
    c10::impl::IncludeDispatchKeyGuard key_;
    ReplicaRandom* before_;
    std::size_t replica_before_;
  };

 private:
  // A call inside a replica of another takes its number from that replica's.
  std::shared_ptr<ReplicaRandom> outer_;
  std::size_t outer_replica_;
  std::mutex mutex_;
  std::vector<at::Generator> generators_;  // undefined until the first use
};

}  // namespace lockstep::detail
