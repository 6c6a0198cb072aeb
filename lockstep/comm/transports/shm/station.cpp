#include <lockstep/comm/transports/shm/station.h>

#include <charconv>

#include <fmt/format.h>
#include <lockstep/base/error.h>

namespace lockstep::shm {

Station::Station(int rank, int ranks, const Words& words, Clock::time_point deadline,
                 const std::function<void()>& check)
    : rank_(rank), ranks_(ranks) {
  auto key = [](int each) { return fmt::format("rank {}", each); };
  std::uint64_t offered = 0;
  if (rank == 0) {
    segment_ = Segment::make(Region::size_for(ranks));
    region().prepare();
    offered = Post::instance().offer(segment_);
  }
  words.set(key(rank), fmt::format("{} {}", Post::instance().name(), offered));
  for (int r = 0; r < ranks; ++r) {
    const auto word = words.get(key(r));
    const auto blank = word.find(' ');
    std::uint64_t id = 0;
    if (blank == std::string::npos ||
        std::from_chars(word.data() + blank + 1, word.data() + word.size(), id).ec != std::errc())
      throw Error(fmt::format("rank {} left a word that makes no sense", r));
    peers_.push_back(r == rank ? nullptr : Peer::reach(word.substr(0, blank)));
    if (r == 0 && rank != 0) segment_ = peers_[0]->segment(id);
  }
  if (segment_->size() < Region::size_for(ranks))
    throw Error("the ranks disagree on the shared memory of the group: are all of the same build?");

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
          throw TimedOut(fmt::format("rank {} did not come to the group's shared memory", r));
        futex_wait(region().line(r).joined, 0, std::chrono::milliseconds(20));
      }
  } catch (...) {
    Holder::let_go(region().line(rank).alive);
    throw;
  }
  if (rank == 0) Post::instance().withdraw(offered);
}

Station::~Station() { Holder::let_go(region().line(rank_).alive); }

char* Station::map(int rank, Place place, std::size_t bytes) {
  return peers_[static_cast<std::size_t>(rank)]->map(place, bytes);
}

}  // namespace lockstep::shm
