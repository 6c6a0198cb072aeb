// Which rank holds the others up. All do a step in the same time, because they wait for one another; what
// differs is how much of it each waits. The rest is its own time, "busy": that of a slow rank is far above
// the others'.
//
// Decided from what ranks report of their steps alone, without a clock. A rank is named when its busy time
// was kFactor times the others' (their median, the upper one of two) in three steps in a row, and when, where
// it is known what it used to take, it takes longer than that, too: then others that have less to do make
// nobody slow. Where long steps of a rank are frequent, or come in rows, three may be chance, and more are
// asked for.
//
// Stages of a pipeline (ranks that send messages) have different work. Each is compared with itself: how much
// longer its steps take than they did, beside how much longer the others' do. One that was slow from the
// first step on is not found there.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/control/board/steps.h>

namespace lockstep::control {

class StragglerDetector {
 public:
  // In the order in which the rank made them.
  void note(int rank, const StepTime& time);
  void forget(int rank);  // it has left
  void has_stages() { stages_ = true; }
  // Ranks share processors: a rank that waits for its turn there is busy by the clock, for as long as the
  // others' turns take.
  void set_crowded(bool crowded) { crowded_ = crowded; }

  // Looks at the steps that all have told of: what there is to say.
  std::vector<std::string> judge();
  // The last steps, as far as all have told of them; `metrics` and `step` are not filled in.
  std::optional<Status> status() const;

 private:
  // Steps may be counted from the beginning again, once an epoch say: then the first number goes up.
  using Key = std::pair<std::int64_t, std::int64_t>;
  struct Entry {
    Key key;
    double steps, took_us, busy_us, waited_us;  // those in us are of one step
  };
  struct Noise {                                 // of ranks that are not slow
    double steps = 0, long_steps = 0, rows = 0;  // long ones without a cause, and in how many rows they came
  };
  struct Rank {
    std::int64_t round = 0;
    Key last{-1, -1};
    std::deque<Entry> waiting;  // to be compared
    std::deque<double> usual;   // busy times that were like the others'
    Noise noise;
    int slow = 0, fine = 0;  // steps in a row
    std::int64_t first_slow = 0;
    double slow_busy = 0, slow_other = 0, slow_ratio = 0;  // sums over them
    bool named = false;
    int times_named = 0;
    double busy = -1;  // of the last steps, for the status
  };
  struct Share {  // of a rank in one step
    Rank* rank;
    int number;
    const Entry* entry;
    double value;  // its busy time; in a pipeline: beside its own usual one
  };

  void compare(std::vector<Share>& shares, std::vector<std::string>& lines);
  void look(const Share& share, double others, std::vector<std::string>& lines);
  int needed(const Rank& rank) const;
  static double middle(const std::deque<double>& values);

  std::map<int, Rank> ranks_;
  Noise noise_;
  bool stages_ = false, crowded_ = false;
  int compared_ = 0;
  std::deque<std::pair<double, double>> recent_;  // steps, and how long they took in us
  double waiting_ = -1;
};

}  // namespace lockstep::control
