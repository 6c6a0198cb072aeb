// SegmentServer: how processes of one host exchange their segments. Each has an abstract socket, from which a
// peer of the same user fetches a segment's descriptor the first time it needs it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/comm/transports/shm/engine/arena.h>

namespace lockstep::shm {

// This process's end. Neither it nor its thread is ever destroyed.
class SegmentServer {
 public:
  static SegmentServer& instance();

  const std::string& name() const { return name_; }  // name of the socket
  // Offers a segment that is not in the arena, until it is withdrawn.
  std::uint64_t offer(std::shared_ptr<Segment> segment);
  void withdraw(std::uint64_t id);

 private:
  SegmentServer();
  void serve();
  std::shared_ptr<Segment> find(std::uint64_t id);

  std::string name_;
  control::Fd listener_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<Segment>> offered_;
  std::uint64_t next_;
};

// A peer's end. Thread-safe.
class Peer {
 public:
  // One object per process, shared by all groups. Throws Error if the peer cannot be reached: it is on
  // another host, or belongs to another user.
  static std::shared_ptr<Peer> reach(const std::string& name);

  // Called now and then during a wait for the peer; throws to end it.
  using Check = std::function<void()>;
  // Throws Error if there is no such segment.
  std::shared_ptr<Segment> segment(std::uint64_t id, const Check& check);
  char* map(Place place, std::size_t bytes, const Check& check);
  bool has_ended();  // as far as its socket shows

 private:
  Peer(std::string name, control::Fd socket) : name_(std::move(name)), socket_(std::move(socket)) {}
  std::shared_ptr<Segment> fetch(std::uint64_t id, const Check& check);

  const std::string name_;
  std::timed_mutex mutex_;
  control::Fd socket_;  // empty after a call was abandoned in the middle of an answer
  std::map<std::uint64_t, std::shared_ptr<Segment>> segments_;
};

// A thread that lives as long as the process and holds locks for it: when the process ends, the kernel
// releases them before it frees the memory.
class Holder {
 public:
  static void hold(pthread_mutex_t& lock);
  static void let_go(pthread_mutex_t& lock);
};

}  // namespace lockstep::shm
