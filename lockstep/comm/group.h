// A set of ranks that communicate. A Group is a handle: copies are cheap and refer to the same group.
//
//   group.all_reduce(t, {.op = ReduceOp::AVG}).wait();
//   group.broadcast(t, {.root = 0}).wait();
//   group.send(t, {.peer = 1}).wait();
//
// Collectives: every rank of the group makes the same calls in the same order, with tensors of the same dtype
// and shape unless stated otherwise. Tensors may be non-contiguous. Each call returns at once; the operation
// owns the tensors until its Work has been waited for. Several threads may use a group as long as every rank
// issues the calls in the same order; different groups are independent. Errors that the caller can fix throw
// ConfigError before anything is sent; all others throw CommError, here or in wait(). The last argument, the
// call site, appears in errors and traces: do not pass it.
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

// A value that can be copied byte by byte. Text has its own overload, and pointers are meaningless to other
// processes.
template <typename T>
concept plain_value = std::is_trivially_copyable_v<T> && !std::is_pointer_v<T> && !std::is_array_v<T> &&
                      !std::is_convertible_v<T, std::string_view>;
}  // namespace detail

using Timeout = std::optional<std::chrono::milliseconds>;  // empty: the group's
using Site = std::source_location;

constexpr int kAnyRank = -1;

// A tag is shown in errors and traces. It must be the same on every rank.
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
  std::vector<std::int64_t> out_splits = {};  // rows from each rank; empty: equal shares
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

  int rank() const;  // this process's rank within the group
  int size() const;
  const std::vector<int>& ranks() const;  // the members' world ranks, in the group's order
  const std::string& name() const;
  std::string backend(at::DeviceType device = at::kCPU) const;  // for example "gloo"; empty if there is none
  std::chrono::milliseconds timeout() const;                    // default deadline of operations
  // True if messages are paired by tag. NCCL does not pair by tag and cannot receive from any rank: two ranks
  // must start all messages between them, in both directions, in the same order, or coalesce them. The first
  // message between two ranks blocks the call that starts it until both ranks have started it.
  bool has_tags(at::DeviceType device = at::kCPU) const;

  // In place. AVG divides the sum by size(), once, and requires a floating-point tensor.
  Work all_reduce(at::Tensor tensor, AllReduceOptions options = {}, Site site = Site::current());
  // In place on the root. On other ranks the tensor does not change.
  Work reduce(at::Tensor tensor, ReduceOptions options = {}, Site site = Site::current());
  Work broadcast(at::Tensor tensor, RootOptions options = {}, Site site = Site::current());
  // out has size() times as many elements as in, in rank order. The second form takes one tensor per rank.
  // Their sizes may differ, and every rank must know all of them.
  Work all_gather(at::Tensor out, at::Tensor in, CollectiveOptions options = {}, Site site = Site::current());
  Work all_gather(std::vector<at::Tensor> out, at::Tensor in, CollectiveOptions options = {},
                  Site site = Site::current());
  // out: one tensor per rank on the root, of any sizes; empty on other ranks.
  Work gather(std::vector<at::Tensor> out, at::Tensor in, RootOptions options = {},
              Site site = Site::current());
  Work scatter(at::Tensor out, std::vector<at::Tensor> in, RootOptions options = {},
               Site site = Site::current());
  // in has size() times as many elements as out, or is one tensor per rank, with sizes as in all_gather.
  Work reduce_scatter(at::Tensor out, at::Tensor in, AllReduceOptions options = {},
                      Site site = Site::current());
  Work reduce_scatter(at::Tensor out, std::vector<at::Tensor> in, AllReduceOptions options = {},
                      Site site = Site::current());
  // The splits count rows of the first dimension.
  Work all_to_all(at::Tensor out, at::Tensor in, AllToAllOptions options = {}, Site site = Site::current());
  Work send(at::Tensor tensor, PeerOptions options, Site site = Site::current());
  // Receives from peer, or from any rank with kAnyRank; Work::source() then returns the sender.
  Work recv(at::Tensor tensor, PeerOptions options, Site site = Site::current());
  Work barrier(CollectiveOptions options = {}, Site site = Site::current());

  // Submits all operations that `calls` starts on this group as one batch. On NCCL a batch is one launch in
  // which sends and receives do not block each other; other engines run each operation separately. All ranks
  // must coalesce the same calls, and a send in a batch must match a receive in a batch. Wait for a Work only
  // after coalesce has returned. Calls from other threads on this group run after the batch. Other groups,
  // barrier and the value functions may not be used within a batch.
  //
  //   group.coalesce([&] {
  //     works.push_back(group.send(mine, {.peer = next}));
  //     works.push_back(group.recv(theirs, {.peer = previous}));
  //   });
  void coalesce(const std::function<void()>& calls);

  // Small values, exchanged before the call returns: broadcast_value returns the root's value,
  // all_gather_values returns every rank's value.
  std::string broadcast_value(std::string_view value, RootOptions options = {}, Site site = Site::current());
  template <detail::plain_value T>
  T broadcast_value(T value, RootOptions options = {}, Site site = Site::current());
  std::vector<std::string> all_gather_values(std::string_view value, CollectiveOptions options = {},
                                             Site site = Site::current());
  template <detail::plain_value T>
  std::vector<T> all_gather_values(const T& value, CollectiveOptions options = {},
                                   Site site = Site::current());

  // Allocates a tensor in memory that the transport can reach without a copy, if it has such memory. A local
  // call: any rank may make it in any order. The tensor may outlive the group. On cuda_ipc record_stream has
  // no effect on the tensor: its memory is reused once the streams that were current at allocation and at
  // release have finished.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat,
                      std::optional<at::Device> device = {});  // default: the World's device
  // Makes one tensor in memory that all ranks share: each rank sees what the others write. It starts as zeros
  // and may outlive the group. Every rank calls it, with the same sizes. Throws ConfigError unless the
  // backend is "shm".
  at::Tensor share(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat, Site site = Site::current());

  // Makes a group of these ranks of this group, in this order. Only the members call it, each with the same
  // list.
  Group subgroup(const std::vector<int>& ranks, GroupOptions options = {});
  // Makes one group per colour, its ranks ordered by key, then by rank. Every rank calls it.
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
