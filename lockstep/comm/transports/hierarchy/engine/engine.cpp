#include <lockstep/comm/transports/hierarchy/engine/engine.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/base/left_behind.h>
#include <lockstep/comm/reduce/reduce.h>
#include <lockstep/comm/transports/hierarchy/engine/window.h>
#include <lockstep/memory/align.h>

namespace lockstep::hierarchy {
namespace {

constexpr std::size_t kSmall = 2000;  // bytes of a sum that is sent with the greeting

// The sizes of pairs, if all are equal: then ranks need not exchange them.
constexpr std::int64_t kUneven = -1;
std::int64_t even_size(const Call& call) {
  if (!detail::pairwise(call.operation)) return 0;
  const bool to_each = call.operation != Operation::gather, from_each = call.operation != Operation::scatter;
  std::int64_t size = call.count;
  if (call.operation == Operation::all_to_all) size = call.to.at(0);
  for (const auto* table : {to_each ? &call.to : nullptr, from_each ? &call.from : nullptr})
    if (table != nullptr &&
        std::any_of(table->begin(), table->end(), [&](auto each) { return each != size; }))
      return kUneven;
  return size;
}

bool is_small_sum(const Call& call) {
  return (call.operation == Operation::all_reduce || call.operation == Operation::reduce) &&
         static_cast<std::size_t>(call.count) <= kSmall / detail::item_size(detail::accumulator(call.dtype));
}

ReduceOp partial(ReduceOp op) { return op == ReduceOp::AVG ? ReduceOp::SUM : op; }

}  // namespace

// The same length for every call: a receiver does not know the call before it has read the greeting.
struct Engine::Greeting {
  std::uint64_t lowest, highest;       // digests of the calls
  std::int64_t least_even, most_even;  // sizes of pairs
  char sum[kSmall];

