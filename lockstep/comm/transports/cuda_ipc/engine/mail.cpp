#include <lockstep/comm/transports/cuda_ipc/engine/mail.h>

#include <thread>
#include <utility>

namespace lockstep::cuda_ipc {
namespace {

// Above every message tag: answers are tagged with the letter's number.
constexpr std::int64_t kAnswers = std::int64_t{1} << 40;
// How long a rank that leaves waits for peers that still need an answer.
constexpr std::chrono::seconds kFarewell(2);

Op empty_part(Operation operation, const Call& like, int peer) {
  Op op;
  op.item_size = 1;
  op.call.operation = operation;
  op.call.dtype = Dtype::uint8;
  op.call.rank = like.rank;
  op.call.size = like.size;
  op.call.group = like.group;
  op.call.site = like.site;
  op.call.root = peer;
  return op;
}

}  // namespace

struct Mail::Letter {
  std::uint64_t id;
  Handle memory;
  std::uint64_t offset;
  std::int32_t ready;     // the sender's event
  std::int32_t received;  // the receiver's event, by which it answers
};

struct Mail::Sent {
  Op op;
  int peer;
  Letter letter{};
  char* stage = nullptr;
  ItemPtr item = std::make_shared<Item>();
  std::atomic<bool> ended = false;

  void end(const std::exception_ptr& error) {
    if (!ended.exchange(true)) std::exchange(op.done, nullptr)(error, -1);
  }
};

struct Mail::Received {
  Op op;
  std::chrono::nanoseconds timeout;
  Letter letter{};
};

Mail::Mail(std::shared_ptr<shm::Messages> messages, std::shared_ptr<Peers> peers)
    : messages_(std::move(messages)),
      peers_(std::move(peers)),
      track_(*peers_->messages),
      arena_(Arena::of(peers_->device)) {}

Mail::ItemPtr Mail::post(Op op, int peer, std::int64_t tag, std::chrono::nanoseconds timeout) {
  return op.call.operation == Operation::send ? send(std::move(op), peer, tag, timeout)
                                              : receive(std::move(op), peer, tag, timeout);
}

// ---- sending ----------------------------------------------------------------------------------------------

Mail::ItemPtr Mail::send(Op op, int peer, std::int64_t tag, std::chrono::nanoseconds timeout) {
  const OnDevice here(peers_->device);
  auto sent = std::make_shared<Sent>();
  sent->op = std::move(op);
  sent->peer = peer;
  const Call& call = sent->op.call;
  const auto bytes = static_cast<std::size_t>(call.bytes);
  Letter& letter = sent->letter;
  letter.id = next_id_++;
  letter.ready = static_cast<std::int32_t>(2 * letter.id % Track::kEvents);
  letter.received = letter.ready + 1;

  track_.wait(static_cast<Order*>(sent->op.order.get())->ready);
  if (bytes > 0) {
    const void* data = sent->op.inputs.at(0);
    auto place = arena_.find(data, bytes);
    if (place.handle == nullptr) {
      sent->stage = arena_.allocate(bytes, track_.stream());
      place = arena_.find(sent->stage, bytes);
      check(cudaMemcpyAsync(sent->stage, data, bytes, cudaMemcpyDefault, track_.stream()),
            "cannot start a copy");
    }
    letter.memory = *place.handle;
    letter.offset = place.offset;
  }
  track_.record(letter.ready);

  auto answer = empty_part(Operation::recv, call, peer);
  answer.outputs = {nullptr};
  answer.done = [self = shared_from_this(), sent](const std::exception_ptr& error, int) {
    if (error) return sent->end(error);
    try {
      self->answered(*sent);
    } catch (...) {
      sent->end(std::current_exception());
    }
  };
  const auto id = static_cast<std::int64_t>(letter.id);
  sent->item->answer = messages_->post(std::move(answer), peer, kAnswers + id, timeout);

  // The call is compared as the tensor's, but the bytes sent are the letter's.
  Op note;
  note.item_size = 1;
  note.call = call;
  note.call.bytes = sizeof(Letter);
  note.inputs = {&letter};
  note.done = [self = shared_from_this(), sent](const std::exception_ptr& error, int) {
    sent->item->fate = error ? Item::kFailed : Item::kTaken;
    sent->item->fate.notify_all();
    if (!error) return;
    self->messages_->withdraw(sent->item->answer);
    sent->end(error);
  };
  sent->item->letter = messages_->post(std::move(note), peer, tag, timeout);
  return sent->item;
}

void Mail::answered(Sent& sent) {
  const OnDevice here(peers_->device);
  track_.wait(peers_->message_event(sent.peer, sent.letter.received));
  if (sent.stage != nullptr) arena_.free(std::exchange(sent.stage, nullptr));
  check(cudaEventRecord(static_cast<Order*>(sent.op.order.get())->done, track_.stream()),
        "cannot record an event");
  sent.end(nullptr);
}

// ---- receiving --------------------------------------------------------------------------------------------

Mail::ItemPtr Mail::receive(Op op, int peer, std::int64_t tag, std::chrono::nanoseconds timeout) {
  auto received = std::make_shared<Received>();
  received->op = std::move(op);
  received->timeout = timeout;
  Op note;
  note.item_size = 1;
  note.call = received->op.call;
  note.call.bytes = sizeof(Letter);
  note.outputs = {&received->letter};
  note.done = [self = shared_from_this(), received](const std::exception_ptr& error, int source) {
    auto outcome = error;
    try {
      if (!error) self->take(*received, source);
    } catch (...) {
      outcome = std::current_exception();
    }
    std::exchange(received->op.done, nullptr)(outcome, source);
  };
  auto item = std::make_shared<Item>();
  item->letter = messages_->post(std::move(note), peer, tag, timeout);
  return item;
}

void Mail::take(Received& received, int source) {
  const OnDevice here(peers_->device);
  const Letter& letter = received.letter;
  const auto& order = *static_cast<Order*>(received.op.order.get());
  const auto bytes = static_cast<std::size_t>(received.op.call.bytes);
  track_.wait(order.ready);
  track_.wait(peers_->message_event(source, letter.ready));
  if (bytes > 0)
    check(cudaMemcpyAsync(received.op.outputs.at(0), open_memory(letter.memory) + letter.offset, bytes,
                          cudaMemcpyDefault, track_.stream()),
          "cannot start a copy");
  track_.record(letter.received);
  check(cudaEventRecord(order.done, track_.stream()), "cannot record an event");
  answer(letter, source, received.op.call, received.timeout);
}

void Mail::answer(const Letter& letter, int source, const Call& call, std::chrono::nanoseconds timeout) {
  auto op = empty_part(Operation::send, call, source);
  op.inputs = {nullptr};
  ++unheard_;
  op.done = [self = shared_from_this()](const std::exception_ptr&, int) { --self->unheard_; };
  messages_->post(std::move(op), source, kAnswers + static_cast<std::int64_t>(letter.id), timeout);
}

void Mail::wait(Item& item, Clock::time_point deadline) {
  messages_->wait(*item.letter, deadline);
  if (!item.answer) return;
  item.fate.wait(Item::kUnknown);  // the letter has ended; another thread may be about to store its fate
  if (item.fate == Item::kTaken) messages_->wait(*item.answer, deadline);
}

// ---- the end ----------------------------------------------------------------------------------------------

void Mail::interrupt(const std::string& cause) {
  broken_ = true;
  track_.lose();
  messages_->interrupt(cause);
}

void Mail::close() {
  const auto until = Clock::now() + kFarewell;
  while (unheard_ > 0 && !broken_ && Clock::now() < until)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  messages_->close();
}

bool Mail::wait_for_threads(std::chrono::milliseconds limit) const {
  return messages_->wait_for_threads(limit);
}

}  // namespace lockstep::cuda_ipc
