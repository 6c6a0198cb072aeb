// Call: the description of one rank's operation on a group. Ranks compare calls before data moves; errors
// show them and observers receive them. Does not use LibTorch, so the transports' engines and their tests can
// use it.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class ReduceOp : std::uint8_t { SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR };

// Tables in this order: name() in engine/call.cpp and title() in python/backend.cpp. recv stays last, because
// engine/call.cpp and profile/record/rank_profile.cpp check numbers against it. Profiles in files contain the
// numbers.
enum class Operation : std::uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  gather,
  scatter,
  reduce_scatter,
  all_to_all,
  barrier,
  send,
  recv,
};

enum class Dtype : std::uint8_t {
  float32,
  float64,
  bfloat16,
  float16,
  int8,
  int16,
  int32,
  int64,
  uint8,
  boolean,
  complex64,
  complex128,
  uint16,
  uint32,
  uint64,
  float8_e5m2,
  float8_e4m3fn,
  other
};

std::string_view name(ReduceOp op);
std::string_view name(Operation operation);
std::string_view name(Dtype dtype);

struct Call {
  Operation operation{};
  Dtype dtype = Dtype::other;
  ReduceOp reduction = ReduceOp::SUM;  // for all_reduce, reduce, reduce_scatter
  int root = -1;                       // for reduce, broadcast, gather, scatter; the peer of send and recv
  int rank = 0;                        // the calling rank, within the group
  int size = 1;
  // number of the operation, from 0; collectives and messages are counted separately
  std::uint64_t sequence = 0;
  std::int64_t count = 0;  // number of elements of this rank's tensor
  std::int64_t bytes = 0;
  std::vector<std::int64_t> shape = {};
  // Number of elements to and from each rank, if these may differ. `to` is set for scatter's root,
  // reduce_scatter and all_to_all; `from` for gather's root, all_gather and all_to_all.
  std::vector<std::int64_t> to = {}, from = {};
  std::string tag = {};
  std::chrono::milliseconds timeout{};  // of send and recv, if one was given: c10d's calls cannot carry it
  std::string group = {};
  std::int64_t group_key = 0;  // the same on every member; different for every group
  std::source_location site = std::source_location::current();
  std::string far_site = {};  // used instead of site if another process made the call
};

namespace detail {

constexpr bool reduces(Operation o) {
  return o == Operation::all_reduce || o == Operation::reduce || o == Operation::reduce_scatter;
}
constexpr bool rooted(Operation o) {
  return o == Operation::reduce || o == Operation::broadcast || o == Operation::gather ||
         o == Operation::scatter;
}
// True if each pair of ranks has its own size, which only the two know.
constexpr bool pairwise(Operation o) {
  return o == Operation::gather || o == Operation::scatter || o == Operation::all_to_all;
}
constexpr bool point_to_point(Operation o) { return o == Operation::send || o == Operation::recv; }

// "all_reduce(float32 [10, 4], sum, tag 'grads') at train.cpp:42"
std::string describe(const Call& call);
std::string tensor_text(const Call& call);  // "float32 [10, 4]"
std::string site_text(const Call& call);    // "train.cpp:42": file name and line

// Describes the first attribute of a collective in which two ranks' calls differ, naming both ranks.
std::optional<std::string> find_difference(const Call& a, const Call& b);
// Compares the calls of all ranks, and the sizes that they exchange; calls[r] is rank r's. Every rank gets
// the same answer.
std::optional<std::string> find_mismatch(std::span<const Call* const> calls);
// Compares a send with the receive that matched it.
std::optional<std::string> find_mismatch(const Call& send, const Call& recv);

// Hash of what ranks must agree on: if two digests differ, so do the calls or the other values that were
// added.
class Digest {
 public:
  Digest& add(std::uint64_t value) {
    hash_ = (hash_ ^ value) * 0x9E3779B97F4A7C15u;
    hash_ ^= hash_ >> 32;
    return *this;
  }
  Digest& add(const std::vector<std::int64_t>& values);
  Digest& add(const std::string& text);
  Digest& add(const Call& call);  // only what all ranks' calls share, without the sizes of pairs
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0x2545F4914F6CDD1Du;
};

// Serialised calls, which Group gathers for transports that do not compare calls themselves. The size depends
// only on the group's size, so it is the same on every rank.
std::size_t packed_size(int group_size);
std::vector<std::uint8_t> pack(const Call& call);
Call unpack(std::span<const std::uint8_t> bytes, int group_size);

// The call that this thread is making, for a transport that compares calls: c10d's interface cannot carry tag
// and call site. Null when c10d is used directly.
const Call* current_call();
class CallScope {
 public:
  explicit CallScope(const Call* call);  // null: as if c10d were used directly
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

 private:
  const Call* outer_;
};

}  // namespace detail
}  // namespace lockstep
