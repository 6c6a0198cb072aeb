#include "support/fake_nccl.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/comm/c10d/engine_work.h>
#include <lockstep/comm/group/connect_barrier.h>
#include <lockstep/comm/transports/nccl/rules.h>
#include <lockstep/comm/transports/threads/threads.h>

namespace lockstep::testing {
namespace {

using detail::EngineWork;
using detail::Transport;
using detail::TransportContext;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

struct Message {
  bool sends;
  at::Tensor tensor;
  c10::intrusive_ptr<EngineWork> work;
};

std::exception_ptr error_of_text(const std::string& text) {
  return std::make_exception_ptr(std::runtime_error(text));
}

// Shared state of a group's ranks.
class Wires {
 public:
  explicit Wires(int size) : size_(size), broken_(static_cast<std::size_t>(size)) {}

  // Inside a rank's first call: waits until all members have made theirs. Nothing else ends the wait.
  void make_communicator(int rank, const std::set<int>& members) {
    std::unique_lock lock(mutex_);
    auto& come = communicators_[members];
    come.insert(rank);
    changed_.notify_all();
    changed_.wait(lock, [&] { return come == members; });
  }
  void make_communicator_of_all(int rank) {
    std::set<int> all;
    for (int r = 0; r < size_; ++r) all.insert(r);
    make_communicator(rank, all);
  }
  // Inside the first batch with data between these two: waits until both are there, or this rank is asked to
  // stop.
  void connect(int rank, int peer) {
    std::unique_lock lock(mutex_);
    auto& come = connections_[std::minmax(rank, peer)];
    come.insert(rank);
    changed_.notify_all();
    changed_.wait(lock, [&] { return come.size() == 2 || !broken(rank).empty(); });
    if (!broken(rank).empty()) throw std::runtime_error(broken(rank));
  }

  // One after another on the stream of these two.
  void post(int rank, int peer, Message message) {
    std::lock_guard lock(mutex_);
    if (!broken(rank).empty()) return message.work->settle(error_of_text(broken(rank)));
    auto& sides = streams_[std::minmax(rank, peer)];
    sides[rank > peer].push_back(std::move(message));
    while (!sides[0].empty() && !sides[1].empty()) {
      auto &a = sides[0].front(), &b = sides[1].front();
      if (a.sends == b.sends) return;  // Each waits for the other, forever.
      carry(a.sends ? a : b, a.sends ? b : a);
      sides[0].pop_front();
      sides[1].pop_front();
    }
  }
  // In a batch only messages in one direction are ordered.
  void post_batched(int rank, int peer, Message message) {
    std::lock_guard lock(mutex_);
    const auto way = message.sends ? std::pair(rank, peer) : std::pair(peer, rank);
    auto& [sent, received] = batched_[way];
    (message.sends ? sent : received).push_back(std::move(message));
    for (; !sent.empty() && !received.empty(); sent.pop_front(), received.pop_front())
      carry(sent.front(), received.front());
  }

  // ncclCommAbort: of this rank's side only.
  void abort(int rank, const std::string& cause) {
    std::lock_guard lock(mutex_);
    if (!broken(rank).empty()) return;
    broken(rank) = cause;
    for (auto& [pair, sides] : streams_) {
      if (pair.first != rank && pair.second != rank) continue;
      auto& own = sides[rank == pair.second];
      for (auto& message : own) message.work->settle(error_of_text(cause));
      own.clear();
    }
    changed_.notify_all();
  }

 private:
  std::string& broken(int rank) { return broken_[static_cast<std::size_t>(rank)]; }
  static void carry(Message& from, Message& to) {
    at::NoGradGuard no_grad;
    const bool fits = from.tensor.nbytes() == to.tensor.nbytes();
    if (fits) to.tensor.view(-1).view(at::kByte).copy_(from.tensor.view(-1).view(at::kByte));
    const auto error = fits ? nullptr : error_of_text("messages of different sizes");
    from.work->settle(error);
    to.work->settle(error);
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> broken_;                           // By rank: the reason.
  std::map<std::set<int>, std::set<int>> communicators_;      // The ranks that have called to create it.
  std::map<std::pair<int, int>, std::set<int>> connections_;  // Likewise.
  std::map<std::pair<int, int>, std::array<std::deque<Message>, 2>> streams_;
  std::map<std::pair<int, int>, std::pair<std::deque<Message>, std::deque<Message>>> batched_;
};

// A rank's stream for collectives and batches: each starts when the previous one is done.
class Stream {
 public:
  using Start = std::function<std::vector<WorkPtr>()>;
  Stream() : thread_([this] { run(); }) {}
  ~Stream() {
    stop("the communicator is gone");
    thread_.join();
  }

