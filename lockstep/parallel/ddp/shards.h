// ParameterShards: the parameters of a replicated model, divided so that each rank updates one part. Each
// rank gets about the same share of every bucket of gradients.
//
// The parameters live in flat memory that the transport can reach, laid out like the gradient buckets. Cuts
// are at multiples of 4096 elements within a parameter, so that a norm computed from blocks does not depend
// on the number of ranks. If a bucket has fewer blocks than there are ranks, some ranks get nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/group.h>

namespace lockstep::detail {

class DdpReducer;

class ParameterShards {
 public:
  static constexpr std::int64_t kBlock = 4096;
  // Message of unready gradients: stored in p.grad() while this rank's shard of the gradient is in
  // slice().grad().
  static constexpr const char* kGradientsAreSharded =
      "gradients are sharded: the DistributedOptimizer holds this rank's part. Call "
      "optimizer.clip_grad_norm(max_norm) instead of clip_grad_norm; optimizer.zero_grad() clears them";

  struct Layout {  // Layout of one bucket.
    std::vector<std::size_t> params;
    std::vector<std::int64_t> offsets;  // Offsets of the parameters, in elements, ascending.
    std::int64_t size = 0;              // Number of elements.
  };

  // Moves the parameters to the new memory. With share_weights, all ranks use the same memory.
  ParameterShards(Group group, std::vector<std::string> names, std::vector<at::Tensor> params,
                  std::vector<Layout> layouts, bool share_weights);

  Group& group() { return group_; }
  std::size_t size() const { return params_.size(); }
  const std::string& name(std::size_t param) const { return names_[param]; }
  const at::Tensor& param(std::size_t param) const { return params_[param]; }
  // This rank's shard of a parameter: a one-dimensional view, possibly empty, and the offset of its first
  // element.
  const at::Tensor& slice(std::size_t param) const { return slices_[param]; }
  std::int64_t slice_begin(std::size_t param) const { return begins_[param]; }
  std::size_t find(const at::Tensor& parameter) const;    // Throws ConfigError if it is not one of these.
  std::size_t find_slice(const at::Tensor& slice) const;  // Index of the parameter; size() if there is none.
  // Rank r owns [bounds[r], bounds[r + 1]) of the bucket.
  const std::vector<std::int64_t>& bounds(std::size_t bucket) const { return bounds_[bucket]; }
  std::vector<at::Tensor> pieces(const at::Tensor& flat, std::size_t bucket) const;  // One piece per rank.

  // Moves the reduced gradients from p.grad() to the gradients of the slices. p.grad() is undefined
  // afterwards.
  void take_gradients();
  // Clones the gradients of the slices, because buckets are about to be overwritten.
  void keep_gradients();
  void drop_gradients();  // Drops the gradients of the slices.
  // Drops gradients left in p.grad() by passes without communication or by a failed pass.
  void drop_unreduced_gradients();

  // Throws ConfigError in the middle of a sum of micro-batches.
  void require_complete() const;

  // Bracket an update. before_update() waits until no rank reads the weights any more; then every rank
  // updates its own shard; after_update() makes the result visible on all ranks. Throws ConfigError if
  // parameters have moved or have gradients that were not reduced.
  void before_update();
  void after_update();
  // Ends updates. If weights were shared, each rank gets its own copy again, if there is enough memory.
  void release() noexcept;
  std::weak_ptr<DdpReducer> reducer;  // The reducer that these gradients belong to.

  // Gathers every rank's shards into whole tensors of the given type, shaped like the parameters. Only wanted
  // parameters are gathered; the other entries are undefined. `part` fills in this rank's shard.
  using Part = std::function<void(std::size_t param, const at::Tensor& slice)>;
  std::vector<at::Tensor> gather(const std::vector<char>& wanted, at::ScalarType type,
                                 const Part& part) const;

  // Detect writes to a parameter between these two calls.
  void note_versions();
  void check_versions() const;

 private:
  void move_parameters();
  void check_parameters() const;

  mutable Group group_;
  const std::vector<std::string> names_;
  const std::vector<at::Tensor> params_;
  const std::vector<Layout> layouts_;
  const bool share_weights_;
  std::map<const void*, std::size_t> index_, slice_index_;
  std::vector<std::vector<std::int64_t>> bounds_;
  std::vector<at::Tensor> weights_;  // One tensor per bucket; undefined if this rank is alone.
  std::vector<at::Tensor> slices_;
  std::vector<std::int64_t> begins_;
  std::vector<const void*> places_;  // Address of each parameter.
  std::vector<std::int64_t> versions_;
};

}  // namespace lockstep::detail
