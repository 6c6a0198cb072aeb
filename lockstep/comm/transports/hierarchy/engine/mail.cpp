#include <lockstep/comm/transports/hierarchy/engine/mail.h>

#include <algorithm>
#include <new>

#include <lockstep/base/left_behind.h>
#include <lockstep/base/quiet_threads.h>
#include <lockstep/base/start_thread.h>
#include <lockstep/comm/transports/hierarchy/engine/engine.h>

namespace lockstep::hierarchy {
namespace {

using detail::kAnySource;
using shm::Note;

// Above the tags of the collectives: for notes, and for the messages that they announce.
constexpr int kNoteTag = 8, kFirstMailTag = 16;
constexpr std::uint64_t kMailTags = 1 << 20;
int tag_of(std::uint64_t id) { return kFirstMailTag + static_cast<int>(id % kMailTags); }

// How often a wait checks that its peer is still there.
constexpr std::chrono::milliseconds kMailLook(100);
// How long to wait until the sender of a message that does not fit has been notified.
constexpr std::chrono::seconds kMailFarewell(1);

}  // namespace

Mail::Mail(Hosts hosts, std::shared_ptr<shm::Messages> inside, const shm::Barrier* barrier,
           std::shared_ptr<Links> links)
    : hosts_(std::move(hosts)),
      inside_(std::move(inside)),
      barrier_(barrier),
      links_(std::move(links)),
      next_id_(static_cast<std::size_t>(hosts_.size())) {}

Mail::~Mail() {
  // the running thread holds a reference to this, so it is exiting
  if (listener_.joinable()) listener_.detach();
}

Mail::ItemPtr Mail::post(Op op, std::int64_t tag, std::chrono::nanoseconds timeout) {
  auto item = std::make_shared<Item>();
  item->op = std::move(op);
  item->peer = item->op.call.root;
  item->tag = tag;
  item->deadline = Clock::now() + timeout;
  item->only_near = item->peer != kAnySource && hosts_.host_of(item->peer) == hosts_.host();
  if (item->only_near) {
    post_near(item, hosts_.place_of(item->peer), timeout);
    return item;
  }
  if (item->peer == kAnySource && inside_) post_near(item, kAnySource, timeout);
  Lock lock(mutex_);
  if (item->settled) return item;
  if (broken_) {
    settle(lock, *item, broken_);
    return item;
  }
  try {
    if (!listener_.joinable()) {
      const detail::QuietThreads quiet;
      listener_ =
          detail::start_thread("messages between hosts", [self = shared_from_this()] { self->listen(); });
    }
    if (item->op.call.operation == Operation::send)
      send_far(lock, item);
    else
      receive_far(lock, item);
  } catch (...) {
    settle(lock, *item, std::current_exception());
  }
  return item;
}

// Call without the mutex: the item may complete at once.
void Mail::post_near(const ItemPtr& item, int place, std::chrono::nanoseconds timeout) {
  Op op;
  op.call = item->op.call;
  op.inputs = item->op.inputs;
  op.outputs = item->op.outputs;
  op.item_size = item->op.item_size;
  op.done = [self = shared_from_this(), item](const std::exception_ptr& error, int source) {
    Lock lock(self->mutex_);
    self->receives_.remove(item);
    self->settle(lock, *item, error,
                 source < 0 ? source : self->hosts_.neighbours()[static_cast<std::size_t>(source)]);
  };
  auto near = inside_->post(std::move(op), place, item->tag, timeout);
  Lock lock(mutex_);
  item->near = std::move(near);
}

void Mail::send_far(Lock&, const ItemPtr& item) {
  const auto bytes = static_cast<std::size_t>(item->op.call.bytes);
  item->id = next_id_[static_cast<std::size_t>(item->peer)]++;
  item->note = std::make_unique<Note>(shm::note_of(item->op, item->tag));
  item->note->kind = Note::kMessage;
  item->note->id = item->id;
  item->told = links_->send(item->peer, item->note.get(), sizeof(Note), kNoteTag);
  if (bytes > 0) item->data = links_->send(item->peer, item->op.inputs.at(0), bytes, tag_of(item->id));
  sends_[{item->peer, item->id}] = item;
}

void Mail::receive_far(Lock& lock, const ItemPtr& item) {
  auto wanted = std::find_if(arrived_.begin(), arrived_.end(), [&](const Arrived& each) {
    return each.note.tag == item->tag && (item->peer == kAnySource || item->peer == each.from);
  });
  if (wanted == arrived_.end()) {
    receives_.push_back(item);
    return;
  }
  if (item->near && !inside_->withdraw(item->near)) return;  // shared memory answered it just now
  const auto found = *wanted;
  arrived_.erase(wanted);
  take(lock, item, found.note, found.from);
}

// ---- notes ------------------------------------------------------------------------------------------------

void Mail::listen() {
  auto heard = std::make_unique<Note>();
  Lock lock(mutex_);
  try {
    while (!closed_ && !broken_) {
      hearing_ = links_->receive_any(heard.get(), sizeof(Note), kNoteTag);
      auto& transfer = *hearing_;
      lock.unlock();
      const int from = links_->wait(transfer, Clock::time_point::max());
      lock.lock();
      hear(lock, *heard, from);
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    if (!closed_) fail_all(lock, std::current_exception());
    detail::leave_behind(std::shared_ptr<Note>(std::move(heard)));  // links may still write to it
  }
  hearing_.reset();
}

void Mail::hear(Lock& lock, const Note& note, int from) {
  if (note.kind == Note::kRefused) {
    auto sent = sends_.find({from, note.id});
    if (sent == sends_.end()) return;
    auto item = sent->second;
    const Call& call = item->op.call;
    item->refused = std::make_exception_ptr(
        shm::Mismatch(detail::find_mismatch(call, shm::far_call(note, call, Operation::recv, from))
                          .value_or("the receiver could not accept it")));
    if (item->data) links_->cancel(*item->data);
    return;
  }
  for (auto each = receives_.begin(); each != receives_.end();) {
    auto item = *each;
    if (item->tag != note.tag || (item->peer != kAnySource && item->peer != from)) {
      ++each;
      continue;
    }
    each = receives_.erase(each);
    if (item->near && !inside_->withdraw(item->near)) continue;  // shared memory answered it just now
    return take(lock, item, note, from);
  }
  arrived_.push_back({note, from});
}

// Before the error is reported here, which ends the group: the peer should get the cause.
void Mail::refuse(Lock& lock, const Item& item, const Note& note, int from) noexcept {
  auto* reply = new (std::nothrow) Note(shm::note_of(item.op, note.tag));  // leaked if it fails
  if (reply == nullptr) return;
  reply->kind = Note::kRefused;
  reply->id = note.id;
  lock.unlock();
  try {
    auto transfer = links_->send(from, reply, sizeof(Note), kNoteTag);
    links_->wait(*transfer, Clock::now() + kMailFarewell);
    delete reply;
  } catch (...) {  // the peer learns of it some other way
  }
  lock.lock();
}

void Mail::take(Lock& lock, const ItemPtr& item, const Note& note, int from) {
  const Call& call = item->op.call;
  item->source = from;
  try {
    if (auto mismatch = detail::find_mismatch(shm::far_call(note, call, Operation::send, from), call)) {
      refuse(lock, *item, note, from);
      throw shm::Mismatch(*mismatch);
    }
    if (call.bytes == 0) return settle(lock, *item, nullptr, from);
    item->data =
        links_->receive(from, item->op.outputs.at(0), static_cast<std::size_t>(call.bytes), tag_of(note.id));
    changed_.notify_all();
  } catch (...) {
    settle(lock, *item, std::current_exception());
  }
}

// ---- waiting ----------------------------------------------------------------------------------------------

void Mail::wait(Item& item, Clock::time_point deadline) {
  if (item.only_near) return inside_->wait(*item.near, deadline);
  deadline = std::min(deadline, item.deadline);
  Lock lock(mutex_);
  while (!item.settled) {
    if (!item.claimed && (item.told || item.data)) {
      finish(lock, item, deadline);
      continue;
    }
    changed_.wait_until(lock, std::min(deadline, Clock::now() + kMailLook));
    if (item.settled || item.data) continue;
    if (Clock::now() >= deadline)
      fail_all(lock, std::make_exception_ptr(shm::TimedOut("the deadline has passed")));
    else if (auto trouble = lost(item))
      fail_all(lock, trouble);
  }
}

// Releases the lock while it waits.
void Mail::finish(Lock& lock, Item& item, Clock::time_point deadline) {
  item.claimed = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    if (item.told) links_->wait(*item.told, deadline);
    if (item.data) links_->wait(*item.data, deadline);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (item.note) sends_.erase({item.peer, item.id});
  if (error && item.note) detail::leave_behind(std::shared_ptr<Note>(std::move(item.note)));
  item.told.reset();
  item.data.reset();
  settle(lock, item, item.refused ? item.refused : error, item.source);
}

std::exception_ptr Mail::lost(const Item& item) const {
  try {
    auto trouble = links_->lost(item.peer);
    const bool neighbours_too = item.peer != kAnySource || barrier_ == nullptr || barrier_->lost(kAnySource);
    return neighbours_too ? trouble : nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

// Releases the lock meanwhile: the callback may post again, and wait.
void Mail::settle(Lock& lock, Item& item, const std::exception_ptr& error, int source) {
  if (std::exchange(item.settled, true)) return;
  changed_.notify_all();
  const detail::Settling here;
  auto done = std::move(item.op.done);
  lock.unlock();
  done(error, source);
  done = nullptr;
  lock.lock();
}

// Items that wait for a transfer get the error from the links.
void Mail::fail_all(Lock& lock, const std::exception_ptr& error) {
  if (!broken_) broken_ = error;
  for (auto& item : std::exchange(receives_, {})) settle(lock, *item, error);
}

void Mail::interrupt(const std::string& cause) {
  if (inside_) inside_->interrupt(cause);
  Lock lock(mutex_);
  fail_all(lock, std::make_exception_ptr(shm::Interrupted(cause)));
}

void Mail::close() {
  if (inside_) inside_->close();
  Lock lock(mutex_);
  closed_ = true;
  fail_all(lock, std::make_exception_ptr(shm::Interrupted("this rank has left the group")));
  if (hearing_) links_->cancel(*hearing_);
  auto listener = std::move(listener_);
  lock.unlock();
  if (!listener.joinable()) return;
  if (listener.get_id() == std::this_thread::get_id())
    listener.detach();
  else
    listener.join();
}

}  // namespace lockstep::hierarchy
