#include <lockstep/comm/transports/shm/engine/segment_server.h>

#include <poll.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <cerrno>
#include <condition_variable>
#include <list>
#include <set>
#include <thread>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/quiet_threads.h>
#include <lockstep/base/start_thread.h>
#include <lockstep/comm/transports/shm/engine/barrier.h>
#include <lockstep/comm/transports/shm/engine/fork.h>

namespace lockstep::shm {
namespace {

// Numbers of offered segments start here; the arena's start at 1.
constexpr std::uint64_t kOffered = std::uint64_t{1} << 62;
constexpr std::chrono::milliseconds kCheckInterval(20);  // between two checks
constexpr std::chrono::milliseconds kPatience(1000);     // with a peer that does not read

struct Request {
  std::uint64_t id = 0;
};
struct Reply {
  std::uint64_t size = 0;     // 0: no such segment
  std::uint64_t retired = 0;  // number of ids that follow, of segments that no longer exist
};

using Check = Peer::Check;

void wait_for(int fd, short events, const Check& check) {
  pollfd polled{fd, events, 0};
  while (::poll(&polled, 1, static_cast<int>(kCheckInterval.count())) <= 0) check();
}

void send_all(int fd, const void* data, std::size_t bytes, const Check& check) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto sent = ::send(fd, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) throw Error("a process of this host has ended");
    if (sent < 0) {
      wait_for(fd, POLLOUT, check);
      continue;
    }
    at += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
}

control::Fd receive_all(int fd, void* data, std::size_t bytes, const Check& check) {
  control::Fd descriptor;
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    auto received = control::receive_fd(fd, {at, bytes});
    if (!received) {
      wait_for(fd, POLLIN, check);
      continue;
    }
    if (received->size == 0) throw Error("a process of this host has ended");
    if (received->fd) descriptor = std::move(received->fd);
    at += received->size;
    bytes -= received->size;
  }
  return descriptor;
}

}  // namespace

SegmentServer& SegmentServer::instance() {
  return of_this_process<SegmentServer>([] { return new SegmentServer; });
}

SegmentServer::SegmentServer() : next_(kOffered) {
  unsigned char random[16];
  if (::getrandom(random, sizeof random, 0) != sizeof random)
    throw Error("cannot create the shared memory socket: getrandom failed");
  name_ = "lockstep/shm/";
  for (auto byte : random) name_ += fmt::format("{:02x}", byte);
  auto listener = control::listen_local(name_);
  if (!listener) throw Error("cannot create the shared memory socket");
  listener_ = std::move(*listener);
  const detail::QuietThreads quiet;
  detail::start_thread("shared memory", [this] { serve(); }).detach();
}

std::uint64_t SegmentServer::offer(std::shared_ptr<Segment> segment) {
  std::lock_guard lock(mutex_);
  offered_[next_] = std::move(segment);
  return next_++;
}

void SegmentServer::withdraw(std::uint64_t id) {
  std::lock_guard lock(mutex_);
  offered_.erase(id);
}

std::shared_ptr<Segment> SegmentServer::find(std::uint64_t id) {
  if (id < kOffered) return Arena::instance().segment(id);
  std::lock_guard lock(mutex_);
  auto found = offered_.find(id);
  return found == offered_.end() ? nullptr : found->second;
}

