// The parameters of a model whose replicas are on all ranks, cut so that each rank has a part of its own to
// update: of every bucket of gradients about the same share.
//
// They lie in flat memory that the transport reaches, laid out as the gradients' buckets are. Cuts are at
// blocks of 4096 elements of a parameter, so that a norm made of blocks does not depend on the number of
// ranks; a bucket of fewer blocks than ranks leaves some with nothing.
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
  // The text of unready gradients: what p.grad() holds while this rank's part of it is in slice().grad().
  static constexpr const char* kGradientsAreSharded =
      "the gradients are sharded: each rank has a part of them, which the DistributedOptimizer holds. Call "
      "optimizer.clip_grad_norm(max_norm), not clip_grad_norm of the parameters; optimizer.zero_grad() clears them";

  struct Layout {  // of a bucket
    std::vector<std::size_t> params;
    std::vector<std::int64_t> offsets;  // theirs, in elements, growing
    std::int64_t size = 0;              // elements
  };

  // Parameters move to the new memory. share_weights: all ranks have the same.
  ParameterShards(Group group, std::vector<std::string> names, std::vector<at::Tensor> params,
                  std::vector<Layout> layouts, bool share_weights);

  Group& group() { return group_; }
  std::size_t size() const { return params_.size(); }
  const std::string& name(std::size_t param) const { return names_[param]; }
  const at::Tensor& param(std::size_t param) const { return params_[param]; }
  // This rank's part: its memory, one dimension, perhaps of no elements; and where it begins.
  const at::Tensor& slice(std::size_t param) const { return slices_[param]; }
  std::int64_t slice_begin(std::size_t param) const { return begins_[param]; }
  std::size_t find(const at::Tensor& parameter) const;    // ConfigError where it is none of these
  std::size_t find_slice(const at::Tensor& slice) const;  // the parameter's number; size() where it is none
  // Rank r has [bounds[r], bounds[r + 1]) of the bucket.
  const std::vector<std::int64_t>& bounds(std::size_t bucket) const { return bounds_[bucket]; }
  std::vector<at::Tensor> pieces(const at::Tensor& flat, std::size_t bucket) const;  // each rank's

  // The reduced gradients, from p.grad() to those of the slices; p.grad() is undefined then.
  void take_gradients();
  // Those of the slices, before buckets are written to again.
  void keep_gradients();
  void drop_gradients();  // those of the slices
  void
  drop_unreduced_gradients();  // what passes without communication, or a failed one, have left in p.grad()

  // Throws ConfigError in the middle of a sum of micro-batches.
  void require_complete() const;

  // Nobody reads weights any more (all wait for all), every rank changes its own, and all have all.
  // ConfigError where parameters have been moved, or have gradients that were not reduced.
  void before_update();
  void after_update();
  // No more updates: where weights were shared, each rank has its own copy again, if there is room for it.
  void release() noexcept;
  std::weak_ptr<DdpReducer> reducer;  // whose gradients these are

  // Every rank's parts, as whole tensors of this type like the parameters; of some of the parameters, the
  // others are undefined. `part` fills this rank's.
  using Part = std::function<void(std::size_t param, const at::Tensor& slice)>;
  std::vector<at::Tensor> gather(const std::vector<char>& wanted, at::ScalarType type,
                                 const Part& part) const;

  // A parameter was written to between these two.
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
  std::vector<at::Tensor> weights_;  // of each bucket; none where this rank is alone
  std::vector<at::Tensor> slices_;
  std::vector<std::int64_t> begins_;
  std::vector<const void*> places_;  // where each parameter lies
  std::vector<std::int64_t> versions_;
};

}  // namespace lockstep::detail
