// What a communication hook of DistributedDataParallel sees of a bucket of gradients.
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
  std::size_t index() const { return index_; }  // 0 is ready first
  bool is_last() const { return last_; }
  Group& group() { return group_; }
  // These two are other tensors in every step.
  at::Tensor& buffer() { return buffer_; }                                 // all of it, one dimension
  const std::vector<at::Tensor>& gradients() const { return gradients_; }  // views of the buffer
  const std::vector<std::string>& names() const { return names_; }         // of their parameters
  // Whatever a hook keeps of this bucket from step to step; where several take part, each under its own key.
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

// Called when the gradients of a bucket are there, in the order of the buckets, during backward. Starts what
// communicates and returns what completes it: that is called at the end of backward, in the same order, and
// leaves the ranks' average in buffer(). May communicate too.
using CommHook = std::function<std::function<void()>(GradBucket&)>;

}  // namespace lockstep
