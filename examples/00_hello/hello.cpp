// Every rank reports where it runs, and all ranks sum a tensor.
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
  // Rank 0 prints all lines, so that they appear in rank order.
  for (const auto& each : group.all_gather_values(line.str()))
    if (world.is_main()) std::cout << each << '\n';
}
