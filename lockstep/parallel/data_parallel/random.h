// Random numbers for replicas that are threads of one CPU. LibTorch has a single CPU generator for all
// threads, so the numbers would depend on which replica's dropout ran first. Instead each replica uses its
// own generator during a call. All are seeded from one number, which the call draws from LibTorch's generator
// at its first random operation: the same seed gives the same results, and a call without random operations
// draws nothing.
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

// Returns nn::DropoutStep for each replica: the caller's, with the number of the replica's first sample.
// Empty outside a dropout scope. pieces: each replica's inputs, split along dim.
std::vector<std::optional<nn::DropoutStep>> dropout_steps(const std::vector<std::vector<at::Tensor>>& pieces,
                                                          std::int64_t dim);

class ReplicaRandom : public std::enable_shared_from_this<ReplicaRandom> {
 public:
  explicit ReplicaRandom(std::size_t replicas);
  const at::Generator& generator(std::size_t replica);

  // While an object exists, random operations of this thread use the replica's generator.
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
  // A call inside a replica of another DataParallel draws its seed from that replica's generator.
  std::shared_ptr<ReplicaRandom> outer_;
  std::size_t outer_replica_;
  std::mutex mutex_;
  std::vector<at::Generator> generators_;  // Undefined until first used.
};

}  // namespace lockstep::detail
