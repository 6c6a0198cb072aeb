// Hub: the transport between ranks that are threads of one process. No sockets, no intermediate copies, no
// LibTorch.
//
// A rank posts its Op and continues. The rank that arrives last does all the work, on its own thread, and
// completes every rank's Op. So posting never blocks, operations overlap freely, and each group's collectives
// run in the order in which they were posted. An all-reduce of n bytes by p ranks costs p n bytes read and p
// n written, by one thread.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/comm/engine/op.h>

namespace lockstep::detail {

// The last call of every rank of the process, over all groups, for errors about absent ranks.
class Whereabouts {
 public:
  explicit Whereabouts(int world_size) : last_(static_cast<std::size_t>(world_size)) {}
  void note(int world_rank, const Call& call);
  std::string describe(int world_rank) const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Call>> last_;
};

class Hub {
 public:
  // ranks: the members' ranks in the world.
  Hub(std::vector<int> ranks, std::shared_ptr<Whereabouts> whereabouts);

  const std::vector<int>& ranks() const { return ranks_; }

  void post(int rank, Op op);                                   // a collective
  void post_point_to_point(int rank, std::int64_t tag, Op op);  // call.root is the peer or kAnySource

  // Fails every pending and every later operation.
  void poison(const std::string& cause, CommError::Kind kind = CommError::Kind::stopped);
  // True if another rank has reached a collective that this one has not posted.
  bool is_awaited(int rank) const;
  // The rank will post no more: ranks that wait for it get an error at once.
  void leave(int rank);
  // The ranks that have not reached the collective, and where they were last; after a failure, its cause.
  std::string absent(std::uint64_t sequence) const;

 private:
  struct Collective {
    std::vector<std::unique_ptr<Op>> parts;  // by rank
    int arrived = 0;
  };
  struct Waiting {
    int rank;
    std::int64_t tag;
    Op op;
  };
  using Finished = std::vector<Op>;

  void fail_all(std::unique_lock<std::mutex> lock, const std::string& cause, CommError::Kind kind);
  static void finish(Finished parts, const std::exception_ptr& error);
  static void execute(Collective& collective);
  // True if every rank that could answer rank's message to or from peer has left.
  bool nobody_left(int rank, int peer) const;

  const std::vector<int> ranks_;
  const std::shared_ptr<Whereabouts> whereabouts_;
  mutable std::mutex mutex_;
  std::string poison_;  // empty while the hub works
  CommError::Kind poison_kind_ = CommError::Kind::stopped;
  std::vector<bool> left_;
  std::vector<std::uint64_t> next_;  // number of each rank's next collective
  std::map<std::uint64_t, Collective> collectives_;
  std::list<Waiting> sends_, receives_;  // in the order of posting
};

}  // namespace lockstep::detail
