#include <lockstep/comm/transports/mpi/module/work.h>

#include <stdexcept>
#include <utility>

#include <lockstep/comm/transports/mpi/module/datatypes.h>
#include <lockstep/comm/transports/mpi/module/progress.h>

namespace lockstep::detail {

MpiLink::MpiLink(MPI_Comm the_comm, int our_rank, int ranks, int highest_tag, std::int64_t most_bytes)
    : comm(the_comm), rank(our_rank), size(ranks), own_tag(highest_tag), chunk(most_bytes) {}

void MpiLink::submit(const MpiWorkPtr& work) {
  std::exception_ptr failure;
  {
    // Held over both steps: fail() either sees the work in pending_, or its failure is found here.
    std::lock_guard lock(mutex_);
    failure = failure_;
    if (!failure) {
      pending_.insert(work);
      if (Progress::get().submit(work)) return;
      pending_.erase(work);
      failure = std::make_exception_ptr(std::runtime_error("MPI is shut down: the process is exiting"));
    }
  }
  work->settle(failure);
}

void MpiLink::completed(const MpiWorkPtr& work) {
  std::lock_guard lock(mutex_);
  pending_.erase(work);
  if (pending_.empty()) drained_.notify_all();
}

void MpiLink::fail(const std::string& cause) {
  std::unordered_set<MpiWorkPtr> works;
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::make_exception_ptr(std::runtime_error(cause));
    works.swap(pending_);
    drained_.notify_all();
  }
  for (const auto& work : works) work->settle(failure_);
}

bool MpiLink::failed() const {
  std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

bool MpiLink::drain(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return drained_.wait_for(lock, timeout, [&] { return pending_.empty(); });
}

MPI_Request* MpiPosts::add(std::int64_t expected) {
  items.push_back({.expected = expected});
  return &items.back().request;
}

void MpiPosts::send(const void* data, std::int64_t bytes, int peer, int tag) {
  for_pieces(bytes, link.chunk, [&](std::int64_t offset, int count) {
    check_mpi(
        MPI_Isend(static_cast<const char*>(data) + offset, count, MPI_BYTE, peer, tag, link.comm, add()),
        "MPI_Isend");
  });
}

void MpiPosts::recv(void* data, std::int64_t bytes, int peer, int tag) {
  for_pieces(bytes, link.chunk, [&](std::int64_t offset, int count) {
    check_mpi(MPI_Irecv(static_cast<char*>(data) + offset, count, MPI_BYTE, peer, tag, link.comm, add(count)),
              "MPI_Irecv");
  });
}

MpiWork::MpiWork(std::shared_ptr<MpiLink> on, c10d::OpType type, std::vector<at::Tensor> outputs,
                 std::vector<at::Tensor> inputs, std::deque<Stage> all_stages)
    : EngineWork(on->rank, type, std::move(inputs), std::move(outputs)),
      stages(std::move(all_stages)),
      link_(std::move(on)) {}

void MpiWork::abort() {
  TORCH_CHECK(receive_tag >= 0, "only a receive can be cancelled");
  auto self = c10::intrusive_ptr<MpiWork>::unsafe_reclaim_from_nonowning(this);
  Progress::get().call([self] { Progress::get().cancel(self); });
}

void MpiWork::landed(const MPI_Status& status) {
  if (receive_tag >= 0) source_ = status.MPI_SOURCE;
}

}  // namespace lockstep::detail
