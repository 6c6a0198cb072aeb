// lockstep-probe: collects what `lockstep doctor` cannot, because doctor does not link LibTorch.
//
//   lockstep-probe --describe                       LibTorch and the GPUs, one line of JSON
//   lockstep-probe --measure threads --ranks 4      times of a transport, one line of JSON
//   lockstep run -n 4 lockstep-probe --measure gloo --ranks 4
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <fmt/format.h>
#include <lockstep/comm/c10d/transport.h>
#include <lockstep/lockstep.h>
#include <lockstep/version.h>
#include <torch/cuda.h>
#include <torch/version.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr std::int64_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr auto kShare = 300ms;  // Time for each figure: all five take a few seconds.

// ---- --describe ----

// CUDA counts 12.4 as 12040.
Json cuda_version(int number) { return fmt::format("{}.{}", number / 1000, number % 1000 / 10); }

template <typename... Arguments>
bool call(void* library, const char* name, Arguments... arguments) {
  auto function = reinterpret_cast<int (*)(Arguments...)>(::dlsym(library, name));
  return function != nullptr && function(arguments...) == 0;
}

// Calls the driver library directly, to see GPUs that LibTorch cannot use without needing the toolkit.
void describe_driver(Json& found) {
  found["driver"] = nullptr;
  found["gpus"] = Json::array();
  void* driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return;
  int version = 0, count = 0;
  if (call(driver, "cuDriverGetVersion", &version)) found["driver"] = cuda_version(version);
  if (!call(driver, "cuInit", 0U) || !call(driver, "cuDeviceGetCount", &count)) return;
  for (int i = 0; i < count; ++i) {
    std::array<char, 256> name{};
    std::size_t bytes = 0;
    int device = 0;
    if (!call(driver, "cuDeviceGet", &device, i)) continue;
    call(driver, "cuDeviceGetName", name.data(), static_cast<int>(name.size()), device);
    call(driver, "cuDeviceTotalMem_v2", &bytes, device);
    found["gpus"].push_back({{"name", name.data()}, {"bytes", bytes}});
  }
}

Json nccl_version() {
  int number = 0;  // 2.27.5 is 22705
  if (!call(RTLD_DEFAULT, "ncclGetVersion", &number)) return nullptr;
  return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

int describe() {
  Dl_info library{};
  ::dladdr(reinterpret_cast<const void*>(&at::get_cpu_capability), &library);
  const auto& cuda = at::detail::getCUDAHooks();
  Json found = {{"lockstep", lockstep::kVersion},
                {"version", TORCH_VERSION},
                {"path", std::filesystem::path(library.dli_fname).parent_path().string()},
                {"cuda", cuda.hasCUDART() ? cuda_version(static_cast<int>(cuda.versionCUDART())) : Json()},
                {"capability", at::get_cpu_capability()},
                {"threads", at::get_num_threads()},
                {"nccl", nccl_version()},
                {"usable_gpus", torch::cuda::device_count()},
                {"nccl_transport", lockstep::detail::nccl_available()},
                {"cuda_ipc_transport", lockstep::detail::cuda_ipc_available()}};
  describe_driver(found);
  std::cout << found.dump() << std::endl;
  return 0;
}

// ---- --measure ----

double seconds_of(const std::function<void()>& once) {
  const auto begin = Clock::now();
  once();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Collective: every rank calls it. Returns rank 0's median.
double median_seconds(lockstep::Group group, const std::function<void()>& once) {
  once();  // Connections and buffers are created at first use.
  std::vector<double> times = {seconds_of(once)};
  const double share = std::chrono::duration<double>(kShare).count();
  const int more =
      group.broadcast_value(static_cast<int>(std::min(share / std::max(times[0], 1e-9), 5000.0)));
  for (int i = 0; i < more; ++i) times.push_back(seconds_of(once));
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

double rounded(double value) { return std::round(value * 1e4) / 1e4; }

Json figures_of(lockstep::World& world, const std::string& transport) {
  auto group = world.group();
  const auto device = transport == "nccl" || transport == "cuda_ipc" ? world.device() : at::Device(at::kCPU);
  auto finish = [&](lockstep::Work work) {
    work.wait();
    if (device.is_cuda()) torch::cuda::synchronize(device.index());  // wait() blocks only the stream.
  };
  auto tensor_of = [&](std::int64_t bytes) { return at::zeros({bytes / 4}, at::device(device)); };

  auto ones = at::ones({1}, at::device(device));
  finish(group.all_reduce(ones));
  if (const auto sum = ones.item<float>(); sum != static_cast<float>(world.size()))
    throw lockstep::Error(
        fmt::format("all_reduce of ones over {0} ranks: expected {0}, got {1}", world.size(), sum));

  Json figures = {{"transport", transport}, {"ranks", world.size()}};
  figures["barrier_us"] = rounded(1e6 * median_seconds(group, [&] { finish(group.barrier()); }));
  for (const auto& [key, bytes] : {std::pair("all_reduce_4B_us", 4L), {"all_reduce_4KiB_us", 4 * kKiB}}) {
    auto tensor = tensor_of(bytes);
    figures[key] = rounded(1e6 * median_seconds(group, [&] { finish(group.all_reduce(tensor)); }));
  }
  for (const auto& [key, bytes] :
       {std::pair("all_reduce_1MiB_GBps", kMiB), {"all_reduce_25MiB_GBps", 25 * kMiB}}) {
    auto tensor = tensor_of(bytes);
    const double seconds = median_seconds(group, [&] { finish(group.all_reduce(tensor)); });
    figures[key] = rounded(static_cast<double>(bytes) / 1e9 / seconds);
  }
  return figures;
}

int measure(const std::string& transport, int num_ranks) {
  // Many ranks on few cores take longer to start.
  const lockstep::WorldOptions options{
      .backend = transport, .timeout = 20s, .join_timeout = 20s + 400ms * num_ranks};
  auto body = [&](lockstep::World& world) {
    const auto figures = figures_of(world, transport);
    if (world.is_main()) std::cout << figures.dump() << std::endl;
  };
  if (transport == "threads") {
    lockstep::run_threads(num_ranks, body, options);
  } else {
    auto world = lockstep::World::from_environment(options);
    body(world);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Reports on LibTorch and the transports for `lockstep doctor`.", "lockstep-probe");
  bool described = false;
  std::string transport;
  int num_ranks = 1;
  auto* describe_option =
      app.add_flag("--describe", described, "Print LibTorch's and the GPUs' properties as JSON");
  app.add_option("--measure", transport,
                 "Benchmark a transport and print JSON: threads, shm, gloo, mpi, nccl or cuda_ipc")
      ->excludes(describe_option);
  app.add_option("--ranks", num_ranks, "Number of ranks; for threads, the number to start")
      ->check(CLI::Range(1, 4096));
  CLI11_PARSE(app, argc, argv);
  try {
    if (described) return describe();
    if (!transport.empty()) return measure(transport, num_ranks);
    throw lockstep::ConfigError("missing option: expected --describe or --measure TRANSPORT");
  } catch (const std::exception& error) {
    std::cerr << "lockstep-probe: error: " << error.what() << std::endl;
    return 1;
  }
}
