// Mail: sends and receives of CUDA memory. Host memory carries only a letter, which contains the location of
// the data and the event that signals that it is there. The receiver copies the data after that event and
// answers with an event of its own. Does not use LibTorch.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include <lockstep/comm/transports/cuda_ipc/engine/peers.h>
#include <lockstep/comm/transports/shm/engine/messages.h>

namespace lockstep::cuda_ipc {

class Mail : public std::enable_shared_from_this<Mail> {
 public:
  // What a caller can wait for: the letter and, for a send, its answer.
  struct Item {
    shm::Messages::ItemPtr letter, answer;
    enum Fate { kUnknown, kTaken, kFailed };
    std::atomic<Fate> fate = kUnknown;  // of a letter that was sent; a failed letter gets no answer
  };
  using ItemPtr = std::shared_ptr<Item>;

  Mail(std::shared_ptr<shm::Messages> messages, std::shared_ptr<Peers> peers);

  // op.order is an Order. peer: a rank or kAnySource. Never waits for a peer.
  ItemPtr post(Op op, int peer, std::int64_t tag, std::chrono::nanoseconds timeout);
  void wait(Item& item, Clock::time_point deadline);
  void interrupt(const std::string& cause);
  // Closes after notifying the senders of messages that this rank has received, within a time limit.
  void close();
  bool wait_for_threads(std::chrono::milliseconds limit) const;

 private:
  struct Letter;
  struct Sent;
  struct Received;
  ItemPtr send(Op op, int peer, std::int64_t tag, std::chrono::nanoseconds timeout);
  ItemPtr receive(Op op, int peer, std::int64_t tag, std::chrono::nanoseconds timeout);
  void take(Received& received, int source);
  void answered(Sent& sent);
  void answer(const Letter& letter, int source, const Call& call, std::chrono::nanoseconds timeout);

  const std::shared_ptr<shm::Messages> messages_;
  const std::shared_ptr<Peers> peers_;
  Track& track_;
  Arena& arena_;
  std::atomic<std::uint64_t> next_id_ = 0;
  std::atomic<int> unheard_ = 0;  // number of answers still expected
  std::atomic<bool> broken_ = false;
};

}  // namespace lockstep::cuda_ipc
