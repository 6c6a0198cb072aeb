// How processes of one host hand their segments to one another: each has a socket without a file, from which
// a peer of the same user fetches a segment's descriptor when it first meets it.
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

// This process's end. It is never destroyed, and neither is its thread.
class SegmentServer {
 public:
  static SegmentServer& instance();

  const std::string& name() const { return name_; }  // of the socket
  // A segment beside the arena's, until it is withdrawn.
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

// A peer's end. Any thread.
class Peer {
 public:
  // One for each process, whichever groups it is met in. Throws Error where it cannot be reached: it is on
  // another host, or another user's.
  static std::shared_ptr<Peer> reach(const std::string& name);

  // Called now and then while the peer is waited for; throws to end that.
  using Check = std::function<void()>;
  // Throws Error where there is no such segment.
  std::shared_ptr<Segment> segment(std::uint64_t id, const Check& check);
  char* map(Place place, std::size_t bytes, const Check& check);
  bool has_ended();  // as far as its socket tells

 private:
  Peer(std::string name, control::Fd socket) : name_(std::move(name)), socket_(std::move(socket)) {}
  std::shared_ptr<Segment> fetch(std::uint64_t id, const Check& check);

  const std::string name_;
  std::timed_mutex mutex_;
  control::Fd socket_;  // none after it was left in the middle of an answer
  std::map<std::uint64_t, std::shared_ptr<Segment>> segments_;
};

// A thread that lives as long as the process does and holds locks for it: the kernel lets them go when the
// process ends, before it frees its memory.
class Holder {
 public:
  static void hold(pthread_mutex_t& lock);
  static void let_go(pthread_mutex_t& lock);
};

}  // namespace lockstep::shm
