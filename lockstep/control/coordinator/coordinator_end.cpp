// How ranks and the job end: which rank is to blame, when all ranks stop, whether to restart.
#include <signal.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <lockstep/control/coordinator/coordinator.h>

namespace lockstep::control {

using std::chrono::milliseconds;

namespace {

// A rank that failed in an operation was most likely failed by a peer, whose end will be known in a moment.
constexpr milliseconds kSuspicion(500);
// Delay before a restart. It doubles each time, so that a job that fails at once does not spin.
constexpr milliseconds kFirstPause(100), kLongestPause(5000);

int status_of(const Ended& ended) {
  if (ended.signal) return 128 + *ended.signal;
  return ended.status.value_or(0) != 0 ? *ended.status : 1;
}

}  // namespace

void Coordinator::leave(int number) {
  Rank& rank = ranks_[number];
  rank.here = false;
  stragglers_.forget(number);
  store_.forget(number);
  decide_stop();
}

void Coordinator::fault(int number, const Fault& fault) {
  Rank& rank = ranks_[number];
  if (fault.kind == Fault::Kind::comm || fault.kind == Fault::Kind::uncaught_comm) {
    rank.comm_fault = fault.text;
    rank.comm_fault_at = Clock::now();
    // The rank waits for the verdict before it ends.
    if (fault.kind == Fault::Kind::uncaught_comm && !failure_ && !suspicion_)
      suspicion_ = {failure_of(number, "threw: " + fault.text), Clock::now()};
    return;
  }
  // Several ranks may throw at the same time: an exception that differs from the first one is worth a line.
  if (failure_ && options_.launches && fault.kind == Fault::Kind::exception && failure_->rank != number &&
      failure_->cause != "threw: " + fault.text)
    ports_.say(fmt::format("rank {}{} threw as well: {}", number, pid_text(number), fault.text));
  // Most likely the same exception, and the rank's end will tell. A rank that caught it has moved on.
  if (rank.comm_fault && Clock::now() - rank.comm_fault_at < kSuspicion) return;
  fail(failure_of(number, fault.kind == Fault::Kind::exception ? "threw: " + fault.text
                                                               : "leaves the job because of an exception"));
}

void Coordinator::rank_ended(int number, const Ended& ended) {
  Rank& rank = ranks_[number];
  if (failure_ && failure_->rank == number && (ended.status || ended.signal))
    failure_->status = status_of(ended);
  // A script may fail although the program that it started did not.
  if (rank.ended && !(rank.ended->clean() && !ended.clean())) return;
  rank.ended = ended;
  const bool was_here = std::exchange(rank.here, false);
  stragglers_.forget(number);
  store_.forget(number);
  decide_stop();
  if (failure_) return;
  if (stop_signal_ && (ended.clean() || ended.signal == stop_signal_)) return;
  if (ended.clean()) {
    // Harmless if no other rank is left.
    const bool others =
        std::any_of(ranks_.begin(), ranks_.end(), [](const auto& each) { return each.second.here; });
    const bool awaited = others && !rank.card;
    const bool amid =
        others && was_here &&
        std::any_of(rank.rows.rows.begin(), rank.rows.rows.end(), [](const Row& row) { return row.running; });
    if (awaited) return fail(failure_of(number, ended.text() + " before it joined"));
    if (amid) return fail(failure_of(number, ended.text() + " without leaving the job"));
    return;  // Ranks that wait for it are handled in look_at_waits.
  }
  auto failure = failure_of(number, ended.text());
  if (!rank.comm_fault || (ended.signal && ended.signal != SIGABRT && ended.signal != SIGTERM))
    return fail(std::move(failure));
  failure.cause += ": " + *rank.comm_fault;
  if (!suspicion_) suspicion_ = {std::move(failure), Clock::now()};
}

void Coordinator::look_at_suspicion(Clock::time_point now) {
  if (suspicion_ && now - suspicion_->second >= kSuspicion) fail(suspicion_->first);
}

Failure Coordinator::failure_of(int number, std::string cause) const {
  Failure failure;
  failure.rank = number;
  failure.cause = std::move(cause);
  auto found = ranks_.find(number);
  if (found == ranks_.end()) return failure;
  const Rank& rank = found->second;
  if (rank.card) failure.pid = rank.card->pid;
  if (rank.ended && rank.ended->pid != 0) failure.pid = rank.ended->pid;
  if (rank.ended) failure.status = status_of(*rank.ended);
  failure.where = where(number);
  failure.step = rank.rows.step;
  for (const Row& row : rank.rows.rows)
    if (!row.message) failure.sequence = std::max(failure.sequence, row.sequence);
  return failure;
}

void Coordinator::fail(Failure failure) {
  if (failure_) return;
  failure_ = std::move(failure);
  suspicion_.reset();
  broadcast({.kind = Kind::verdict, .rank = -1, .payload = encode(*failure_)});
  if (options_.launches) order_all(Failed{*failure_});
}

void Coordinator::stop(int signal) {
  if (stop_signal_ || finished_) return;
  stop_signal_ = signal;
  if (options_.launches && (size_ == 0 || start_at_))
    return finish({.status = 128 + signal});  // Nothing is running.
  if (options_.launches) order_all(Stop{signal});
  broadcast({.kind = Kind::stop_prepare, .rank = -1});
}

// Decides once every rank has reported how often it was asked; ranks do not ask again before the decision.
void Coordinator::decide_stop() {
  if (!stop_signal_ || stop_at_) return;
  std::int64_t highest = 0;
  for (const auto& [number, rank] : ranks_) {
    if (!rank.here) continue;
    if (rank.stop_count < 0) return;
    highest = std::max(highest, rank.stop_count);
  }
  stop_at_ = highest;
  broadcast({.kind = Kind::stop_at, .rank = -1, .payload = Writer().number(highest).take()});
}

void Coordinator::node_done(int node) {
  nodes_[node].done = true;
  if (std::all_of(nodes_.begin(), nodes_.end(), [](const auto& each) { return each.second.done; }))
    all_done();
}

// True if this attempt saved a checkpoint after a step. The next attempt then starts further on, even if the
// program counts its steps from 0 again: the same step number is not the same point.
bool Coordinator::has_committed() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& each) {
    const Rows& rows = each.second.rows;
    return rows.committed > (rows.step < 0 ? -1 : 0);
  });
}

