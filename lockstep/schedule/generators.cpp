// Generators of the named schedules.
#include <algorithm>
#include <functional>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/schedule/schedule.h>

namespace lockstep {
namespace {

using enum PipelineOp;

// Writes down the actions of one rank. Each kind of action counts its own micro-batches, and actions beyond
// the last micro-batch are skipped, so the patterns below need no bounds.
class Rank {
 public:
  Rank(int microbatches, std::vector<PipelineAction>& out) : microbatches_(microbatches), out_(out) {}

  bool f(int stage) { return add(forward, stage, microbatches_); }
  bool b(int stage) {
    if (!add(backward, stage, done(forward, stage))) return false;
    counts_[{input_backward, stage}] = counts_[{weight_backward, stage}] = done(backward, stage);
    return true;
  }
  bool i(int stage) { return add(input_backward, stage, done(forward, stage)); }
  bool w(int stage) { return add(weight_backward, stage, done(input_backward, stage)); }

  int done(PipelineOp op, int stage) const {
    const auto found = counts_.find({op, stage});
    return found == counts_.end() ? 0 : found->second;
  }

 private:
  bool add(PipelineOp op, int stage, int limit) {
    int& count = counts_[{op, stage}];
    if (count >= limit) return false;
    out_.push_back({op, stage, count++});
    return true;
  }

