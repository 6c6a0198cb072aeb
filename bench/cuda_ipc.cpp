// All-reduce of CUDA tensors by ranks that share a GPU, compared with Gloo's in the same run and with a copy
// on the device:
//
//   lockstep run -n 2 bench_cuda_ipc [MiB]
//
// Each round measures the peers in turn, from a barrier until the device is idle. A time is that of the
// slowest rank, a row the median of the rounds. `alone`: one operation. `in a row`: each of ten, with one
// host synchronisation after the last.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/comm/c10d/transport.h>
#include <lockstep/lockstep.h>
#include <torch/cuda.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

namespace {

using namespace lockstep;
using Clock = std::chrono::steady_clock;

constexpr int kRounds = 15, kInARow = 10;

struct Peer {
  std::string name;
  std::function<void()> operation;
  std::vector<double> alone = {}, in_a_row = {};  // Seconds of the slowest rank.
};

// LibTorch's ProcessGroupGloo itself, in a group of its own.
std::unique_ptr<lockstep::detail::Transport> make_gloo(Group& group) {
  auto path = fmt::format("/tmp/bench_cuda_ipc.{}.{}", ::getpid(), Clock::now().time_since_epoch().count());
  path = group.broadcast_value(path);
  lockstep::detail::TransportContext context;
  context.group = "bench";
  context.ranks.resize(static_cast<std::size_t>(group.size()));
  std::iota(context.ranks.begin(), context.ranks.end(), 0);
  context.rank = group.rank();
  context.world_size = group.size();
  context.store = c10::make_intrusive<c10d::FileStore>(path, group.size());
  context.timeout = std::chrono::minutes(5);
  return lockstep::detail::make_gloo_transport(context);
}

double slowest(Group& group, double seconds) {
  const auto all = group.all_gather_values(seconds);
  return *std::max_element(all.begin(), all.end());
}

double measure(Group& group, const std::function<void()>& operation, int times) {
  torch::cuda::synchronize();
  group.barrier().wait();
  const auto start = Clock::now();
  for (int i = 0; i < times; ++i) operation();
  torch::cuda::synchronize();
  return slowest(group, std::chrono::duration<double>(Clock::now() - start).count() / times);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(double mebibytes) {
  auto world = World::from_environment({.backend = "cpu:gloo,cuda:cuda_ipc"});
  auto group = world.group();
  const auto count = static_cast<std::int64_t>(mebibytes * (1 << 20) / 4);
  const auto options = at::TensorOptions(at::kFloat).device(world.device());
  auto allocated = group.allocate({count}).zero_(), plain = at::zeros({count}, options);
  auto of_gloo = at::zeros({count}, options), other = at::zeros({count}, options);
  auto host = at::zeros({count}, at::TensorOptions(at::kFloat).pinned_memory(true));
  auto gloo = make_gloo(group);
  auto by_gloo = [&](at::Tensor tensor) {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    gloo->backend().allreduce(tensors)->wait();
  };

  std::vector<Peer> peers = {{"cuda_ipc, from allocate", [&] { group.all_reduce(allocated).wait(); }},
                             {"cuda_ipc, plain", [&] { group.all_reduce(plain).wait(); }},
                             {"gloo, copied to the host and back",
                              [&] {
                                host.copy_(of_gloo);
                                by_gloo(host);
                                of_gloo.copy_(host, /*non_blocking=*/true);
                              }},
                             {"a copy on the device", [&] { other.copy_(plain); }}};
  const std::size_t gloo_row = 2;
  bool takes_cuda = true;
  try {
    by_gloo(of_gloo);
  } catch (const std::exception& error) {
    takes_cuda = false;
    if (world.rank() == 0) fmt::print("Gloo does not accept CUDA tensors here: {:.60}\n", error.what());
  }
  if (takes_cuda) peers.insert(peers.begin() + gloo_row, {"gloo, CUDA tensors", [&] { by_gloo(of_gloo); }});

  for (auto& peer : peers)
    for (int i = 0; i < 3; ++i) measure(group, peer.operation, 1);
  for (int round = 0; round < kRounds; ++round)
    for (auto& peer : peers) {
      peer.alone.push_back(measure(group, peer.operation, 1));
      peer.in_a_row.push_back(measure(group, peer.operation, kInARow));
    }
  if (world.rank() != 0) return 0;
  const auto& base = peers[gloo_row];
  fmt::print("all_reduce of {} MiB of float32, {} ranks, {}\n", mebibytes, world.size(),
             world.device().str());
  fmt::print("{:36} {:>10} {:>10} {:>8}   {:>10} {:>10} {:>8}\n", "", "alone, ms", "GB/s", "x gloo",
             "in a row", "GB/s", "x gloo");
  for (const auto& peer : peers) {
    const auto bytes = static_cast<double>(count) * 4e-9;
    const double alone = median(peer.alone), in_a_row = median(peer.in_a_row);
    fmt::print("{:36} {:10.3f} {:10.1f} {:8.1f}   {:10.3f} {:10.1f} {:8.1f}\n", peer.name, alone * 1e3,
               bytes / alone, median(base.alone) / alone, in_a_row * 1e3, bytes / in_a_row,
               median(base.in_a_row) / in_a_row);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const double mebibytes = argc > 1 ? std::atof(argv[1]) : 25;
  if (argc > 2 || !(mebibytes > 0)) {
    fmt::print(stderr, "usage: lockstep run -n RANKS bench_cuda_ipc [MiB], with MiB above 0\n");
    return 2;
  }
  if (torch::cuda::device_count() == 0 || !lockstep::detail::cuda_ipc_available()) {
    fmt::print("skipped: no GPU, or no cuda_ipc in this build\n");
    return 0;
  }
  return run(mebibytes);
}
