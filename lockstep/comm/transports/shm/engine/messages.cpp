#include <lockstep/comm/transports/shm/engine/messages.h>

#include <algorithm>
#include <cstring>

#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace lockstep::shm {
namespace {

using detail::kAnySource;

// How often a wait checks that its peer is still there.
constexpr std::chrono::milliseconds kMessageSlice(20);
// How long a message may lie before the thread handles it; most are waited for at once.
constexpr std::chrono::microseconds kMessageNap(250);
// How long after the last message the thread keeps polling: posting need not wake it then.
constexpr std::chrono::milliseconds kMessageLinger(10);
// How long a rank that leaves waits for peers that still need an answer.
constexpr std::chrono::seconds kFarewell(2);

}  // namespace

Note note_of(const Op& op, std::int64_t tag) {
  Note note{};
  note.tag = tag;
  note.dtype = static_cast<std::uint8_t>(op.call.dtype);
  note.count = op.call.count;
  note.bytes = op.call.bytes;
  note.dims = static_cast<std::uint8_t>(std::min(op.call.shape.size(), std::size(note.shape)));
  std::copy_n(op.call.shape.begin(), note.dims, note.shape);
  const auto site = detail::site_text(op.call);
  std::memcpy(note.site, site.data(), std::min(site.size(), sizeof note.site - 1));
  return note;
}

Call far_call(const Note& note, const Call& own, lockstep::Operation operation, int rank) {
  if (note.dtype > static_cast<int>(Dtype::other) || note.dims > std::size(note.shape) || note.count < 0)
    throw Error("a rank sent an invalid note: do all ranks run the same build?");
  Call call;
  call.operation = operation;
  call.dtype = static_cast<Dtype>(note.dtype);
  call.root = own.rank;
  call.rank = rank;
  call.size = own.size;
  call.group = own.group;
  call.count = note.count;
  call.bytes = note.bytes;
  call.shape.assign(note.shape, note.shape + note.dims);
  call.far_site.assign(note.site, ::strnlen(note.site, sizeof note.site));
  return call;
}

Messages::Messages(Barrier& barrier, Memory& memory, std::chrono::nanoseconds spin,
                   std::shared_ptr<void> keep, bool has_others)
    : barrier_(barrier),
      memory_(memory),
      spin_(spin),
      keep_(std::move(keep)),
      has_others_(has_others),
      outbox_(static_cast<std::size_t>(barrier.ranks())) {}

Messages::ItemPtr Messages::post(Op op, int peer, std::int64_t tag, std::chrono::nanoseconds timeout) {
  auto item = std::make_shared<Item>();
  item->op = std::move(op);
  item->peer = peer;
  item->tag = tag;
  item->posted = Clock::now();
  item->deadline = item->posted + timeout;
  const Call& call = item->op.call;
  Lock lock(mutex_);
  last_use_ = item->posted;
  if (broken_) {
    settle(item, broken_);
    tell_settled(lock);
    return item;
  }
  if (call.operation == lockstep::Operation::send) {
    Note note = note_of(item->op, tag);
    note.kind = Note::kMessage;
    note.id = next_id_++;
    const auto bytes = static_cast<std::size_t>(call.bytes);
    const void* data = item->op.inputs.at(0);
    auto place = bytes > 0 ? memory_.find(data, bytes) : Place{};
    if (bytes > 0 && place.segment == 0) {
      item->copy = memory_.allocate(bytes);
      std::memcpy(item->copy, data, bytes);
      place = memory_.find(item->copy, bytes);
    }
    note.segment = place.segment;
    note.offset = place.offset;
    sends_[note.id] = item;
    put(peer, note);
  } else {
    auto& arrived = arrived_[tag];
    auto wanted = std::find_if(arrived.begin(), arrived.end(),
                               [&](const Arrived& each) { return peer == kAnySource || peer == each.from; });
    if (wanted != arrived.end()) {
      const auto found = *wanted;
      arrived.erase(wanted);
      deliver(item, found.note, found.from);
    } else {
      receives_[tag].push_back(item);
    }
    if (arrived.empty()) arrived_.erase(tag);
  }
  tell_settled(lock);
  if (!has_thread_ && !idle()) {
    // Without a thread, the waiters do the work.
    has_thread_ = crew_.start([self = shared_from_this()] { self->watch(); });
  } else if (asleep_ && neglected()) {
    posted_.notify_one();
  }
  return item;
}

// ---- notes ------------------------------------------------------------------------------------------------

void Messages::put(int to, const Note& note) {
  auto& outbox = outbox_[static_cast<std::size_t>(to)];
  (note.kind == Note::kMessage ? outbox.messages : outbox.replies).push_back(note);
  flush();
}