void Coordinator::all_done() {
  if (finished_ || !options_.launches || static_cast<int>(nodes_.size()) < options_.num_nodes) return;
  const bool whole =
      std::none_of(nodes_.begin(), nodes_.end(), [](const auto& each) { return each.second.lost; });
  if (start_at_ && whole) return;
  // No other rank is left to blame. Ranks that were asked to stop are not to blame.
  if (!failure_ && suspicion_ && !stop_signal_) fail(suspicion_->first);
  tell_flight();
  Finish finish;
  if (stop_signal_) {
    finish.status = 128 + *stop_signal_;
  } else if (failure_) {
    finish.status = failure_->status;
    if (last_failure_ && last_failure_->same_as(*failure_) && !has_committed() && !start_at_) {
      finish.why = fmt::format(
          "attempts {} and {} failed in the same way, so the job is not restarted: {}; check what the "
          "program does before that point",
          attempt_ - 1, attempt_, failure_->text());
    } else if (attempt_ < options_.max_restarts && whole) {
      last_failure_ = failure_;
      ++attempt_;
      ports_.say(
          fmt::format("restarting: attempt {} of {} after the first", attempt_, options_.max_restarts));
      const auto pause = kFirstPause * (std::int64_t{1} << std::min(attempt_ - 1, 10));
      start_at_ = Clock::now() + std::min<milliseconds>(pause, kLongestPause);
      return;
    } else if (options_.max_restarts > 0) {
      finish.why = !whole ? "a lost host cannot be restarted from here"
                          : fmt::format("all {} restarts are used up", options_.max_restarts);
    }
  }
  this->finish(std::move(finish));
}

void Coordinator::tell_flight() {
  auto flights = std::exchange(flights_, {});
  if (!ports_.flight || flights.empty() || (!failure_ && !stop_signal_)) return;
  ports_.flight({.attempt = attempt_,
                 .world_size = size_,
                 .failure = failure_,
                 .groups = groups_,
                 .ranks = std::move(flights)});
}

void Coordinator::finish(Finish finish) {
  finished_ = true;
  start_at_.reset();
  order_all(finish);
}

}  // namespace lockstep::control
