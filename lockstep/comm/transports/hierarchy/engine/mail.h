// Mail: sends and receives of a group that spans hosts. Within a host they use shared memory; between hosts
// they use links, where a note before each message describes it. From the first message between hosts on, a
// thread listens for notes. So either path can satisfy a receive from any rank, and a message that does not
// match its receive is an error at both ends. A send is complete when its data was received (within a host),
// or is being sent to a matching receive.
#pragma once

#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <lockstep/comm/engine/op.h>
#include <lockstep/comm/transports/hierarchy/engine/hosts.h>
#include <lockstep/comm/transports/hierarchy/engine/links.h>
#include <lockstep/comm/transports/shm/engine/messages.h>

namespace lockstep::hierarchy {

using detail::Op;

class Mail : public std::enable_shared_from_this<Mail> {
 public:
  struct Item {
    Op op;
    int peer = 0;
    std::int64_t tag = 0;
    Clock::time_point deadline;
    shm::Messages::ItemPtr near;  // the request to shared memory
    bool only_near = false;
    // Under the mutex.
    std::unique_ptr<shm::Note> note;  // leaked after a failure, because links may still read it
    std::uint64_t id = 0;
    Links::TransferPtr told, data;
    int source = -1;
    std::exception_ptr refused;
    bool claimed = false, settled = false;  // a thread waits for its transfers; it has ended
  };
  using ItemPtr = std::shared_ptr<Item>;

  // inside: null if this rank is alone on its host. barrier: that of the ranks of this host.
  Mail(Hosts hosts, std::shared_ptr<shm::Messages> inside, const shm::Barrier* barrier,
       std::shared_ptr<Links> links);
  ~Mail();

  // op.call.root is the peer, or kAnySource. Never blocks.
  ItemPtr post(Op op, std::int64_t tag, std::chrono::nanoseconds timeout);
  // The waiting thread does the work: no other thread checks whether a transfer is complete.
  void wait(Item& item, Clock::time_point deadline);
  // Fails every message with this cause, now and later. The caller interrupts the links.
  void interrupt(const std::string& cause);
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Arrived {
    shm::Note note;
    int from = 0;
  };
  void post_near(const ItemPtr& item, int place, std::chrono::nanoseconds timeout);
  void send_far(Lock& lock, const ItemPtr& item);
  void receive_far(Lock& lock, const ItemPtr& item);
  void listen();
  void hear(Lock& lock, const shm::Note& note, int from);
  void refuse(Lock& lock, const Item& item, const shm::Note& note, int from) noexcept;
  void take(Lock& lock, const ItemPtr& item, const shm::Note& note, int from);
  void finish(Lock& lock, Item& item, Clock::time_point deadline);
  std::exception_ptr lost(const Item& item) const;
  void settle(Lock& lock, Item& item, const std::exception_ptr& error, int source = -1);
  void fail_all(Lock& lock, const std::exception_ptr& error);

  const Hosts hosts_;
  const std::shared_ptr<shm::Messages> inside_;
  const shm::Barrier* const barrier_;
  const std::shared_ptr<Links> links_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<ItemPtr> receives_;                             // unmatched receives, in the order of posting
  std::list<Arrived> arrived_;                              // messages without a matching receive
  std::map<std::pair<int, std::uint64_t>, ItemPtr> sends_;  // by receiver, and number at the receiver
  std::vector<std::uint64_t> next_id_;                      // for each rank
  std::exception_ptr broken_;
  Links::TransferPtr hearing_;
  std::thread listener_;
  bool closed_ = false;
};

}  // namespace lockstep::hierarchy
