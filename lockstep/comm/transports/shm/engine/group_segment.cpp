#include <lockstep/comm/transports/shm/engine/group_segment.h>

#include <sched.h>

#include <algorithm>
#include <sstream>

#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace lockstep::shm {
namespace {

// One character for each processor: '1' if this process may run on it. Never empty.
std::string own_processors() {
  // The kernel rejects a set that is smaller than its own.
  for (std::size_t most = CPU_SETSIZE; most <= std::size_t{1} << 20; most *= 2) {
    std::vector<cpu_set_t> sets(most / CPU_SETSIZE);
    const auto bytes = sets.size() * sizeof(cpu_set_t);
    if (::sched_getaffinity(0, bytes, sets.data()) != 0) continue;
    std::string text(most, '0');
    for (std::size_t i = 0; i < most; ++i)
      if (CPU_ISSET_S(i, bytes, sets.data())) text[i] = '1';
    text.resize(text.find_last_of('1') + 1);
    return text.empty() ? "0" : text;
  }
  return "0";
}

// The region, published for the other ranks to map.
struct Offer {
  std::uint64_t id = 0;
  ~Offer() {
    if (id != 0) SegmentServer::instance().withdraw(id);
  }
};

}  // namespace

GroupSegment::GroupSegment(int rank, int ranks, const HostInfo& host_info, const KeyValue& key_value,
                           Clock::time_point deadline, const std::function<void()>& check)
    : rank_(rank), ranks_(ranks) {
  auto key = [](int each) { return fmt::format("rank {}", each); };
  Offer offer;
  if (rank == 0) {
    segment_ = Segment::make(Region::size_for(ranks));
    region().prepare();
    offer.id = SegmentServer::instance().offer(segment_);
  }
  key_value.set(key(rank),
                fmt::format("{} {} {}", SegmentServer::instance().name(), own_processors(), offer.id));
  for (int r = 0; r < ranks; ++r) {
    std::istringstream word(key_value.get(key(r)));
    std::string name;
    std::uint64_t id = 0;
    if (!(word >> name >> processors_.emplace_back() >> id))
      throw Error(
          fmt::format("rank {} published an invalid address of its shared memory", host_info.name(r)));
    peers_.push_back(r == rank ? nullptr : Peer::reach(name));
    if (r == 0 && rank != 0) segment_ = peers_[0]->segment(id, check);
  }
  if (segment_->size() < Region::size_for(ranks))
    throw Error("the ranks disagree on the size of the group's shared memory: do all run the same build?");

  if (rank == 0) region().shared().roomy.store(has_room(host_info) ? 1 : 0, std::memory_order_relaxed);
  Holder::hold(region().line(rank).alive);
  try {
    meet(1, host_info, deadline, check);  // all ranks have read all keys and hold their locks
    key_value.forget(key(rank));
    meet(2, host_info, deadline, check);  // all keys are deleted
  } catch (...) {
    Holder::let_go(region().line(rank).alive);
    throw;
  }
}

void GroupSegment::meet(std::uint32_t stage, const HostInfo& host_info, Clock::time_point deadline,
                        const std::function<void()>& check) {
  Line& line = region().line(rank_);
  line.joined.store(stage, std::memory_order_seq_cst);
  futex_wake_all(line.joined);
  for (int r = 0; r < ranks_; ++r) {
    auto& joined = region().line(r).joined;
    for (auto seen = joined.load(); seen < stage; seen = joined.load()) {
      futex_wait(joined, seen, std::chrono::milliseconds(20));
      check();
      if (joined.load() >= stage) break;
      if (r != rank_ && peers_[static_cast<std::size_t>(r)]->has_ended())
        throw PeerLost(host_info.name(r), fmt::format("rank {} has ended", host_info.name(r)));
      if (Clock::now() >= deadline)
        throw TimedOut(fmt::format("rank {} did not join the group's shared memory", host_info.name(r)));
    }
  }
}

GroupSegment::~GroupSegment() {
  if (fork_generation() == generation_) Holder::let_go(region().line(rank_).alive);
}

bool GroupSegment::has_room(const HostInfo& host_info) const {
  const int threads = std::max(host_info.threads, 1), local_ranks = host_info.local_ranks;
  const bool bound = std::any_of(processors_.begin(), processors_.end(),
                                 [&](const auto& each) { return each != processors_[0]; });
  std::size_t all = 0;
  for (std::size_t i = 0; i < CPU_SETSIZE; ++i)
    all += std::any_of(processors_.begin(), processors_.end(),
                       [&](const auto& each) { return i < each.size() && each[i] == '1'; });
  // Ranks bound to separate processors have them to themselves, whatever else runs on the host.
  const auto needed = static_cast<std::size_t>((bound ? ranks_ : std::max(ranks_, local_ranks)) * threads);
  const auto quota = host::cpu_quota();
  return needed <= all && (!quota || static_cast<double>(std::max(ranks_, local_ranks) * threads) <= *quota);
}

char* GroupSegment::map(int rank, Place place, std::size_t bytes, const WaitLimit& limit) {
  try {
    return peers_[static_cast<std::size_t>(rank)]->map(place, bytes, [&] { limit.check(); });
  } catch (const Error& error) {
    // Most likely the rank has ended: that is known in a moment and explains more.
    limit.check();
    const int name = limit.barrier.name(rank);
    throw PeerLost(name, fmt::format("cannot map the shared memory of rank {}: {}", name, error.what()));
  }
}

}  // namespace lockstep::shm
