// A set of ranks that communicate. A Group is a handle: copies are cheap and mean the same group.
//
//   group.all_reduce(t, {.op = ReduceOp::AVG}).wait();
//   group.broadcast(t, {.root = 0}).wait();
//   group.send(t, {.peer = 1}).wait();
//
// Collectives: every rank of the group makes the same calls in the same order, with tensors of the same
// dtype and shape unless said otherwise. Tensors may be non-contiguous. Each call returns at once; the
// tensors belong to the operation until its Work has been waited for. Several threads may use a group,
// if the order of calls is still the same on every rank; different groups are independent.
// Throws ConfigError for what the caller can fix, before anything is sent; CommError (here or in wait())
// for the rest. The last argument, the call site, is for errors and traces: leave it out.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/work.h>

namespace lockstep {

namespace detail {
class GroupState;
class ModelScope;
class Refusal;

// What its bytes say all of. Text goes by its own overload; a pointer means nothing to another process.
template <typename T>
concept plain_value = std::is_trivially_copyable_v<T> && !std::is_pointer_v<T> && !std::is_array_v<T> &&
                      !std::is_convertible_v<T, std::string_view>;
}  // namespace detail

using Timeout = std::optional<std::chrono::milliseconds>;  // nothing: the group's
using Site = std::source_location;

constexpr int kAnyRank = -1;

// A tag is shown in errors and traces, and must be the same on every rank.
struct AllReduceOptions {
  ReduceOp op = ReduceOp::SUM;
  std::string tag = {};
  Timeout timeout = {};
};
struct ReduceOptions {
  ReduceOp op = ReduceOp::SUM;
  int root = 0;
  std::string tag = {};
  Timeout timeout = {};
};
struct RootOptions {
  int root = 0;
  std::string tag = {};
  Timeout timeout = {};
};
struct CollectiveOptions {
  std::string tag = {};
  Timeout timeout = {};
};
struct AllToAllOptions {
  std::vector<std::int64_t> out_splits = {};  // rows from each rank; empty: equal parts
  std::vector<std::int64_t> in_splits = {};   // rows to each rank
  std::string tag = {};
  Timeout timeout = {};
};
struct PeerOptions {
  int peer;
  int tag = 0;
  Timeout timeout = {};
};  // here the tag pairs sends with receives
struct GroupOptions {
  std::string name = {};
  Timeout timeout = {};
};

class Group {
 public:
  explicit Group(std::shared_ptr<detail::GroupState> state);

  int rank() const;  // this process's place in the group
  int size() const;
  const std::vector<int>& ranks() const;  // the members' ranks in the world, in the group's order
  const std::string& name() const;
  std::string backend(at::DeviceType device = at::kCPU) const;  // "gloo"; empty where there is none
  std::chrono::milliseconds timeout() const;                    // of operations that are given none
  // Whether messages are paired by tags. On NCCL they are not, and nothing is received from any rank: two
  // ranks start all their messages to one another, either way, in the same order, or coalesce them; and the
  // first message of two ranks waits, when it is started, until both have come to it.
  bool has_tags(at::DeviceType device = at::kCPU) const;

  // In place. AVG divides the sum by size(), once; floating point only.
  Work all_reduce(at::Tensor tensor, AllReduceOptions options = {}, Site site = Site::current());
  // In place on the root; elsewhere the tensor is left as it was.
  Work reduce(at::Tensor tensor, ReduceOptions options = {}, Site site = Site::current());
  Work broadcast(at::Tensor tensor, RootOptions options = {}, Site site = Site::current());
  // out has size() times in's elements, in the order of the ranks. The second form takes one tensor per
  // rank, whose sizes may differ; every rank must know them all.
  Work all_gather(at::Tensor out, at::Tensor in, CollectiveOptions options = {}, Site site = Site::current());
  Work all_gather(std::vector<at::Tensor> out, at::Tensor in, CollectiveOptions options = {},
                  Site site = Site::current());
  // out: on the root one tensor per rank, of any sizes; elsewhere empty.
  Work gather(std::vector<at::Tensor> out, at::Tensor in, RootOptions options = {},
              Site site = Site::current());
  Work scatter(at::Tensor out, std::vector<at::Tensor> in, RootOptions options = {},
               Site site = Site::current());
  // in has size() times out's elements; or one tensor per rank, sizes as in all_gather.
  Work reduce_scatter(at::Tensor out, at::Tensor in, AllReduceOptions options = {},
                      Site site = Site::current());
  Work reduce_scatter(at::Tensor out, std::vector<at::Tensor> in, AllReduceOptions options = {},
                      Site site = Site::current());
  // Splits count rows of the first dimension.
  Work all_to_all(at::Tensor out, at::Tensor in, AllToAllOptions options = {}, Site site = Site::current());
  Work send(at::Tensor tensor, PeerOptions options, Site site = Site::current());
  // From peer, or from any rank with kAnyRank: Work::source() tells which.
  Work recv(at::Tensor tensor, PeerOptions options, Site site = Site::current());
  Work barrier(CollectiveOptions options = {}, Site site = Site::current());