  c10::intrusive_ptr<EngineWork> put(int rank, c10d::OpType type, Tensors tensors, Start start) {
    auto work = c10::make_intrusive<EngineWork>(rank, type, std::move(tensors), Tensors());
    {
      std::lock_guard lock(mutex_);
      if (cause_.empty()) {
        tasks_.push_back({std::move(start), work});
        given_.notify_one();
        return work;
      }
    }
    work->settle(error_of_text(cause_));
    return work;
  }
  void stop(const std::string& cause) {
    std::lock_guard lock(mutex_);
    if (cause_.empty()) cause_ = cause;
    given_.notify_one();
  }

 private:
  struct Task {
    Start start;
    c10::intrusive_ptr<EngineWork> work;
  };

  bool is_stopped() {
    std::lock_guard lock(mutex_);
    return !cause_.empty();
  }
  // Work that was started and aborted is not undone.
  std::exception_ptr do_all(const Start& start) {
    at::AutoDispatchBelowAutograd below_autograd;
    at::NoGradGuard no_grad;
    const detail::CallScope none(nullptr);  // NCCL sees tensors only.
    try {
      for (const auto& each : start()) {
        while (!each->isCompleted()) {
          if (is_stopped()) return error_of_text(cause_);
          std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
        if (each->exception()) return each->exception();
      }
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      given_.wait(lock, [&] { return !tasks_.empty() || !cause_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      const bool stopped = !cause_.empty();
      lock.unlock();
      task.work->settle(stopped ? error_of_text(cause_) : do_all(task.start));
      task = {};
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable given_;
  std::deque<Task> tasks_;
  std::string cause_;  // Why it was stopped.
  std::thread thread_;
};

class Backend final : public c10d::Backend {
 public:
  Backend(std::unique_ptr<Transport> inner, std::shared_ptr<Wires> wires, int rank, int size)
      : c10d::Backend(rank, size), inner_(std::move(inner)), wires_(std::move(wires)) {}

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return collective(tensors, [=, this]() mutable { return own().allreduce(tensors, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return collective(tensors, [=, this]() mutable { return own().reduce(tensors, options); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return collective(tensors, [=, this]() mutable { return own().broadcast(tensors, options); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return collective({out, in}, [=, this]() mutable { return own()._allgather_base(out, in, options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& options) override {
    return collective({out, in},
                      [=, this]() mutable { return own()._reduce_scatter_base(out, in, options); });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<std::int64_t>& from,
                        std::vector<std::int64_t>& to, const c10d::AllToAllOptions& options) override {
    return collective({out, in},
                      [=, this]() mutable { return own().alltoall_base(out, in, from, to, options); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return collective({}, [=, this] { return own().barrier(options); });
  }
  WorkPtr send(Tensors& tensors, int peer, int) override { return message(true, tensors[0], peer); }
  WorkPtr recv(Tensors& tensors, int peer, int) override { return message(false, tensors[0], peer); }

  void startCoalescing() override {
    TORCH_CHECK(!coalescing_, "a batch was begun within another");
    coalescing_ = true;
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalescing_, "a batch was ended that was not begun");
    coalescing_ = false;
    auto batch = std::exchange(batch_, {});
    const auto peers = std::exchange(batch_peers_, {});
    if (batch.empty()) return nullptr;
    wires_->make_communicator_of_all(rank_);
    for (const int peer : peers) wires_->connect(rank_, peer);
    return stream_.put(rank_, c10d::OpType::COALESCED, {}, [batch = std::move(batch)] {
      std::vector<WorkPtr> works;
      for (const auto& each : batch) works.push_back(each());
      return works;
    });
  }

  void abort_with(const std::string& cause) {
    stream_.stop(cause);
    wires_->abort(rank_, cause);
  }
  Transport& inner() { return *inner_; }

 private:
  using Call = std::function<WorkPtr()>;
  c10d::Backend& own() { return inner_->backend(); }

  static void check(const Tensors& tensors) {
    static const std::set<at::ScalarType> known = {at::kChar,  at::kByte,   at::kBool,
                                                   at::kInt,   at::kLong,   at::kHalf,
                                                   at::kFloat, at::kDouble, at::kBFloat16};
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
      TORCH_CHECK(known.contains(tensor.scalar_type()), "NCCL has no ", c10::toString(tensor.scalar_type()));
    }
  }
  // The result of a call within a batch cannot be waited for.
  WorkPtr later(c10d::OpType type, Call call) {
    batch_.push_back(std::move(call));
    return c10::make_intrusive<EngineWork>(rank_, type, Tensors(), Tensors());
  }
  WorkPtr collective(const Tensors& tensors, Call call) {
    check(tensors);
    if (coalescing_) return later(c10d::OpType::UNKNOWN, std::move(call));
    wires_->make_communicator_of_all(rank_);
    return stream_.put(rank_, c10d::OpType::UNKNOWN, tensors,
                       [call = std::move(call)] { return std::vector<WorkPtr>{call()}; });
  }
  WorkPtr message(bool sends, const at::Tensor& tensor, int peer) {
    check({tensor});
    const auto type = sends ? c10d::OpType::SEND : c10d::OpType::RECV;
    auto work = c10::make_intrusive<EngineWork>(rank_, type, Tensors{tensor}, Tensors());
    if (coalescing_) {
      batch_peers_.insert(peer);
      return later(type, [=, this]() -> WorkPtr {
        wires_->post_batched(rank_, peer, {sends, tensor, work});
        return work;
      });
    }
    wires_->make_communicator(rank_, {rank_, peer});
    wires_->post(rank_, peer, {sends, tensor, work});
    return work;
  }

  const std::unique_ptr<Transport> inner_;
  const std::shared_ptr<Wires> wires_;
  bool coalescing_ = false;
  std::vector<Call> batch_;
  std::set<int> batch_peers_;
  Stream stream_;
};

class Made final : public Transport {
 public:
  Made(const TransportContext& context, std::unique_ptr<Transport> inner, std::shared_ptr<Wires> wires)
      : backend_(
            c10::make_intrusive<Backend>(std::move(inner), std::move(wires), context.rank, context.size())),
        first_(context.store, context.rank, context.size()) {}

  Traits traits() const override { return detail::nccl_traits(); }
  bool reduces(Dtype dtype, ReduceOp op) const override { return detail::nccl_reduces(dtype, op); }
  c10d::Backend& backend() override { return *backend_; }
  detail::ConnectBarrier* connect_barrier(bool of_all) override {
    return backend_->getSize() == 1 || (of_all && opened_) ? nullptr : &first_;
  }
  void open() override {
    Tensors nothing{at::zeros({1})};
    backend_->allreduce(nothing, {})->wait();
    opened_ = true;
  }
  void interrupt(const std::string& cause, CommError::Kind) noexcept override { backend_->abort_with(cause); }
  void leave() noexcept override { backend_->inner().leave(); }

 private:
  const c10::intrusive_ptr<Backend> backend_;
  detail::ConnectBarrier first_;
  bool opened_ = false;
};

}  // namespace

void use_fake_nccl() {
  struct Jobs {
    std::mutex mutex;
    // Keyed by the job's store, which is kept alive: no other job gets its address.
    std::map<std::pair<std::shared_ptr<void>, std::string>, std::shared_ptr<Wires>> groups;
  };
  detail::ThreadsJob::wrap = [jobs = std::make_shared<Jobs>()](detail::ThreadsJob& job,
                                                               const TransportContext& context,
                                                               std::unique_ptr<Transport> inner) {
    std::lock_guard lock(jobs->mutex);
    auto& wires = jobs->groups[{job.store(), context.group}];
    if (!wires) wires = std::make_shared<Wires>(context.size());
    return std::make_unique<Made>(context, std::move(inner), wires);
  };
}

}  // namespace lockstep::testing
