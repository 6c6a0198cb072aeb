// Keeps thousands of small tensors alive for bench_allocator. Reads "CASE STEPS" from standard input, runs
// that many steps and prints their processor time in seconds; for "memory 0", prints the resident memory in
// MiB. With the argument "own", LibTorch's CPU tensors are allocated by Lockstep.
#include <unistd.h>

#include <condition_variable>
#include <ctime>
#include <deque>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

namespace {

using Tensors = std::vector<torch::Tensor>;

torch::Tensor small(std::int64_t elements) {
  auto tensor = torch::empty({elements});
  *tensor.mutable_data_ptr<float>() = 1;  // The rest stays uninitialised: this measures the allocator.
  return tensor;
}

// One step of one environment in PPO: observation, action, log probability, value, reward.
constexpr std::int64_t kTransition[] = {84, 6, 1, 1, 1};

// PPO: collects 4,096 transitions, stacks and drops them.
void rollout(std::int64_t steps) {
  std::vector<Tensors> kept(std::size(kTransition));
  for (std::int64_t i = 0; i < steps; ++i) {
    for (std::size_t part = 0; part < kept.size(); ++part) kept[part].push_back(small(kTransition[part]));
    if ((i + 1) % 4096 != 0 && i + 1 < steps) continue;
    for (auto& list : kept) {
      torch::stack(list);
      list.clear();
    }
  }
}

// Off-policy: a ring of 20,000 transitions, of which the oldest is replaced; every 16th step stacks a batch
// of 64.
void replay(std::int64_t steps) {
  static std::vector<Tensors> ring(20'000);
  static std::size_t next = 0;
  static std::mt19937 draw(1);
  for (std::int64_t i = 0; i < steps; ++i) {
    auto& slot = ring[next++ % ring.size()];
    slot.clear();
    for (const auto elements : kTransition) slot.push_back(small(elements));
    if (i % 16 != 0 || next < ring.size()) continue;
    for (std::size_t part = 0; part < std::size(kTransition); ++part) {
      Tensors batch;
      for (int k = 0; k < 64; ++k) batch.push_back(ring[draw() % ring.size()][part]);
      torch::stack(batch);
    }
  }
}

// Tree search: 30,000 nodes with tensors of 1 to 2,000 elements, replaced in random order.
void tree(std::int64_t steps) {
  static Tensors nodes(30'000);
  static std::mt19937 draw(2);
  for (std::int64_t i = 0; i < steps; ++i) {
    const auto elements =
        1 + static_cast<std::int64_t>(draw() % 2000) * (draw() % 4 == 0 ? 1 : 0) + draw() % 40;
    nodes[draw() % nodes.size()] = small(static_cast<std::int64_t>(elements));
  }
}

// A training step, for comparison: keeps 40 tensors of 16 KiB to 4 MiB, then drops them from last to first,
// as backward does. Writes to each page.
void activations(std::int64_t steps) {
  for (std::int64_t i = 0; i < steps; ++i) {
    Tensors kept;
    for (std::int64_t k = 0; k < 40; ++k) {
      auto& tensor =
          kept.emplace_back(torch::empty({(k % 8 + 1) * (k % 8 + 1) * 4096 * (k % 5 + 1) / (1 + k % 2)}));
      auto* values = tensor.mutable_data_ptr<float>();
      for (std::int64_t at = 0; at < tensor.numel(); at += 1024) values[at] = 1;
    }
    while (!kept.empty()) kept.pop_back();
  }
}

// Actors and a learner: one thread allocates what another drops.
void handed_over(std::int64_t steps) {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::vector<Tensors>> queue;
  std::thread learner([&] {
    for (std::int64_t done = 0; done < steps;) {
      std::vector<Tensors> part;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return !queue.empty(); });
        part = std::move(queue.front());
        queue.pop_front();
      }
      changed.notify_one();
      done += static_cast<std::int64_t>(part.size());
    }
  });
  for (std::int64_t made = 0; made < steps;) {
    std::vector<Tensors> part;
    for (; part.size() < 256 && made < steps; ++made) {
      auto& transition = part.emplace_back();
      for (const auto elements : kTransition) transition.push_back(small(elements));
    }
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return queue.size() < 16; });
      queue.push_back(std::move(part));
    }
    changed.notify_one();
  }
  learner.join();
}

double memory_in_mib() {
  std::ifstream statm("/proc/self/statm");
  double size = 0, resident = 0;
  statm >> size >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

// Processor time of all threads: the cost of an allocator even if other processes use the cores.
double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  if (argc > 1 && std::string(argv[1]) == "own" && !lockstep::use_caching_cpu_allocator()) return 1;
  torch::NoGradGuard no_grad;
  const std::map<std::string, void (*)(std::int64_t)> cases = {{"rollout", rollout},
                                                               {"replay", replay},
                                                               {"tree", tree},
                                                               {"handed_over", handed_over},
                                                               {"activations", activations}};
  std::cout << "ready" << std::endl;
  std::string name;
  std::int64_t steps = 0;
  while (std::cin >> name >> steps) {
    if (name == "memory") {
      std::cout << memory_in_mib() << std::endl;
      continue;
    }
    const auto begin = processor_seconds();
    cases.at(name)(steps);
    std::cout << processor_seconds() - begin << std::endl;
  }
}
