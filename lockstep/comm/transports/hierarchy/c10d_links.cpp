#include <lockstep/comm/transports/hierarchy/c10d_links.h>

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/base/quiet_threads.h>
#include <lockstep/base/start_thread.h>
#include <lockstep/comm/group/error_text.h>
#include <lockstep/comm/group/work_state.h>
#include <lockstep/comm/transports/shm/engine/barrier.h>

namespace lockstep::hierarchy {
namespace {

using std::chrono::milliseconds;

// The engine's own timeout. Lockstep enforces the deadlines, which do not run while this process is stopped.
constexpr milliseconds kEnginePatience = std::chrono::hours(30 * 24);
// Interval at which the watcher checks the waiters.
constexpr milliseconds kLinkLook(50);
// Number of checks that the watcher makes after the last wait: a new wait need not wake it then.
constexpr int kLinger = 20;

constexpr int kAnybody = -1;
constexpr const char* kCancelled = "it was cancelled";

std::exception_ptr lost_error(int rank) {
  return std::make_exception_ptr(shm::PeerLost(
      rank, fmt::format("rank {} has closed its connection: it has exited or left the job", rank)));
}

at::Tensor bytes_at(const void* data, std::size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)}, at::kByte);
}

}  // namespace

struct C10dLinks::Under final : Transfer {
  Under(c10::intrusive_ptr<c10d::Work> its_work, int its_peer) : work(std::move(its_work)), peer(its_peer) {}
  const c10::intrusive_ptr<c10d::Work> work;
  const int peer;
  bool cancelled = false;  // under the mutex
};

// Keeps the engine alive.
class C10dLinks::User {
 public:
  explicit User(C10dLinks& links) : links_(links) {
    std::lock_guard lock(links.mutex_);
    if (!links.cause_.empty()) throw shm::Interrupted(links.cause_);
    ++links.users_;
  }
  ~User() {
    std::lock_guard lock(links_.mutex_);
    if (--links_.users_ == 0) links_.changed_.notify_all();
  }
  User(const User&) = delete;
  User& operator=(const User&) = delete;

 private:
  C10dLinks& links_;
};

C10dLinks::C10dLinks(std::unique_ptr<detail::Transport> transport, std::vector<int> far)
    : transport_(std::move(transport)), far_(std::move(far)) {}

C10dLinks::~C10dLinks() { close(); }

void C10dLinks::throw_cause(int peer, const std::string& text) {
  std::lock_guard lock(mutex_);
  if (!cause_.empty()) throw shm::Interrupted(cause_);
  throw shm::PeerLost(peer, text);
}

template <typename Post>
Links::TransferPtr C10dLinks::post(int peer, Post post) {
  const User here(*this);
  try {
    std::lock_guard lock(post_mutex_);
    return std::make_unique<Under>(post(transport_->backend()), peer);
  } catch (const std::exception& error) {
    throw_cause(peer, fmt::format("rank {} cannot be reached: {}", peer, detail::plain_text(error)));
  }
}

Links::TransferPtr C10dLinks::send(int to, const void* data, std::size_t bytes, int tag) {
  return post(to, [&](c10d::Backend& engine) {
    std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
    return engine.send(tensors, to, tag);
  });
}

Links::TransferPtr C10dLinks::receive(int from, void* data, std::size_t bytes, int tag) {
  return post(from, [&](c10d::Backend& engine) {
    std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
    return engine.recv(tensors, from, tag);
  });
}

Links::TransferPtr C10dLinks::receive_any(void* data, std::size_t bytes, int tag) {
  return post(kAnybody, [&](c10d::Backend& engine) {
    std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
    return engine.recvAnysource(tensors, tag);
  });
}

std::exception_ptr C10dLinks::lost(int rank) {
  const User here(*this);
  const auto gone = transport_->lost_peers();
  auto is_gone = [&](int each) { return std::find(gone.begin(), gone.end(), each) != gone.end(); };
  if (rank >= 0 ? !is_gone(rank) : !std::all_of(far_.begin(), far_.end(), is_gone)) return nullptr;
  return lost_error(rank >= 0 ? rank : far_.front());
}

