// Starts the peers' ranks and gives each peer its turns.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "page.h"

namespace lockstep::bench {

// What is measured, and by whom.
struct Cell {
  Op op = Op::all_reduce;
  Type type = Type::float32;
  int ranks = 2;
  std::int64_t bytes = 0;
  bool operator==(const Cell&) const = default;
};
struct Peer {
  std::string backend, memory;
};

struct Row {
  Cell cell;
  Peer peer;
  double us_median = 0, us_p10 = 0, us_p90 = 0;
  double gigabytes_per_second() const {
    return us_median > 0 ? static_cast<double>(cell.bytes) / us_median / 1e3 : 0;
  }
};

struct Settings {
  std::string self, lockstep, openmpi, mpirun;  // programs; the last two are empty without Open MPI
  int cores = 1;
  // auto: each rank to a core of its own, where there are enough, but for Gloo's; cores: Gloo's, too; none.
  std::string bind = "auto";
  double seconds = 0.3;  // for each row, about
};

// All backends this program knows, those without a flag first; why one cannot be measured here, else nothing.
std::vector<Peer> known_peers();
bool by_default(const Peer& peer);
std::string missing(const Peer& peer, const Settings& settings);

// Measures the cells, all of which have the same number of ranks, by all peers in turn; done is told after
// each cell. Throws when a peer fails.
void measure(const std::vector<Cell>& cells, const std::vector<Peer>& peers, const Settings& settings,
             const std::function<void(const std::vector<Row>&)>& done);

// A rank of a peer's, started by measure(): returns when it is told to leave.
void run_rank(const std::string& backend, const std::string& page);

}  // namespace lockstep::bench
