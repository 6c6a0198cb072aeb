// C10dLinks: links over a Transport, gloo or MPI. They use only its send, recv, recvAnysource, interrupt and
// lost_peers.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/comm/c10d/transport.h>
#include <lockstep/comm/transports/hierarchy/engine/links.h>

namespace lockstep::hierarchy {

class C10dLinks final : public Links {
 public:
  // far: the ranks of other hosts.
  C10dLinks(std::unique_ptr<detail::Transport> transport, std::vector<int> far);
  ~C10dLinks() override;

  TransferPtr send(int to, const void* data, std::size_t bytes, int tag) override;
  TransferPtr receive(int from, void* data, std::size_t bytes, int tag) override;
  TransferPtr receive_any(void* data, std::size_t bytes, int tag) override;
  int wait(Transfer& transfer, Clock::time_point deadline) override;
  void cancel(Transfer& transfer) override;
  std::exception_ptr lost(int rank) override;
  void interrupt(const std::string& cause) override;
  // Releases the engine once no thread is in it. Nothing works afterwards.
  void close();

 private:
  // A thread that waits in the engine.
  struct Waiter {
    c10d::Work* work;
    int peer;
    Clock::time_point deadline;
    std::exception_ptr trouble;  // why it was woken
  };
  class User;
  struct Under;

  template <typename Post>
  TransferPtr post(int peer, Post post);
  void wake(Waiter& waiter, std::exception_ptr trouble);
  void watch();
  [[noreturn]] void throw_cause(int peer, const std::string& text);

  std::unique_ptr<detail::Transport> transport_;
  const std::vector<int> far_;
  std::mutex post_mutex_;  // engines number the operations, and not in a thread-safe way
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Waiter*> waiters_;
  std::string cause_;  // empty while the links work
  int users_ = 0;
  bool closed_ = false, asleep_ = false;
  std::thread watcher_;
};

}  // namespace lockstep::hierarchy
