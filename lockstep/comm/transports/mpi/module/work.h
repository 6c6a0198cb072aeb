// One group's communicator, its operations, and the MPI calls that make up an operation.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include <lockstep/comm/c10d/engine_work.h>
#include <lockstep/comm/transports/mpi/module/mpi_api.h>

namespace lockstep::detail {

class MpiWork;
using MpiWorkPtr = c10::intrusive_ptr<MpiWork>;

// A group's communicator and its unfinished operations.
class MpiLink {
 public:
  MpiLink(MPI_Comm the_comm, int our_rank, int ranks, int highest_tag, std::int64_t most_bytes);

  const MPI_Comm comm;
  const int rank;
  const int size;
  // For this transport's own messages; users have the tags below. One tag is enough: collectives start in the
  // same order on every rank, and messages with one tag between two ranks do not overtake each other.
  const int own_tag;
  const std::int64_t chunk;  // most bytes of one MPI call, whose counts are ints

  // Queues the work, or fails it at once if the link has failed.
  void submit(const MpiWorkPtr& work);
  void completed(const MpiWorkPtr& work);
  // Fails everything unfinished and everything that follows. The first cause is kept. Makes no MPI call.
  // Thread-safe.
  void fail(const std::string& cause);
  bool failed() const;
  bool drain(std::chrono::milliseconds timeout);  // false if unfinished works are left

  // Receives that wait, by tag, until a receive from any rank knows its sender: they would otherwise take
  // that message's further parts. Progress thread only.
  std::map<int, std::vector<MpiWorkPtr>> gates;

 private:
  mutable std::mutex mutex_;
  std::condition_variable drained_;
  std::exception_ptr failure_;
  std::unordered_set<MpiWorkPtr> pending_;
};

// The MPI calls of one stage of a work. Progress thread only.
class MpiPosts {
 public:
  struct Item {
    MPI_Request request = MPI_REQUEST_NULL;
    std::int64_t expected = -1;  // size of a receive in bytes
  };

  explicit MpiPosts(const MpiLink& the_link) : link(the_link) {}

  const MpiLink& link;
  std::vector<Item> items;

  MPI_Request* add(std::int64_t expected = -1);
  // One message per chunk; the other side splits in the same way, by its own size.
  void send(const void* data, std::int64_t bytes, int peer, int tag);
  void recv(void* data, std::int64_t bytes, int peer, int tag);
};

// Calls f(offset, count) for pieces of at most `most`; at least one call even if total is 0.
template <typename F>
void for_pieces(std::int64_t total, std::int64_t most, F f) {
  std::int64_t offset = 0;
  do {
    const std::int64_t count = std::min(most, total - offset);
    f(offset, static_cast<int>(count));
    offset += count;
  } while (offset < total);
}

class MpiWork final : public EngineWork {
 public:
  // Runs on the progress thread once the requests of the previous stage have completed.
  using Stage = std::function<void(MpiPosts&, MpiWork&)>;

  MpiWork(std::shared_ptr<MpiLink> on, c10d::OpType type, std::vector<at::Tensor> outputs,
          std::vector<at::Tensor> inputs, std::deque<Stage> all_stages);

  // Cancels a receive, which then ends with an error, unless its message has arrived. Other works end only
  // with their group.
  void abort() override;

  // Completes the work, with the source of what it received.
  void settle(std::exception_ptr error) noexcept { EngineWork::settle(std::move(error), source_); }

  // From here on, for the progress thread only. receive_tag and gated are set before submit.
  MpiLink& link() { return *link_; }
  void landed(const MPI_Status& status);
  int source() const { return source_; }
  std::deque<Stage> stages;
  int outstanding = 0;
  int receive_tag = -1;
  bool gated = false;  // True for a receive from any rank in more than one message

 private:
  const std::shared_ptr<MpiLink> link_;
  std::atomic<int> source_ = -1;
};

}  // namespace lockstep::detail
