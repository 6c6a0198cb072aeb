// Started by bench_hosts: runs all_reduce over all ranks with each transport in turn, in a new World each
// time, so that other load on the machine affects all of them. Rank 0 prints "transport bytes memory
// microseconds".
//
//   hosts_rank ROUNDS BYTES[,BYTES...] TRANSPORT...
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/lockstep.h>
#include "cmake/multicall.h"

namespace lockstep::bench::hosts {

MULTICALL_MAIN(hosts_rank) {
  if (argc < 4) return 2;
  const int rounds = std::atoi(argv[1]);
  std::vector<std::int64_t> sizes;
  std::istringstream list(argv[2]);
  for (std::string word; std::getline(list, word, ',');) sizes.push_back(std::atoll(word.c_str()));
  for (int round = 0; round < rounds; ++round)
    for (int i = 3; i < argc; ++i) {
      auto world = lockstep::World::from_environment({.backend = argv[i]});
      auto group = world.group();
      for (auto bytes : sizes)
        for (bool allocated : {false, true}) {
          auto tensor = allocated ? group.allocate({bytes / 4}) : at::empty({bytes / 4});
          const int times = bytes > 100'000 ? 6 : 60;
          std::vector<double> taken;
          for (int time = 0; time < times + 2; ++time) {
            tensor.fill_(group.rank() + time);
            group.barrier().wait();
            const auto begin = std::chrono::steady_clock::now();
            group.all_reduce(tensor).wait();
            const std::chrono::duration<double, std::micro> elapsed =
                std::chrono::steady_clock::now() - begin;
            const int p = group.size();
            if (tensor[bytes / 4 - 1].item<float>() != static_cast<float>(p * (p - 1) / 2 + p * time))
              return 3;
            if (time >= 2) taken.push_back(elapsed.count());
          }
          std::sort(taken.begin(), taken.end());
          if (group.rank() == 0)
            std::cout << fmt::format("{} {} {} {:.1f}\n", argv[i], bytes, allocated ? "allocated" : "plain",
                                     taken[taken.size() / 2])
                      << std::flush;
        }
    }
  return 0;
}

}  // namespace lockstep::bench::hosts