void Messages::flush() {
  for (int to = 0; to < barrier_.ranks(); ++to) {
    auto& waiting = outbox_[static_cast<std::size_t>(to)];
    if (waiting.empty()) continue;
    Channel& channel = barrier_.region().channel(barrier_.rank(), to);
    auto head = channel.head.load(std::memory_order_relaxed);
    bool any = false;
    while (!waiting.empty() && head - channel.tail.load(std::memory_order_acquire) < kNotes) {
      auto& first = waiting.replies.empty() ? waiting.messages : waiting.replies;
      channel.notes[head % kNotes] = first.front();
      first.pop_front();
      channel.head.store(++head, std::memory_order_release);
      LOCKSTEP_SHM_PAUSE();
      any = true;
    }
    if (any) barrier_.ring(to);
  }
}

void Messages::take_notes() {
  for (int from = 0; from < barrier_.ranks(); ++from) {
    Channel& channel = barrier_.region().channel(from, barrier_.rank());
    auto tail = channel.tail.load(std::memory_order_relaxed);
    bool was_full = false;
    for (;;) {
      const auto head = channel.head.load(std::memory_order_acquire);
      if (tail == head) break;
      was_full = was_full || head - tail == kNotes;
      const Note note = channel.notes[tail % kNotes];
      channel.tail.store(++tail, std::memory_order_release);
      LOCKSTEP_SHM_PAUSE();
      if (note.kind == Note::kMessage)
        receive(note, from);
      else
        acknowledged(note, from);
    }
    if (was_full) barrier_.ring(from);  // it may have more to send
  }
}

void Messages::receive(const Note& note, int from) {
  auto receives = receives_.find(note.tag);
  if (receives != receives_.end()) {
    auto& of_tag = receives->second;
    auto wanted = std::find_if(of_tag.begin(), of_tag.end(), [&](const ItemPtr& item) {
      return item->peer == kAnySource || item->peer == from;
    });
    if (wanted != of_tag.end()) {
      auto item = *wanted;
      of_tag.erase(wanted);
      if (of_tag.empty()) receives_.erase(receives);
      return deliver(item, note, from);
    }
  }
  arrived_[note.tag].push_back({note, from});
}

void Messages::deliver(const ItemPtr& item, const Note& note, int from) {
  const Call& call = item->op.call;
  Note reply = note_of(item->op, note.tag);
  reply.id = note.id;
  reply.kind = Note::kRefused;
  std::exception_ptr error;
  try {
    const Call sent = far_call(note, call, lockstep::Operation::send, barrier_.name(from));
    const bool fits = item->op.takes_less && sent.dtype == call.dtype && sent.count <= call.count &&
                      sent.bytes == sent.count * static_cast<std::int64_t>(item->op.item_size);
    if (auto mismatch = fits ? std::nullopt : detail::find_mismatch(sent, call)) throw Mismatch(*mismatch);
    const auto bytes = static_cast<std::size_t>(sent.bytes);
    if (bytes > 0)
      std::memcpy(item->op.outputs.at(0),
                  memory_.map(from, {note.segment, note.offset}, bytes, {barrier_, item->deadline}), bytes);
    reply.kind = Note::kReceived;
  } catch (...) {
    error = std::current_exception();
  }
  put(from, reply);
  settle(item, error, from);
}

void Messages::acknowledged(const Note& note, int from) {
  auto sent = sends_.find(note.id);
  if (sent == sends_.end()) return;  // abandoned here meanwhile
  auto item = sent->second;
  sends_.erase(sent);
  if (item->copy != nullptr) memory_.free(std::exchange(item->copy, nullptr));
  std::exception_ptr error;
  if (note.kind == Note::kRefused) {
    const Call& call = item->op.call;
    error = std::make_exception_ptr(Mismatch(
        detail::find_mismatch(call, far_call(note, call, lockstep::Operation::recv, barrier_.name(from)))
            .value_or("the receiver could not accept it")));
  }
  settle(item, error);
}

// ---- waiting ----------------------------------------------------------------------------------------------

void Messages::settle(ItemPtr item, std::exception_ptr error, int source) {
  settled_.push_back({std::move(item), std::move(error), source});
}

// Releases the lock meanwhile: callbacks may post again, and wait.
void Messages::tell_settled(Lock& lock) {
  while (!settled_.empty()) {
    const detail::Settling here;
    auto batch = std::exchange(settled_, {});
    for (auto& each : batch) each.item->settled = true;
    // Another thread that waits for one of them sleeps on the bell.
    if (waiting_ > 0) barrier_.ring(barrier_.rank());
    lock.unlock();
    for (auto& each : batch) {
      auto done = std::move(each.item->op.done);
      done(each.error, each.source);
    }
    batch.clear();
    lock.lock();
  }
}

void Messages::look(Lock& lock) {
  if (!broken_) {
    take_notes();
    flush();
    expire();
  }
  tell_settled(lock);
}

