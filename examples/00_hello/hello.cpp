// Every rank tells what it sees, and they add up a tensor together.
//
//   lockstep run -n 4 build/bin/00_hello        or alone: build/bin/00_hello
#include <iostream>
#include <sstream>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace ls = lockstep;

int main() {
  auto world = ls::World::from_environment();
  auto group = world.group();

  auto mine = torch::full({4}, world.rank() + 1.0, world.device());
  auto sum = mine.clone();
  group.all_reduce(sum).wait();

  std::ostringstream line;
  line << "rank " << world.rank() << " of " << world.size() << " (local " << world.local_rank() << ", "
       << world.device() << ", " << group.backend(world.device().type()) << "): mine "
       << mine[0].item<double>() << ", the sum of all " << sum[0].item<double>();
  // In the order of the ranks: each prints its line when the one before it has.
  for (const auto& each : group.all_gather_values(line.str()))
    if (world.is_main()) std::cout << each << '\n';
}
