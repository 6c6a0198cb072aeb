// Messages: sends and receives of one group in shared memory. Each rank has a ring of short notes to each
// peer: "here is a message", "I have it". Data is used in place (in shared memory) or copied there once; the
// receiver takes it from there. A send is complete when its receiver has the data.
//
// A waiting thread polls the rings itself; a background thread handles messages that no thread waits for.
// Notes are taken out of the rings at once, so an unmatched message does not block others.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>

#include <lockstep/base/crew.h>
#include <lockstep/comm/transports/shm/engine/engine.h>

namespace lockstep::shm {

// The note that describes an operation; and the call at its other end, as far as a note describes it.
Note note_of(const Op& op, std::int64_t tag);
Call far_call(const Note& note, const Call& own, lockstep::Operation operation, int rank);

class Messages : public std::enable_shared_from_this<Messages> {
 public:
  struct Item {
    Op op;
    int peer = 0;
    std::int64_t tag = 0;
    Clock::time_point posted, deadline;
    char* copy = nullptr;  // of data to send that was not in shared memory
    bool settled = false;  // under the mutex
  };
  using ItemPtr = std::shared_ptr<Item>;

  // The barrier reports peers that are gone. keep: objects that must outlive this one. has_others: ranks that
  // do not take part in the barrier may also satisfy a receive from any rank.
  Messages(Barrier& barrier, Memory& memory, std::chrono::nanoseconds spin, std::shared_ptr<void> keep,
           bool has_others = false);

  // peer: a rank or kAnySource. Never blocks.
  ItemPtr post(Op op, int peer, std::int64_t tag, std::chrono::nanoseconds timeout);
  void wait(Item& item, Clock::time_point deadline);
  // Cancels a receive, which then never completes. Returns false if its message has arrived or it has failed.
  bool withdraw(const ItemPtr& item);
  // Fails every message with this cause, now and later.
  void interrupt(const std::string& cause);
  // The same, but first notifies the senders of messages that this rank has received, within a time limit.
  void close();
  bool wait_for_threads(std::chrono::milliseconds limit) const { return crew_.wait(limit); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Arrived {
    Note note;
    int from = 0;
  };
  // Notes for one rank while its ring is full. Replies go first, because peers wait for them.
  struct Outbox {
    std::deque<Note> replies, messages;
    bool empty() const { return replies.empty() && messages.empty(); }
  };
  struct Settled {
    ItemPtr item;
    std::exception_ptr error;
    int source = -1;
  };

  void look(Lock& lock);
  void take_notes();
  void receive(const Note& note, int from);
  void deliver(const ItemPtr& item, const Note& note, int from);
  void acknowledged(const Note& note, int from);
  void put(int to, const Note& note);
  void flush();
  void expire();
  std::exception_ptr trouble() const;
  void take_leave(Lock& lock);
  void fail_all(const std::exception_ptr& error);
  void settle(ItemPtr item, std::exception_ptr error, int source = -1);
  void tell_settled(Lock& lock);
  void watch();
  bool idle() const;
  bool neglected() const { return !idle() && waiting_ == 0; }  // only the background thread handles them

  Barrier& barrier_;
  Memory& memory_;
  const std::chrono::nanoseconds spin_;
  const std::shared_ptr<void> keep_;
  const bool has_others_;

  std::mutex mutex_;
  std::condition_variable posted_;
  std::map<std::uint64_t, ItemPtr> sends_;  // until acknowledged
  // By tag, in the order of posting and of arrival.
  std::map<std::int64_t, std::list<ItemPtr>> receives_;
  std::map<std::int64_t, std::list<Arrived>> arrived_;  // without a matching receive
  std::vector<Outbox> outbox_;                          // by rank
  std::vector<Settled> settled_;                        // callbacks to run once the lock is released
  std::exception_ptr broken_;
  std::uint64_t next_id_ = 1;
  Clock::time_point next_expiry_{}, last_use_{};
  int waiting_ = 0;
  bool closed_ = false, has_thread_ = false, asleep_ = false;
  detail::Crew crew_;
};

}  // namespace lockstep::shm
