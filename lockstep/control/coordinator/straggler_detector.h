// Finds the rank that delays its peers. All ranks take the same time for a step, because they wait for each
// other; what differs is how much of it each one waits. The rest is its own time, "busy": a slow rank's busy
// time is far above its peers'.
//
// Uses only the step times that ranks report, and no clock. A rank is named when its busy time was kFactor
// times its peers' (their median, the upper one of two) in three steps in a row, and when it also takes
// longer than it used to, if that is known: otherwise peers that have less to do would make it look slow.
// Where long steps of a rank are frequent or come in runs, three may be chance, and more are required.
//
// Stages of a pipeline (ranks that send messages) do different work. Each is compared with itself: how much
// longer its steps take than before, relative to its peers. A stage that was slow from the first step on is
// not found.
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
  // Takes a rank's steps in order.
  void note(int rank, const StepTime& time);
  void forget(int rank);  // The rank has left.
  void has_stages() { stages_ = true; }
  // Ranks share cores. A rank that waits for a core counts as busy for as long as its peers' turns take.
  void set_crowded(bool crowded) { crowded_ = crowded; }

  // Compares the steps that all ranks have reported. Returns the lines to log.
  std::vector<std::string> judge();
  // The latest steps that all ranks have reported; `metrics` and `step` are not filled in.
  std::optional<Status> status() const;

 private:
  // Steps may restart from 0, for example in each epoch; then the first number is incremented.
  using Key = std::pair<std::int64_t, std::int64_t>;
  struct Entry {
    Key key;
    double steps, took_us, busy_us, waited_us;  // Times are per step.
  };
  struct Noise {  // Of ranks that are not slow.
    // Long steps without a cause, and the number of runs they came in.
    double steps = 0, long_steps = 0, rows = 0;
  };
  struct Rank {
    std::int64_t round = 0;
    Key last{-1, -1};
    std::deque<Entry> waiting;  // Not yet compared.
    std::deque<double> usual;   // Busy times that were similar to the peers'.
    Noise noise;
    int slow = 0, fine = 0;  // Steps in a row.
    std::int64_t first_slow = 0;
    double slow_busy = 0, slow_other = 0, slow_ratio = 0;  // Sums over the slow steps.
    bool named = false;
    int times_named = 0;
    double busy = -1;  // Of the latest steps, for the status.
  };
  struct Share {  // One rank's share of a step.
    Rank* rank;
    int number;
    const Entry* entry;
    double value;  // Its busy time; in a pipeline: relative to its own usual time.
  };

  void compare(std::vector<Share>& shares, std::vector<std::string>& lines);
  void look(const Share& share, double others, std::vector<std::string>& lines);
  int needed(const Rank& rank) const;
  static double middle(const std::deque<double>& values);

  std::map<int, Rank> ranks_;
  Noise noise_;
  bool stages_ = false, crowded_ = false;
  int compared_ = 0;
  std::deque<std::pair<double, double>> recent_;  // Steps, and how long they took in us.
  double waiting_ = -1;
};

}  // namespace lockstep::control