  // What `calls` starts on this group goes to the engine as one. On NCCL that is one launch, in which sends
  // and receives do not wait for one another; elsewhere each goes by itself. All ranks coalesce the same
  // calls, and a send in a batch meets a receive in a batch. A Work can be waited for when coalesce has
  // returned, not before; calls of other threads on this group come after. Not allowed within: other groups,
  // barrier, values.
  //
  //   group.coalesce([&] {
  //     works.push_back(group.send(mine, {.peer = next}));
  //     works.push_back(group.recv(theirs, {.peer = previous}));
  //   });
  void coalesce(const std::function<void()>& calls);

  // Small values, at once: the root's on every rank; every rank's on every rank.
  std::string broadcast_value(std::string_view value, RootOptions options = {}, Site site = Site::current());
  template <detail::plain_value T>
  T broadcast_value(T value, RootOptions options = {}, Site site = Site::current());
  std::vector<std::string> all_gather_values(std::string_view value, CollectiveOptions options = {},
                                             Site site = Site::current());
  template <detail::plain_value T>
  std::vector<T> all_gather_values(const T& value, CollectiveOptions options = {},
                                   Site site = Site::current());

  // A tensor in memory that the transport reaches without a copy, where it has such memory. Local: any
  // rank, any order; the tensor may outlive the group. On cuda_ipc record_stream has no effect on it: its
  // memory is given out again when the streams are done that were current where it was allocated and freed.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat,
                      std::optional<at::Device> device = {});  // nothing: the World's
  // One tensor for all ranks: what one writes all have. Zeros at first; it may outlive the group. Every rank
  // calls it, with the same sizes. ConfigError where they have no memory in common: the backend is not "shm".
  at::Tensor share(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat, Site site = Site::current());

  // Of these ranks of this group, in this order; called by them alone, each with the same list.
  Group subgroup(const std::vector<int>& ranks, GroupOptions options = {});
  // One group per colour, its ranks ordered by key, then by rank. Every rank calls it.
  Group split(int color, int key = 0, GroupOptions options = {}, Site site = Site::current());

  // The same group, for a function that calls it on behalf of its own caller: errors and traces of operations on
  // the result name that line. The first one given stays.
  Group called_at(Site site) const;

 private:
  friend class detail::ModelScope;
  friend class detail::Refusal;
  std::shared_ptr<detail::GroupState> state_;
  std::optional<Site> site_ = {};  // instead of where its operations are called
};

template <detail::plain_value T>
T Group::broadcast_value(T value, RootOptions options, Site site) {
  std::string bytes(reinterpret_cast<const char*>(&value), sizeof value);
  bytes = broadcast_value(std::string_view(bytes), std::move(options), site);
  bytes.copy(reinterpret_cast<char*>(&value), sizeof value);
  return value;
}

template <detail::plain_value T>
std::vector<T> Group::all_gather_values(const T& value, CollectiveOptions options, Site site) {
  const std::string bytes(reinterpret_cast<const char*>(&value), sizeof value);
  std::vector<T> values;
  for (const std::string& each : all_gather_values(std::string_view(bytes), std::move(options), site)) {
    T& target = values.emplace_back(value);
    each.copy(reinterpret_cast<char*>(&target), sizeof target);
  }
  return values;
}

}  // namespace lockstep