// Ends hopeless items: their peer is gone, or their deadline has passed. It scans all of them, so not too
// often.
void Messages::expire() {
  const auto now = Clock::now();
  if (now < next_expiry_) return;
  next_expiry_ = now + kMessageSlice;
  if (!trouble()) return;
  take_notes();  // what a peer sent before it left is still there
  if (auto error = trouble()) fail_all(error);
}

std::exception_ptr Messages::trouble() const {
  const auto now = Clock::now();
  std::vector<std::exception_ptr> lost;
  for (int r = 0; r < barrier_.ranks(); ++r)
    lost.push_back(r == barrier_.rank() ? nullptr : barrier_.lost(r));
  const auto all_lost = barrier_.lost(kAnySource);
  auto of = [&](const Item& item) -> std::exception_ptr {
    if (item.peer != kAnySource || !has_others_)
      if (auto error = item.peer == kAnySource ? all_lost : lost[static_cast<std::size_t>(item.peer)])
        return error;
    if (now >= item.deadline) return std::make_exception_ptr(TimedOut("the deadline has passed"));
    return nullptr;
  };
  for (const auto& [id, item] : sends_)
    if (auto error = of(*item)) return error;
  for (const auto& [tag, items] : receives_)
    for (const auto& item : items)
      if (auto error = of(*item)) return error;
  return nullptr;
}

// Peers may still be about to take what was sent, so its memory is kept.
void Messages::fail_all(const std::exception_ptr& error) {
  if (broken_) return;
  broken_ = error;
  for (auto& [id, item] : std::exchange(sends_, {})) settle(item, error);
  for (auto& [tag, items] : std::exchange(receives_, {}))
    for (auto& item : items) settle(item, error);
  for (auto& each : outbox_) each = {};
}

void Messages::wait(Item& item, Clock::time_point deadline) {
  Lock lock(mutex_);
  ++waiting_;
  auto spin_until = Clock::now() + spin_;
  for (;;) {
    const auto bell = barrier_.bell();
    look(lock);
    if (item.settled) break;
    if (Clock::now() >= std::min(deadline, item.deadline)) {
      fail_all(std::make_exception_ptr(TimedOut("the deadline has passed")));
      tell_settled(lock);
      break;
    }
    lock.unlock();
    if (Clock::now() < spin_until) {
      for (int i = 0; i < 64 && barrier_.bell() == bell; ++i) relax();
    } else {
      barrier_.sleep(bell, kMessageSlice);
    }
    lock.lock();
  }
  --waiting_;
  last_use_ = Clock::now();
  if (asleep_ && neglected()) posted_.notify_one();
}

bool Messages::withdraw(const ItemPtr& item) {
  decltype(item->op.done) done;  // may own the item itself; destroyed without the lock
  Lock lock(mutex_);
  auto of_tag = receives_.find(item->tag);
  if (of_tag == receives_.end() || of_tag->second.remove(item) == 0) return false;
  if (of_tag->second.empty()) receives_.erase(of_tag);
  done = std::move(item->op.done);
  return true;
}

void Messages::interrupt(const std::string& cause) {
  Lock lock(mutex_);
  fail_all(std::make_exception_ptr(Interrupted(cause)));
  tell_settled(lock);
  barrier_.ring(barrier_.rank());
}

void Messages::close() {
  {
    Lock lock(mutex_);
    take_leave(lock);
  }
  interrupt("this rank has left the group");
  Lock lock(mutex_);
  closed_ = true;
  posted_.notify_one();
}

void Messages::take_leave(Lock& lock) {
  const auto until = Clock::now() + kFarewell;
  auto unheard = [&](int r) {
    return !outbox_[static_cast<std::size_t>(r)].replies.empty() && !barrier_.lost(r);
  };
  for (int r = 0; r < barrier_.ranks(); ++r)
    while (!broken_ && unheard(r) && Clock::now() < until) {
      const auto bell = barrier_.bell();
      look(lock);
      if (!unheard(r)) break;
      lock.unlock();
      barrier_.sleep(bell, kMessageSlice);
      lock.lock();
    }
}

bool Messages::idle() const {
  return sends_.empty() && receives_.empty() &&
         std::all_of(outbox_.begin(), outbox_.end(), [](const auto& each) { return each.empty(); });
}

void Messages::watch() {
  Lock lock(mutex_);
  while (!closed_) {
    if (!neglected() && Clock::now() - last_use_ >= kMessageLinger) {
      asleep_ = true;
      posted_.wait(lock, [&] { return neglected() || closed_; });
      asleep_ = false;
    }
    // Most are waited for at once, and the waiters handle them.
    posted_.wait_for(lock, kMessageNap);
    while (neglected() && !closed_) {
      const auto bell = barrier_.bell();
      look(lock);
      if (!neglected() || closed_) break;
      lock.unlock();
      barrier_.sleep(bell, kMessageSlice);
      lock.lock();
    }
  }
}

}  // namespace lockstep::shm
