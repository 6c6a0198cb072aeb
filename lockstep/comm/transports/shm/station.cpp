#include <lockstep/comm/transports/shm/station.h>

#include <sched.h>

#include <algorithm>
#include <sstream>

#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace lockstep::shm {
namespace {

// One character for each processor: '1' where this process may run on it.
std::string own_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(0, sizeof set, &set);
  std::string text;
  for (int i = 0;
       i < CPU_SETSIZE && static_cast<int>(std::count(text.begin(), text.end(), '1')) < CPU_COUNT(&set); ++i)
    text += CPU_ISSET(i, &set) ? '1' : '0';
  return text;
}

}  // namespace

Station::Station(int rank, int ranks, const Company& company, const Words& words, Clock::time_point deadline,
                 const std::function<void()>& check)
    : rank_(rank), ranks_(ranks) {
  auto key = [](int each) { return fmt::format("rank {}", each); };
  auto called = [&](int each) {
    return company.names.empty() ? each : company.names.at(static_cast<std::size_t>(each));
  };
  std::uint64_t offered = 0;
  if (rank == 0) {
    segment_ = Segment::make(Region::size_for(ranks));
    region().prepare();
    offered = Post::instance().offer(segment_);
  }
  words.set(key(rank), fmt::format("{} {} {}", Post::instance().name(), own_processors(), offered));
  for (int r = 0; r < ranks; ++r) {
    std::istringstream word(words.get(key(r)));
    std::string name;
    std::uint64_t id = 0;
    if (!(word >> name >> processors_.emplace_back() >> id))
      throw Error(fmt::format("rank {} left a word that makes no sense", called(r)));
    peers_.push_back(r == rank ? nullptr : Peer::reach(name));
    if (r == 0 && rank != 0) segment_ = peers_[0]->segment(id, check);
  }
  if (segment_->size() < Region::size_for(ranks))
    throw Error("the ranks disagree on the shared memory of the group: are all of the same build?");

  if (rank == 0) region().shared().roomy.store(has_room(company) ? 1 : 0, std::memory_order_relaxed);
  // All have it, and all hold their locks, before anybody goes on.
  Holder::hold(region().line(rank).alive);
  try {
    Line& line = region().line(rank);
    line.joined.store(1, std::memory_order_seq_cst);
    futex_wake_all(line.joined);
    for (int r = 0; r < ranks; ++r)
      while (region().line(r).joined.load(std::memory_order_seq_cst) == 0) {
        check();
        if (Clock::now() >= deadline)
          throw TimedOut(fmt::format("rank {} did not come to the group's shared memory", called(r)));
        futex_wait(region().line(r).joined, 0, std::chrono::milliseconds(20));
      }
  } catch (...) {
    Holder::let_go(region().line(rank).alive);
    throw;
  }
  if (rank == 0) Post::instance().withdraw(offered);
}

Station::~Station() {
  if (fork_generation() == generation_) Holder::let_go(region().line(rank_).alive);
}

bool Station::has_room(const Company& company) const {
  const int threads = std::max(company.threads, 1), local_ranks = company.local_ranks;
  const bool bound = std::any_of(processors_.begin(), processors_.end(),
                                 [&](const auto& each) { return each != processors_[0]; });
  std::size_t all = 0;
  for (std::size_t i = 0; i < CPU_SETSIZE; ++i)
    all += std::any_of(processors_.begin(), processors_.end(),
                       [&](const auto& each) { return i < each.size() && each[i] == '1'; });
  // Ranks that are bound apart have theirs for themselves, whoever else is on the host.
  const auto needed = static_cast<std::size_t>((bound ? ranks_ : std::max(ranks_, local_ranks)) * threads);
  const auto quota = host::cpu_quota();
  return needed <= all && (!quota || static_cast<double>(std::max(ranks_, local_ranks) * threads) <= *quota);
}

char* Station::map(int rank, Place place, std::size_t bytes, const Patience& patience) {
  try {
    return peers_[static_cast<std::size_t>(rank)]->map(place, bytes, [&] { patience.check(); });
  } catch (const Error& error) {
    // Most likely it has ended: that is known in a moment, and says more.
    patience.check();
    const int name = patience.meeting.name(rank);
    throw PeerLost(name, fmt::format("the shared memory of rank {} cannot be had: {}", name, error.what()));
  }
}

}  // namespace lockstep::shm