void C10dLinks::cancel(Transfer& transfer) {
  auto& under = static_cast<Under&>(transfer);
  std::lock_guard lock(mutex_);
  under.cancelled = true;
  for (Waiter* waiter : waiters_)
    if (waiter->work == under.work.get())
      wake(*waiter, std::make_exception_ptr(shm::Interrupted(kCancelled)));
}

int C10dLinks::wait(Transfer& transfer, Clock::time_point deadline) {
  auto& under = static_cast<Under&>(transfer);
  const User here(*this);
  Waiter waiter{under.work.get(), under.peer, deadline, nullptr};
  std::list<Waiter*>::iterator place;
  {
    std::lock_guard lock(mutex_);
    if (!cause_.empty()) throw shm::Interrupted(cause_);
    if (under.cancelled) throw shm::Interrupted(kCancelled);
    place = waiters_.insert(waiters_.end(), &waiter);
    if (!watcher_.joinable()) {
      const detail::QuietThreads quiet;
      watcher_ = detail::start_thread("messages between hosts", [this] { watch(); });
    } else if (asleep_) {
      changed_.notify_all();
    }
  }
  bool complete = false;
  std::string text;
  try {
    complete = under.work->wait(kEnginePatience);
  } catch (const std::exception& error) {
    text = detail::plain_text(error);
  }
  {
    std::lock_guard lock(mutex_);
    waiters_.erase(place);
    if (complete) return under.peer >= 0 ? under.peer : under.work->sourceRank();
    if (waiter.trouble) std::rethrow_exception(waiter.trouble);
  }
  throw_cause(under.peer, fmt::format("the connection to rank {} was lost{}", under.peer,
                                      text.empty() ? "" : ": " + text));
}

// Call with the mutex held.
void C10dLinks::wake(Waiter& waiter, std::exception_ptr trouble) {
  if (waiter.trouble) return;
  waiter.trouble = std::move(trouble);
  try {
    waiter.work->abort();
  } catch (const std::exception&) {  // MPI's works end only with the whole engine
    transport_->interrupt("an operation has failed", CommError::Kind::stopped);
  }
}

void C10dLinks::interrupt(const std::string& cause) {
  detail::Transport* transport = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!cause_.empty() || closed_) return;
    cause_ = cause;
    transport = transport_.get();
    ++users_;
  }
  transport->interrupt(cause, CommError::Kind::stopped);
  std::lock_guard lock(mutex_);
  // A half-written send does not wake when its connection ends.
  for (Waiter* waiter : waiters_) wake(*waiter, std::make_exception_ptr(shm::Interrupted(cause_)));
  --users_;
  changed_.notify_all();
}

// Wakes waiters whose deadline has passed or whose peer is gone.
void C10dLinks::watch() {
  std::unique_lock lock(mutex_);
  int idle = 0;
  while (!closed_) {
    if (waiters_.empty() && ++idle > kLinger) {
      asleep_ = true;
      changed_.wait(lock, [&] { return closed_ || !waiters_.empty(); });
      asleep_ = false;
    }
    if (!waiters_.empty()) idle = 0;
    changed_.wait_for(lock, kLinkLook);
    if (closed_ || waiters_.empty()) continue;
    const auto now = Clock::now();
    const auto lost = transport_->lost_peers();
    for (Waiter* waiter : waiters_) {
      const int peer = waiter->peer;
      if (now >= waiter->deadline)
        wake(*waiter, std::make_exception_ptr(shm::TimedOut("the deadline has passed")));
      else if (std::find(lost.begin(), lost.end(), peer) != lost.end())
        wake(*waiter, lost_error(peer));
    }
  }
}

void C10dLinks::close() {
  std::unique_lock lock(mutex_);
  if (cause_.empty()) cause_ = "this rank has left the group";
  const bool first = !std::exchange(closed_, true);
  for (Waiter* waiter : waiters_) wake(*waiter, std::make_exception_ptr(shm::Interrupted(cause_)));
  changed_.notify_all();
  changed_.wait(lock, [&] { return users_ == 0; });
  if (!first) return;
  lock.unlock();
  if (watcher_.joinable()) watcher_.join();
  transport_.reset();
}

}  // namespace lockstep::hierarchy
