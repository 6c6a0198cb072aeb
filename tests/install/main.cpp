#include <iostream>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main() {
  auto world = lockstep::World::from_environment();
  auto sum = torch::ones({2});
  world.group().all_reduce(sum).wait();
  if (world.is_main())
    std::cout << "consumer: " << sum[0].item<float>() << " of " << world.size() << std::endl;
  return sum[0].item<float>() == static_cast<float>(world.size()) ? 0 : 1;
}