  bool fits() const { return lowest == highest; }
};

Engine::Engine(Hosts hosts, std::unique_ptr<shm::Engine> inside, std::shared_ptr<Links> links,
               shm::Memory* memory, Tuning tuning)
    : hosts_(std::move(hosts)),
      inside_(std::move(inside), hosts_.place(), static_cast<int>(hosts_.neighbours().size())),
      links_(std::move(links)),
      memory_(memory),
      tuning_(tuning),
      greetings_(std::make_unique<Greeting[]>(2)) {}

Engine::~Engine() {
  if (scratch_ == nullptr) return;
  if (memory_ != nullptr)
    memory_->free(scratch_);
  else
    std::free(scratch_);
}

void Engine::give_up() noexcept {
  // Peers may still read it, or links write to it: leak it.
  if (scratch_ != nullptr && memory_ == nullptr)
    detail::leave_behind(std::shared_ptr<void>(scratch_, &std::free));
  scratch_ = nullptr;
  scratch_size_ = 0;
  detail::leave_behind(std::shared_ptr<Greeting[]>(std::move(greetings_)));
  detail::leave_behind(std::move(calls_));
  inside_.give_up();
}

void Engine::interrupt(const std::string& cause) {
  inside_.interrupt(cause);
  links_->interrupt(cause);
}

std::string Engine::absent() const {
  const int rank = awaited_.load();
  if (rank < 0) return inside_.absent();
  const auto& others = hosts_.ranks_of(hosts_.host_of(rank));
  if (others.size() == 1) return fmt::format("rank {} has not answered", rank);
  return fmt::format("rank {} has not answered: it, or another rank of its host ({}), has not arrived", rank,
                     fmt::join(others, ", "));
}

void Engine::finish(Op& part, Clock::time_point deadline) {
  deadline_ = deadline;
  if (agree(part)) return;
  switch (part.call.operation) {
    case Operation::all_reduce: return all_reduce(part);
    case Operation::reduce: return reduce(part);
    case Operation::reduce_scatter: return reduce_scatter(part);
    case Operation::broadcast: return broadcast(part);
    case Operation::all_gather: return all_gather(part);
    case Operation::gather: return gather(part);
    case Operation::scatter: return scatter(part);
    case Operation::all_to_all: return all_to_all(part);
    case Operation::barrier: return;
    case Operation::send:
    case Operation::recv: break;
  }
  LOCKSTEP_ASSERT(false, "a point-to-point operation among the collectives");
}

// ---- the greeting -----------------------------------------------------------------------------------------

// Returns true if it has completed the operation too. Takes two steps inside the host and log2(h) successive
// messages between hosts, or twice that if h is not a power of two.
bool Engine::agree(Op& part) {
  const Call& call = part.call;
  const bool small = is_small_sum(call);
  const auto count = static_cast<std::size_t>(call.count);
  Greeting own{};
  own.lowest = own.highest =
      detail::Digest().add(operations_++).add(tuning_.window).add(part.item_size).add(call).value();
  own.least_even = own.most_even = even_size(call);
  if (small && count > 0) std::memcpy(own.sum, part.outputs.at(0), count * part.item_size);

  std::vector<Greeting> all(static_cast<std::size_t>(inside_.ranks()));
  std::vector<void*> places;
  for (auto& each : all) places.push_back(&each);
  const std::vector<std::size_t> sizes(all.size(), sizeof(Greeting));
  inside_.all_gather(&own, places, sizes, deadline_);

  Greeting& outcome = greetings_[0];
  if (hosts_.leads()) {
    outcome = all[0];
    std::vector<std::vector<char>> wide;
    std::vector<const void*> sums;
    for (auto& each : all) {
      sums.push_back(each.sum);
      outcome.lowest = std::min(outcome.lowest, each.lowest);
      outcome.highest = std::max(outcome.highest, each.highest);
      outcome.least_even = std::min(outcome.least_even, each.least_even);
      outcome.most_even = std::max(outcome.most_even, each.most_even);
    }
    if (small && outcome.fits() && count > 0) {
      const auto type = detail::accumulator(call.dtype);
      if (type != call.dtype)
        for (auto& sum : sums) {
          auto& widened = wide.emplace_back(count * detail::item_size(type));
          detail::widen(call.dtype, sum, widened.data(), count);
          sum = widened.data();
        }
      detail::reduce_tree(type, partial(call.reduction), sums, outcome.sum, count);
    }
    meet_leaders(small && count > 0 ? &call : nullptr);
  }
  inside_.broadcast(0, &outcome, sizeof outcome, deadline_);

  const bool uneven = outcome.least_even != outcome.most_even || outcome.least_even == kUneven;
  if (!outcome.fits() || uneven) compare(call, outcome.fits());
  if (!small) return false;
  if (count > 0 && (call.operation == Operation::all_reduce || call.root == hosts_.rank())) {
    if (detail::accumulator(call.dtype) != call.dtype)
      detail::narrow(call.dtype, outcome.sum, part.outputs[0], count);
    else
      std::memcpy(part.outputs[0], outcome.sum, count * part.item_size);
  }
  return true;
}

// Along the tree over hosts. With a power of two, all leaders learn the outcome at once: each exchanges with
// the host that differs in one bit, bit by bit. Otherwise it goes up to the first host and down again.
void Engine::meet_leaders(const Call* sums) {
  const int hosts = hosts_.count(), own = hosts_.host();
  Greeting &greeting = greetings_[0], &other = greetings_[1];
  auto tell = [&](int host) {
    Transfers out;
    send(out, hosts_.leader_of(host), &greeting, sizeof greeting, kGreetingTag);
    wait(out);
  };
  auto hear = [&](int host, Greeting& from) {
    Transfers in;
    receive(in, hosts_.leader_of(host), &from, sizeof from, kGreetingTag);
    wait(in);
  };
  if (std::has_single_bit(static_cast<unsigned>(hosts))) {
    for (int bit = 1; bit < hosts; bit *= 2) {
      Transfers both;
      const int leader = hosts_.leader_of(own ^ bit);
      receive(both, leader, &other, sizeof other, kGreetingTag);
      send(both, leader, &greeting, sizeof greeting, kGreetingTag);
      wait(both);
      merge(greeting, other, (own & bit) == 0, sums, 2 * bit >= hosts);
    }
    return;
  }
  int bit = 1;
  for (; bit < hosts && (own & bit) == 0; bit *= 2) {
    if (own + bit >= hosts) continue;
    hear(own + bit, other);
    merge(greeting, other, true, sums, 2 * bit >= hosts);
  }
  if (own != 0) {
    tell(own - bit);
    hear(own - bit, greeting);
  }
  for (bit /= 2; bit >= 1; bit /= 2)
    if (own + bit < hosts) tell(own + bit);
}

void Engine::merge(Greeting& greeting, const Greeting& other, bool is_left, const Call* sums,
                   bool is_last) const {
  greeting.lowest = std::min(greeting.lowest, other.lowest);
  greeting.highest = std::max(greeting.highest, other.highest);
  greeting.least_even = std::min(greeting.least_even, other.least_even);
  greeting.most_even = std::max(greeting.most_even, other.most_even);
  if (sums == nullptr || !greeting.fits()) return;
  const void* inputs[] = {is_left ? greeting.sum : other.sum, is_left ? other.sum : greeting.sum};
  detail::reduce_tree(detail::accumulator(sums->dtype), is_last ? sums->reduction : partial(sums->reduction),
                      inputs, greeting.sum, static_cast<std::size_t>(sums->count), at(hosts_.size()));
}

// Every rank's call, on every rank: the leaders collect those of their hosts and exchange them.
std::vector<Call> Engine::everybodys(const Call& call) {
  Call own = call;
  own.rank = hosts_.rank();
  own.size = hosts_.size();
  const auto packed = detail::pack(own);
  const auto length = packed.size();
  auto& all = calls_;  // ordered by host
  all.resize(at(hosts_.size()) * length);
  std::vector<std::size_t> starts;
  for (int h = 0, before = 0; h < hosts_.count(); before += static_cast<int>(hosts_.ranks_of(h++).size()))
    starts.push_back(at(before) * length);
  auto start = [&](int host) { return all.data() + starts[at(host)]; };
  auto bytes = [&](int host) { return hosts_.ranks_of(host).size() * length; };

  std::vector<void*> places;
  for (std::size_t i = 0; i < hosts_.neighbours().size(); ++i)
    places.push_back(start(hosts_.host()) + i * length);
  inside_.all_gather(packed.data(), places, std::vector<std::size_t>(places.size(), length), deadline_);
  if (hosts_.leads()) {
    Transfers both;
    for (int h = 0; h < hosts_.count(); ++h) {
      if (h == hosts_.host()) continue;
      receive(both, hosts_.leader_of(h), start(h), bytes(h), kCallTag);
      send(both, hosts_.leader_of(h), start(hosts_.host()), bytes(hosts_.host()), kCallTag);
    }
    wait(both);
  }
  inside_.broadcast(0, all.data(), all.size(), deadline_);

  std::vector<Call> calls(at(hosts_.size()));
  for (int r = 0; r < hosts_.size(); ++r)
    calls[at(r)] =
        detail::unpack({start(hosts_.host_of(r)) + at(hosts_.place_of(r)) * length, length}, hosts_.size());
  return calls;
}

// Called if the greeting shows that the calls differ, or cannot show that they match.
void Engine::compare(const Call& call, bool fits) {
  const auto calls = everybodys(call);
  std::vector<const Call*> pointers;
  for (const Call& each : calls) pointers.push_back(&each);
  if (auto mismatch = detail::find_mismatch(pointers)) throw shm::Mismatch(*mismatch);
  if (!fits) throw shm::Mismatch("the ranks' calls differ in their number or in the transport's settings");
}

// ---- shared helpers ---------------------------------------------------------------------------------------

void Engine::send(Transfers& transfers, int to, const void* data, std::size_t bytes, int tag) {
  if (bytes > 0) transfers.emplace_back(to, links_->send(to, data, bytes, tag));
}

void Engine::receive(Transfers& transfers, int from, void* data, std::size_t bytes, int tag) {
  if (bytes > 0) transfers.emplace_back(from, links_->receive(from, data, bytes, tag));
}

void Engine::wait(Transfers& transfers) {
  for (auto& [peer, transfer] : transfers) {
    awaited_ = peer;
    inside_.waits_elsewhere(peer);
    links_->wait(*transfer, deadline_);
  }
  transfers.clear();
  awaited_ = -1;
  inside_.waits_elsewhere(std::nullopt);
}

char* Engine::scratch(std::size_t bytes) {
  if (scratch_size_ >= bytes) return scratch_;
  if (scratch_ != nullptr) {
    if (memory_ != nullptr)
      memory_->free(scratch_);
    else
      std::free(scratch_);
  }
  scratch_ = nullptr;
  scratch_size_ = 0;
  const auto size = memory::round_up(bytes, memory::kCacheLine);
  scratch_ = memory_ != nullptr ? memory_->allocate(size)
                                : static_cast<char*>(std::aligned_alloc(memory::kCacheLine, size));
  if (scratch_ == nullptr) throw std::bad_alloc();
  scratch_size_ = size;
  return scratch_;
}

std::size_t Engine::window_items(std::size_t item_size) const {
  const auto bytes =
      std::max(memory::round_up(tuning_.window / at(hosts_.size()), memory::kCacheLine), memory::kCacheLine);
  return bytes / item_size;
}

}  // namespace lockstep::hierarchy
