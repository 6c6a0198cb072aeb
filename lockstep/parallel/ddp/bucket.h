// A gradient bucket as seen by a communication hook of DistributedDataParallel.
//
//   ddp.register_comm_hook([](lockstep::GradBucket& bucket) {
//     auto work = std::make_shared<lockstep::Work>(
//         bucket.group().all_reduce(bucket.buffer(), {.op = ReduceOp::AVG}));
//     return [work] { work->wait(); };
//   });
#pragma once

#include <any>
#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/group.h>

namespace lockstep {

namespace detail {
class DdpReducer;
}

class GradBucket {
 public:
  std::size_t index() const { return index_; }  // Bucket 0 is ready first.
  bool is_last() const { return last_; }
  Group& group() { return group_; }
  // buffer() and gradients() return different tensors in every step.
  // The whole bucket, one-dimensional.
  at::Tensor& buffer() { return buffer_; }
  const std::vector<at::Tensor>& gradients() const { return gradients_; }  // views of the buffer
  const std::vector<std::string>& names() const { return names_; }         // names of their parameters
  // Storage for a hook's per-bucket state between steps. Hooks that are combined each use their own key.
  std::any& state(const void* key = nullptr) { return states_[key]; }

 private:
  friend class detail::DdpReducer;
  GradBucket(std::size_t index, bool last, Group group)
      : index_(index), last_(last), group_(std::move(group)) {}

  std::size_t index_;
  bool last_;
  Group group_;
  at::Tensor buffer_;
  std::vector<at::Tensor> gradients_;
  std::vector<std::string> names_;
  std::map<const void*, std::any> states_;
};

// Called during backward when all gradients of a bucket are ready, in bucket order. Starts the communication
// and returns a function that completes it. That function is called at the end of backward, in the same
// order, and must leave the average over the ranks in buffer(). It may communicate too.
using CommHook = std::function<std::function<void()>(GradBucket&)>;

}  // namespace lockstep