void SegmentServer::serve() {
  struct Caller {
    control::Fd fd;
    std::string in = {};
    std::set<std::uint64_t> given = {};
  };
  std::list<Caller> callers;
  auto answer = [&](Caller& caller, std::uint64_t id) {
    auto check = [until = Clock::now() + kPatience] {
      if (Clock::now() >= until) throw Error("the peer does not read from its socket");
    };
    std::vector<std::uint64_t> retired;
    std::erase_if(caller.given, [&](auto each) {
      const bool gone = Arena::instance().segment(each) == nullptr;
      if (gone) retired.push_back(each);
      return gone;
    });
    const auto segment = find(id);
    const Reply reply{segment ? segment->size() : 0, retired.size()};
    if (segment) {
      if (!control::send_with_fd(caller.fd.get(), {reinterpret_cast<const char*>(&reply), sizeof reply},
                                 segment->fd()))
        throw Error("the peer does not read from its socket");
      if (id < kOffered) caller.given.insert(id);
    } else {
      send_all(caller.fd.get(), &reply, sizeof reply, check);
    }
    send_all(caller.fd.get(), retired.data(), retired.size() * sizeof retired[0], check);
  };
  auto hear = [&](Caller& caller) {
    char bytes[512];
    for (;;) {
      const auto n = ::recv(caller.fd.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      if (n <= 0) return false;
      caller.in.append(bytes, static_cast<std::size_t>(n));
      while (caller.in.size() >= sizeof(Request)) {
        Request request;
        caller.in.copy(reinterpret_cast<char*>(&request), sizeof request);
        caller.in.erase(0, sizeof request);
        answer(caller, request.id);
      }
    }
  };
  for (;;) {
    std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
    for (const auto& caller : callers) polled.push_back({caller.fd.get(), POLLIN, 0});
    if (::poll(polled.data(), polled.size(), -1) < 0) continue;
    std::size_t at = 1;
    for (auto caller = callers.begin(); caller != callers.end();) {
      bool stays = true;
      try {
        if (polled[at++].revents != 0) stays = hear(*caller);
      } catch (const std::exception&) {  // affects only that peer
        stays = false;
      }
      caller = stays ? std::next(caller) : callers.erase(caller);
    }
    if (polled[0].revents == 0) continue;
    while (auto socket = control::accept_local(listener_.get()))
      if (control::is_own(socket->get())) callers.push_back({std::move(*socket)});
    if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

namespace {

control::Fd call(const std::string& name) {
  auto socket = control::connect_local(name);
  if (!socket || !control::is_own(socket->get()))
    throw Error(
        "cannot reach a rank through shared memory: it is on another host, or belongs to another user");
  return std::move(*socket);
}

}  // namespace

std::shared_ptr<Peer> Peer::reach(const std::string& name) {
  static std::mutex mutex;
  static auto* known = new std::map<std::string, std::weak_ptr<Peer>>;
  std::lock_guard lock(mutex);
  std::erase_if(*known, [](const auto& each) { return each.second.expired(); });
  if (auto found = known->find(name); found != known->end())
    if (auto peer = found->second.lock()) return peer;
  std::shared_ptr<Peer> peer(new Peer(name, call(name)));
  (*known)[name] = peer;
  return peer;
}

std::shared_ptr<Segment> Peer::segment(std::uint64_t id, const Check& check) {
  std::unique_lock lock(mutex_, std::defer_lock);
  while (!lock.try_lock_for(kCheckInterval)) check();
  if (id >= kOffered) return fetch(id, check);  // the requester owns it
  auto& known = segments_[id];
  if (!known) known = fetch(id, check);
  return known;
}

char* Peer::map(Place place, std::size_t bytes, const Check& check) {
  auto found = segment(place.segment, check);
  if (place.offset > found->size() || bytes > found->size() - place.offset)
    throw Error("a rank sent an address outside its shared memory: do all ranks run the same build?");
  return found->data() + place.offset;
}

bool Peer::has_ended() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !socket_) return false;  // the holder of the lock will notice
  pollfd polled{socket_.get(), POLLRDHUP, 0};
  return ::poll(&polled, 1, 0) > 0;
}

std::shared_ptr<Segment> Peer::fetch(std::uint64_t id, const Check& check) {
  if (!socket_) socket_ = call(name_);
  Reply reply;
  control::Fd descriptor;
  try {
    const Request request{id};
    send_all(socket_.get(), &request, sizeof request, check);
    descriptor = receive_all(socket_.get(), &reply, sizeof reply, check);
    for (std::uint64_t i = 0; i < reply.retired; ++i) {
      std::uint64_t retired = 0;
      receive_all(socket_.get(), &retired, sizeof retired, check);
      segments_.erase(retired);
    }
  } catch (...) {
    socket_.reset();
    throw;
  }
  if (reply.size == 0) throw Error("a rank sent the id of a shared memory segment that does not exist");
  if (!descriptor)
    throw Error("its descriptor was lost because this process has too many open files: raise `ulimit -n`");
  return Segment::map(std::move(descriptor), static_cast<std::size_t>(reply.size));
}

namespace {

class Keeper {
 public:
  static Keeper& instance() {
    return of_this_process<Keeper>([] { return new Keeper; });
  }
  void run(const std::function<void()>& task) {
    std::unique_lock turn(turns_);
    std::unique_lock lock(mutex_);
    task_ = &task;
    changed_.notify_all();
    changed_.wait(lock, [&] { return task_ == nullptr; });
  }

 private:
  Keeper() {
    const detail::QuietThreads quiet;
    detail::start_thread("shared memory", [this] {
      std::unique_lock lock(mutex_);
      for (;;) {
        changed_.wait(lock, [&] { return task_ != nullptr; });
        // Release our own lock first: other code takes it while it holds the tasks' locks.
        lock.unlock();
        (*task_)();
        lock.lock();
        task_ = nullptr;
        changed_.notify_all();
      }
    }).detach();
  }
  std::mutex turns_, mutex_;
  std::condition_variable changed_;
  const std::function<void()>* task_ = nullptr;
};

}  // namespace

void Holder::hold(pthread_mutex_t& lock) {
  Keeper::instance().run([&] { ::pthread_mutex_lock(&lock); });
}

void Holder::let_go(pthread_mutex_t& lock) {
  Keeper::instance().run([&] { ::pthread_mutex_unlock(&lock); });
}

}  // namespace lockstep::shm
