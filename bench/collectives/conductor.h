// Starts the ranks of the peers and runs the peers in turn.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "page.h"

namespace lockstep::bench {

// What is measured (Cell), and which backend and memory measure it (Peer).
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
  std::string self, lockstep, openmpi, mpirun;  // Paths of programs; the last two are empty without Open MPI.
  int cores = 1;
  // auto: bind each rank to a core if there are enough, except Gloo's; cores: also bind Gloo's; none.
  std::string bind = "auto";
  double seconds = 0.3;  // Approximate time per row.
};

// known_peers() lists all backends, starting with those measured by default. missing() says why a peer cannot
// be measured here; empty if it can.
std::vector<Peer> known_peers();
bool by_default(const Peer& peer);
std::string missing(const Peer& peer, const Settings& settings);

// Measures the cells, which must all have the same number of ranks, with all peers in turn; calls done()
// after each cell. Throws if a peer fails.
void measure(const std::vector<Cell>& cells, const std::vector<Peer>& peers, const Settings& settings,
             const std::function<void(const std::vector<Row>&)>& done);

// Runs a rank of a peer, started by measure(). Returns on the order to leave.
void run_rank(const std::string& backend, const std::string& page);

}  // namespace lockstep::bench