  const int microbatches_;
  std::vector<PipelineAction>& out_;
  std::map<std::pair<PipelineOp, int>, int> counts_;
};

using Write = std::function<void(Rank& rank, int r)>;

PipelineSchedule write(std::string name, const ScheduleOptions& options, int per_rank, bool folded,
                       const Write& each) {
  const int p = options.ranks;
  PipelineSchedule schedule{std::move(name), options.microbatches, {}, {}};
  for (int s = 0; s < p * per_rank; ++s)
    schedule.rank_of_stage.push_back(folded && s >= p ? 2 * p - 1 - s : s % p);
  schedule.ranks.resize(static_cast<std::size_t>(p));
  for (int r = 0; r < p; ++r) {
    Rank rank(options.microbatches, schedule.ranks[static_cast<std::size_t>(r)]);
    each(rank, r);
  }
  return schedule;
}

PipelineSchedule gpipe(const ScheduleOptions& options) {
  return write("gpipe", options, 1, false, [](Rank& rank, int r) {
    while (rank.f(r)) {
    }
    while (rank.b(r)) {
    }
  });
}

// As many forwards as there are later ranks, then one backward after each forward.
PipelineSchedule one_f_one_b(const ScheduleOptions& options) {
  const int p = options.ranks;
  return write("1f1b", options, 1, false, [&](Rank& rank, int r) {
    for (int k = 0; k < p - 1 - r; ++k) rank.f(r);
    while (rank.f(r)) rank.b(r);
    while (rank.b(r)) {
    }
  });
}

// Several stages per rank; all micro-batches pass through one stage before the next.
PipelineSchedule looped_bfs(const ScheduleOptions& options, int v) {
  const int p = options.ranks;
  return write("loopedbfs", options, v, false, [&](Rank& rank, int r) {
    for (int c = 0; c < v; ++c)
      while (rank.f(c * p + r)) {
      }
    for (int c = v - 1; c >= 0; --c)
      while (rank.b(c * p + r)) {
      }
  });
}

// Several stages per rank; micro-batches run in rounds of at least as many as there are ranks.
PipelineSchedule interleaved(const ScheduleOptions& options, int v) {
  const int p = options.ranks, m = options.microbatches;
  const int rounds = std::max(1, m / p);
  if (m % rounds != 0)
    throw ConfigError(
        fmt::format("interleaved1f1b: {0} micro-batches on {1} ranks cannot be divided into {2} rounds; "
                    "use fewer than {3} micro-batches, or a multiple of {2}, such as {4}",
                    m, p, rounds, 2 * p, m / rounds * rounds));
  const int round = m / rounds;
  return write("interleaved1f1b", options, v, false, [&](Rank& rank, int r) {
    const int all = m * v;
    int forwards = 0, backwards = 0;
    auto forward = [&] { rank.f(forwards++ / round % v * p + r); };
    auto backward = [&] { rank.b((v - 1 - backwards++ / round % v) * p + r); };
    const int ahead = std::min(all, (v - 1) * round + 2 * (p - 1 - r));
    while (forwards < ahead) forward();
    while (forwards < all) {
      forward();
      backward();
    }
    while (backwards < all) backward();
  });
}

// 1F1B with delayed weight parts: the later the stage, the later they run, so that each rank holds as many
// activations as the first. They fill the bubble at the end.
PipelineSchedule zb_h1(const ScheduleOptions& options) {
  const int p = options.ranks, m = options.microbatches;
  return write("zbh1", options, 1, false, [&](Rank& rank, int r) {
    for (int k = 0; k < p - r; ++k) rank.f(r);
    for (int k = 0; k < r && rank.done(forward, r) < m; ++k) {
      rank.i(r);
      rank.f(r);
    }
    while (rank.done(forward, r) < m) {
      rank.i(r);
      rank.w(r);
      rank.f(r);
    }
    while (rank.i(r)) rank.w(r);
    while (rank.w(r)) {
    }
  });
}

// Two stages per rank, folded: the first rank has the first and the last stage. With at least twice as many
// micro-batches as ranks, no rank idles between its first and its last action.
PipelineSchedule zb_v(const ScheduleOptions& options) {
  const int p = options.ranks, m = options.microbatches;
  return write("zbv", options, 2, true, [&](Rank& rank, int r) {
    const int down = r, up = 2 * p - 1 - r;
    auto whole = [&](int stage) {
      rank.i(stage);
      rank.w(stage);
    };
    for (int k = 0; k < 2 * (p - r) - 1; ++k) rank.f(down);
    for (int k = 0; k < r; ++k) {
      rank.f(up);
      rank.f(down);
    }
    for (int k = 0; k < p - r; ++k) {
      rank.f(up);
      whole(up);
    }
    while (rank.done(forward, up) < rank.done(forward, down) || rank.done(forward, down) < m) {
      rank.f(down);
      whole(down);
      rank.f(up);
      whole(up);
    }
    for (int k = 0; k < r; ++k) {
      rank.i(down);
      rank.i(up);
    }
    for (int k = 0; k < p - r; ++k) whole(down);
    // With few micro-batches, some input parts remain.
    for (const int stage : {up, down})
      while (rank.w(stage) || rank.i(stage)) {
      }
  });
}

// Two stages per rank, folded. In the middle, forward of one stage is adjacent to backward of the other, so
// that the transfers of one overlap the other.
PipelineSchedule dual_pipe_v(const ScheduleOptions& options) {
  const int p = options.ranks, m = options.microbatches;
  if (m < 2 * p)
    throw ConfigError(
        fmt::format("dualpipev: expected at least {2} micro-batches on {1} ranks, got {0}", m, p, 2 * p));
  return write("dualpipev", options, 2, true, [&](Rank& rank, int r) {
    const int down = r, up = 2 * p - 1 - r, after = p - 1 - r;
    for (int k = 0; k < 2 * after; ++k) rank.f(down);
    for (int k = 0; k < r + 1; ++k) {
      rank.f(down);
      rank.f(up);
    }
    for (int k = 0; k < after; ++k) {
      rank.i(up);
      rank.w(up);
      rank.f(up);
    }
    for (int k = 0; k < m - 2 * p + r + 1; ++k) {
      rank.f(down);
      rank.i(up);
      rank.w(up);
      rank.f(up);
      rank.i(down);
      rank.w(down);
    }
    for (int k = 0; k < after; ++k) {
      rank.i(up);
      rank.w(up);
      rank.f(up);
      rank.i(down);
      rank.w(down);
    }
    // In the second half of these, weight parts are deferred to fill later gaps.
    for (int k = 0; k < r + 1; ++k) {
      const bool late = k >= (r + 1) / 2;
      rank.i(up);
      if (!late) rank.w(up);
      rank.i(down);
      if (!late) rank.w(down);
    }
    for (int k = 0; k < after; ++k) {
      if (!rank.w(up)) rank.w(down);
      rank.i(down);
    }
    for (const int stage : {up, down})
      while (rank.w(stage)) {
      }
  });
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = {"gpipe", "1f1b", "interleaved1f1b", "loopedbfs",
                                                 "zbh1",  "zbv",  "dualpipev"};
  return names;
}

PipelineSchedule make_schedule(std::string_view name, ScheduleOptions options) {
  if (std::find(schedule_names().begin(), schedule_names().end(), name) == schedule_names().end())
    throw ConfigError(
        fmt::format("unknown schedule '{}'; expected one of {}", name, fmt::join(schedule_names(), ", ")));
  if (options.ranks < 1 || options.microbatches < 1)
    throw ConfigError(
        fmt::format("ScheduleOptions: expected at least 1 rank and 1 micro-batch, got {} ranks and {} "
                    "micro-batches",
                    options.ranks, options.microbatches));
  const bool any = name == "interleaved1f1b" || name == "loopedbfs";
  const int usual = any || name == "zbv" || name == "dualpipev" ? 2 : 1;
  const int per_rank = options.stages_per_rank == 0 ? usual : options.stages_per_rank;
  if (per_rank < 1 || (!any && per_rank != usual))
    throw ConfigError(fmt::format("schedule '{1}': expected {2} per rank, got {0}", per_rank, name,
                                  any          ? "at least 1 stage"
                                  : usual == 1 ? "1 stage"
                                               : "2 stages"));
  if (name == "gpipe") return gpipe(options);
  if (name == "1f1b") return one_f_one_b(options);
  if (name == "interleaved1f1b") return interleaved(options, per_rank);
  if (name == "loopedbfs") return looped_bfs(options, per_rank);
  if (name == "zbh1") return zb_h1(options);
  if (name == "zbv") return zb_v(options);
  return dual_pipe_v(options);
}

}  // namespace lockstep
