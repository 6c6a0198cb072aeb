// Sends and receives of a group that spans hosts. Inside a host they go through shared memory; between hosts
// over links, where a note goes before each message and says what comes. A thread hears the notes, from the
// first message between hosts on. So a receive from any rank is answered by either, and a message that does
// not fit its receive is an error at both ends. A send is complete when its data has been taken (inside a
// host), or is on its way to a receive that fits it.
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
    shm::Messages::ItemPtr near;  // what is asked of shared memory
    bool only_near = false;
    // Under the mutex.
    std::unique_ptr<shm::Note> note;  // links may read it after a failure: it stays then
    std::uint64_t id = 0;
    Links::TransferPtr told, data;
    int source = -1;
    std::exception_ptr refused;
    bool claimed = false, settled = false;  // somebody waits for its transfers; it has ended
  };
  using ItemPtr = std::shared_ptr<Item>;

  // inside: null where this rank is alone on its host; meeting: that of its ranks.
  Mail(Hosts hosts, std::shared_ptr<shm::Messages> inside, const shm::Barrier* barrier,
       std::shared_ptr<Links> links);
  ~Mail();

  // part.call.root is the peer, or kAnySource. Never waits.
  ItemPtr post(Op op, std::int64_t tag, std::chrono::nanoseconds timeout);
  // Whoever waits does the work: nobody else looks whether a transfer is complete.
  void wait(Item& item, Clock::time_point deadline);
  // Every message ends with this cause, now and later. The links are told by somebody else.
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
  std::list<ItemPtr> receives_;                             // that nobody has answered, as they were posted
  std::list<Arrived> arrived_;                              // that nobody has asked for
  std::map<std::pair<int, std::uint64_t>, ItemPtr> sends_;  // to whom, and its number there
  std::vector<std::uint64_t> next_id_;                      // for each rank
  std::exception_ptr broken_;
  Links::TransferPtr hearing_;
  std::thread listener_;
  bool closed_ = false;
};

}  // namespace lockstep::hierarchy
