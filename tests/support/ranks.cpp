#include "support/ranks.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>

#include <fmt/format.h>
#include <lockstep/comm/c10d/transport.h>
#include <torch/cuda.h>

#include "support/fake_nccl.h"

namespace lockstep::testing {
namespace {

std::string chosen_transport = "threads";
int chosen_ranks = 1;
std::unique_ptr<World> process_world;

// Works before there is a World, with the launcher's own variables.
std::string rank_of_process() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"})
    if (const char* rank = std::getenv(name)) return rank;
  return "0";
}

// The number of processes that the launcher started, or nullopt.
std::optional<int> launched_ranks() {
  for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    if (const char* size = std::getenv(name)) return std::atoi(size);
  return {};
}

int local(const char* name, int fallback) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : fallback;
}

// Why this machine cannot run them, or nullopt.
std::string missing() {
  const auto devices = static_cast<int>(torch::cuda::device_count());
  const int needed = local("LOCAL_WORLD_SIZE", 1);
  if (chosen_transport == "nccl" && devices < needed)
    return fmt::format("NCCL needs a GPU for every rank; there are {} for {}", devices, needed);
  if (chosen_transport == "cuda_ipc" && !detail::cuda_ipc_available())
    return fmt::format("cuda_ipc needs a GPU, a LibTorch with CUDA and kernels by nvcc; there are {} GPUs",
                       devices);
  return {};
}

// Ranks other than 0 print only failures, each line with the rank.
class FailuresOnly : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    fmt::print("rank {} failed: {}:{}: {}\n", rank_of_process(), result.file_name() ? result.file_name() : "",
               result.line_number(), result.message());
    std::fflush(stdout);
  }
};

}  // namespace

const std::string& transport() { return chosen_transport; }
int num_ranks() {
  if (ranks_are_threads()) return chosen_ranks;
  return process_world ? process_world->size() : launched_ranks().value_or(1);
}
bool compares_calls() {
  const bool must_be_asked = chosen_transport == "gloo" || chosen_transport == "mpi" || by_nccls_rules();
  const char* check = std::getenv("LOCKSTEP_CHECK");
  return !must_be_asked || (check != nullptr && std::string_view(check) == "1");
}
at::Device test_device() {
  if (chosen_transport != "nccl" && chosen_transport != "cuda_ipc") return at::kCPU;
  const int devices = std::max(1, static_cast<int>(torch::cuda::device_count()));
  return {at::kCUDA, static_cast<c10::DeviceIndex>(local("LOCAL_RANK", 0) % devices)};
}
bool ranks_are_threads() { return chosen_transport == "threads" || chosen_transport == "fake_nccl"; }
bool by_nccls_rules() { return chosen_transport == "nccl" || chosen_transport == "fake_nccl"; }

World fresh_world(WorldOptions options) {
  options.backend = chosen_transport;
  return World::from_environment(std::move(options));
}

void on_every_rank(const std::function<void(World&)>& body) {
  const WorldOptions options{.timeout = std::chrono::minutes(3), .join_timeout = std::chrono::minutes(3)};
  if (ranks_are_threads()) return run_threads(chosen_ranks, body, options);
  if (!process_world) process_world = std::make_unique<World>(fresh_world(options));
  body(*process_world);
}

}  // namespace lockstep::testing

int main(int argc, char** argv) {
  using namespace lockstep::testing;
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--transport=")) chosen_transport = argument.substr(12);
    if (argument.starts_with("--ranks=")) chosen_ranks = std::atoi(argv[i] + 8);
  }
  if (chosen_transport == "fake_nccl") use_fake_nccl();
  if (const auto reason = missing(); !reason.empty()) {
    fmt::print("skipped: {}\n", reason);
    return 77;  // ctest's SKIP_RETURN_CODE
  }
  if (rank_of_process() != "0") {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    delete listeners.Release(listeners.default_xml_generator());
    listeners.Append(new FailuresOnly);
  }
  const int status = RUN_ALL_TESTS();
  // Together: some launchers end the job when its first process ends.
  if (process_world) process_world->group().barrier().wait();
  process_world.reset();
  return status;
}
