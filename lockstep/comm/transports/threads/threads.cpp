#include <lockstep/comm/transports/threads/threads.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/c10d/engine_work.h>
#include <lockstep/comm/c10d/op_backend.h>
#include <lockstep/comm/c10d/op_transport.h>
#include <lockstep/comm/job/stop.h>

namespace lockstep::detail {
namespace {

class ThreadsBackend final : public OpBackend {
 public:
  ThreadsBackend(std::shared_ptr<Hub> hub, int rank, int size) : OpBackend(rank, size), hub_(std::move(hub)) {
    init();
  }
  ~ThreadsBackend() override { hub_->leave(rank_); }

  void interrupt(const std::string& cause, CommError::Kind kind) { hub_->poison(cause, kind); }
  bool is_awaited() const { return hub_->is_awaited(rank_); }
  void leave() { hub_->leave(rank_); }
  std::string absent(std::uint64_t sequence) const { return hub_->absent(sequence); }
  const std::string getBackendName() const override { return "threads"; }

 protected:
  WorkPtr post(Request request) override {
    auto work = c10::make_intrusive<EngineWork>(rank_, request.type, std::move(request.keep),
                                                std::move(request.results));
    work->prepare(std::move(request.finish), std::move(request.explain));
    request.op.done = [work](const std::exception_ptr& error, int source) { work->settle(error, source); };
    if (point_to_point(request.op.call.operation))
      hub_->post_point_to_point(rank_, request.tag, std::move(request.op));
    else
      hub_->post(rank_, std::move(request.op));
    return work;
  }

 private:
  const std::shared_ptr<Hub> hub_;
};

class ThreadsTransport final : public OpTransport<ThreadsBackend> {
 public:
  using OpTransport::OpTransport;
  std::string absent(std::uint64_t sequence) override { return own().absent(sequence); }
  bool is_awaited() override { return own().is_awaited(); }
};

}  // namespace

ThreadsJob::ThreadsJob(int size)
    : whereabouts_(std::make_shared<Whereabouts>(size)),
      store_(std::make_shared<control::LocalStore>()),
      stop_counts_(static_cast<std::size_t>(size)) {}

bool ThreadsJob::stop_requested(int rank) {
  std::lock_guard lock(mutex_);
  auto& count = stop_counts_[static_cast<std::size_t>(rank)];
  if (!stop_at_ && stop_signal_came()) stop_at_ = *std::max_element(stop_counts_.begin(), stop_counts_.end());
  if (stop_at_ && count >= *stop_at_) return true;
  ++count;
  return false;
}

std::shared_ptr<Hub> ThreadsJob::hub(const std::string& group, const std::vector<int>& ranks) {
  std::lock_guard lock(mutex_);
  auto& hub = hubs_[group];
  if (!hub) hub = std::make_shared<Hub>(ranks, whereabouts_);
  LOCKSTEP_ASSERT(hub->ranks() == ranks, "two groups have the same name");
  return hub;
}

std::unique_ptr<Transport> make_threads_transport(const TransportContext& context, ThreadsJob& job) {
  auto transport = std::make_unique<ThreadsTransport>(c10::make_intrusive<ThreadsBackend>(
      job.hub(context.group, context.ranks), context.rank, context.size()));
  if (ThreadsJob::wrap) return ThreadsJob::wrap(job, context, std::move(transport));
  return transport;
}

}  // namespace lockstep::detail
