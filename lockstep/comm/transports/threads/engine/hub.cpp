#include <lockstep/comm/transports/threads/engine/hub.h>

#include <algorithm>
#include <cstring>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/reduce/reduce.h>

namespace lockstep::detail {
namespace {

// Reduced before it is copied to the other ranks, so that it is still in the cache then.
constexpr std::size_t kChunkBytes = std::size_t{128} << 10;

std::exception_ptr error_of(CommError::Kind kind, const std::string& text) {
  return std::make_exception_ptr(KindedError(kind, text));
}

void copy(void* to, const void* from, std::int64_t count, std::size_t item_size) {
  if (count > 0 && to != from) std::memmove(to, from, static_cast<std::size_t>(count) * item_size);
}

}  // namespace

void Whereabouts::note(int world_rank, const Call& call) {
  auto copy = std::make_unique<Call>(call);
  std::lock_guard lock(mutex_);
  last_[static_cast<std::size_t>(world_rank)].swap(copy);
}

std::string Whereabouts::describe(int world_rank) const {
  std::lock_guard lock(mutex_);
  const auto& call = last_[static_cast<std::size_t>(world_rank)];
  if (!call) return "it has not made a call yet";
  return fmt::format("its last call is #{} on group '{}', {}", call->sequence, call->group,
                     lockstep::detail::describe(*call));
}

Hub::Hub(std::vector<int> ranks, std::shared_ptr<Whereabouts> whereabouts)
    : ranks_(std::move(ranks)),
      whereabouts_(std::move(whereabouts)),
      left_(ranks_.size()),
      next_(ranks_.size()) {}

void Hub::finish(Finished parts, const std::exception_ptr& error) {
  for (Op& op : parts) op.done(error, -1);
}

void Hub::post(int rank, Op op) {
  whereabouts_->note(ranks_[static_cast<std::size_t>(rank)], op.call);
  std::unique_lock lock(mutex_);
  if (!poison_.empty()) {
    auto error = error_of(poison_kind_, poison_);
    lock.unlock();
    return op.done(error, -1);
  }
  const auto sequence = next_[static_cast<std::size_t>(rank)]++;
  Collective& collective = collectives_[sequence];
  if (collective.parts.empty()) collective.parts.resize(ranks_.size());

  // Compared on arrival, so that ranks get the error even if not all ever arrive.
  std::optional<std::string> mismatch;
  for (const auto& other : collective.parts)
    if (other) {
      mismatch = find_difference(other->call, op.call);
      break;
    }
  collective.parts[static_cast<std::size_t>(rank)] = std::make_unique<Op>(std::move(op));
  const bool complete = ++collective.arrived == static_cast<int>(ranks_.size());
  if (!mismatch && complete) {
    std::vector<const Call*> calls;
    for (const auto& each : collective.parts) calls.push_back(&each->call);
    mismatch = find_mismatch(calls);
  }
  if (mismatch) return fail_all(std::move(lock), *mismatch, CommError::Kind::mismatch);
  if (!complete) {
    auto gone = std::find(left_.begin(), left_.end(), true);
    const auto who = static_cast<std::size_t>(gone - left_.begin());
    if (gone != left_.end() && !collective.parts[who])
      return fail_all(std::move(lock), fmt::format("rank {} has left the group", who),
                      CommError::Kind::peer_died);
    return;
  }

  Collective ready = std::move(collective);
  collectives_.erase(sequence);
  lock.unlock();
  std::exception_ptr error;
  try {
    execute(ready);
  } catch (...) {
    error = std::current_exception();
  }
  for (auto& each : ready.parts) each->done(error, -1);
}

void Hub::post_point_to_point(int rank, std::int64_t tag, Op op) {
  whereabouts_->note(ranks_[static_cast<std::size_t>(rank)], op.call);
  const bool sends = op.call.operation == Operation::send;
  const int peer = op.call.root;
  std::unique_lock lock(mutex_);
  if (!poison_.empty()) {
    auto error = error_of(poison_kind_, poison_);
    lock.unlock();
    return op.done(error, -1);
  }
  auto& candidates = sends ? receives_ : sends_;
  auto match = std::find_if(candidates.begin(), candidates.end(), [&](const Waiting& other) {
    const int wants = other.op.call.root;
    return other.tag == tag && (peer == kAnySource || peer == other.rank) &&
           (wants == kAnySource || wants == rank);
  });
  if (match == candidates.end()) {
    if (nobody_left(rank, peer)) {
      lock.unlock();
      return op.done(error_of(CommError::Kind::peer_died,
                              peer == kAnySource ? std::string("every other rank has left the group")
                                                 : fmt::format("rank {} has left the group", peer)),
                     -1);
    }
    (sends ? sends_ : receives_).push_back({rank, tag, std::move(op)});
    return;
  }
  Waiting other = std::move(*match);
  candidates.erase(match);
  Op& sender = sends ? op : other.op;
  Op& receiver = sends ? other.op : op;
  const int source = sends ? rank : other.rank;
  if (auto mismatch = find_mismatch(sender.call, receiver.call)) {
    fail_all(std::move(lock), *mismatch, CommError::Kind::mismatch);
    auto error = error_of(CommError::Kind::mismatch, *mismatch);
    sender.done(error, -1);
    receiver.done(error, -1);
    return;
  }
  lock.unlock();
  copy(receiver.outputs.at(0), sender.inputs.at(0), sender.call.count, sender.item_size);
  sender.done(nullptr, -1);
  receiver.done(nullptr, source);
}

void Hub::poison(const std::string& cause, CommError::Kind kind) {
  fail_all(std::unique_lock(mutex_), cause, kind);
}

void Hub::fail_all(std::unique_lock<std::mutex> lock, const std::string& cause, CommError::Kind kind) {
  if (poison_.empty()) poison_ = cause, poison_kind_ = kind;
  Finished failed;
  for (auto& [sequence, collective] : collectives_)
    for (auto& op : collective.parts)
      if (op) failed.push_back(std::move(*op));
  collectives_.clear();
  for (auto* list : {&sends_, &receives_}) {
    for (auto& waiting : *list) failed.push_back(std::move(waiting.op));
    list->clear();
  }
  auto error = error_of(poison_kind_, poison_);
  lock.unlock();
  finish(std::move(failed), error);
}

void Hub::leave(int rank) {
  std::unique_lock lock(mutex_);
  left_[static_cast<std::size_t>(rank)] = true;
  const bool awaited = std::any_of(collectives_.begin(), collectives_.end(), [&](const auto& entry) {
    return !entry.second.parts[static_cast<std::size_t>(rank)];
  });
  auto waits = [&](const Waiting& waiting) { return nobody_left(waiting.rank, waiting.op.call.root); };
  if (awaited || std::any_of(sends_.begin(), sends_.end(), waits) ||
      std::any_of(receives_.begin(), receives_.end(), waits))
    fail_all(std::move(lock), fmt::format("rank {} has left the group", rank), CommError::Kind::peer_died);
}

bool Hub::is_awaited(int rank) const {
  std::lock_guard lock(mutex_);
  return std::any_of(collectives_.begin(), collectives_.end(),
                     [&](const auto& entry) { return !entry.second.parts[static_cast<std::size_t>(rank)]; });
}

bool Hub::nobody_left(int rank, int peer) const {
  if (peer != kAnySource) return left_[static_cast<std::size_t>(peer)];
  for (std::size_t r = 0; r < left_.size(); ++r)
    if (static_cast<int>(r) != rank && !left_[r]) return false;
  return true;
}

std::string Hub::absent(std::uint64_t sequence) const {
  std::vector<std::size_t> missing;
  {
    std::lock_guard lock(mutex_);
    auto collective = collectives_.find(sequence);
    if (collective == collectives_.end()) return poison_;  // a verdict, or no rank is absent
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      if (!collective->second.parts[r]) missing.push_back(r);
  }
  std::vector<std::string> texts;
  for (auto r : missing)
    texts.push_back(fmt::format("rank {} has not arrived: {}", r, whereabouts_->describe(ranks_[r])));
  return fmt::format("{}", fmt::join(texts, "; "));
}

void Hub::execute(Collective& collective) {
  auto& parts = collective.parts;
  const Call& call = parts[0]->call;
  const std::size_t p = parts.size(), item = parts[0]->item_size;
  const auto root = static_cast<std::size_t>(std::max(call.root, 0));

  // The tree over inputs, chunk by chunk into outputs[0], and from there to the other outputs.
  auto reduce_to = [&](const std::vector<const void*>& inputs, const std::vector<void*>& outputs,
                       std::int64_t count) {
    const auto step = static_cast<std::int64_t>(std::max<std::size_t>(1, kChunkBytes / item));
    for (std::int64_t start = 0; start < count; start += step) {
      const auto n = std::min(step, count - start);
      const auto offset = static_cast<std::size_t>(start) * item;
      auto in_at = [&](const void* base) { return static_cast<const char*>(base) + offset; };
      auto out_at = [&](void* base) { return static_cast<char*>(base) + offset; };
      std::vector<const void*> chunk;
      for (const void* base : inputs) chunk.push_back(in_at(base));
      reduce_tree(call.dtype, call.reduction, chunk, out_at(outputs[0]), static_cast<std::size_t>(n));
      for (std::size_t i = 1; i < outputs.size(); ++i) copy(out_at(outputs[i]), out_at(outputs[0]), n, item);
    }
  };

  switch (call.operation) {
    case Operation::all_reduce:
    case Operation::reduce: {
      std::vector<const void*> inputs;
      std::vector<void*> outputs;
      for (auto& op : parts) inputs.push_back(op->outputs.at(0));
      for (std::size_t r = 0; r < p; ++r)
        if (call.operation == Operation::all_reduce || r == root) outputs.push_back(parts[r]->outputs.at(0));
      return reduce_to(inputs, outputs, call.count);
    }
    case Operation::reduce_scatter:
      for (std::size_t r = 0; r < p; ++r) {
        std::vector<const void*> inputs;
        for (auto& op : parts) inputs.push_back(op->inputs.at(r));
        reduce_to(inputs, {parts[r]->outputs.at(0)}, call.to.at(r));
      }
      return;
    case Operation::broadcast:
      for (auto& op : parts) copy(op->outputs.at(0), parts[root]->outputs.at(0), call.count, item);
      return;
    case Operation::all_gather:
      for (auto& op : parts)
        for (std::size_t r = 0; r < p; ++r)
          copy(op->outputs.at(r), parts[r]->inputs.at(0), call.from.at(r), item);
      return;
    case Operation::gather:
      for (std::size_t r = 0; r < p; ++r)
        copy(parts[root]->outputs.at(r), parts[r]->inputs.at(0), parts[r]->call.count, item);
      return;
    case Operation::scatter:
      for (std::size_t r = 0; r < p; ++r)
        copy(parts[r]->outputs.at(0), parts[root]->inputs.at(r), parts[r]->call.count, item);
      return;
    case Operation::all_to_all:
      for (std::size_t from = 0; from < p; ++from)
        for (std::size_t to = 0; to < p; ++to)
          copy(parts[to]->outputs.at(from), parts[from]->inputs.at(to), parts[from]->call.to.at(to), item);
      return;
    case Operation::barrier: return;
    case Operation::send:
    case Operation::recv: break;
  }
  LOCKSTEP_ASSERT(false, "a point-to-point operation among the collectives");
}

}  // namespace lockstep::detail
