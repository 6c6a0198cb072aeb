#include "support/ranks.h"

#include <cstdlib>
#include <memory>
#include <string_view>

#include <fmt/format.h>

namespace lockstep::testing {
namespace {

std::string chosen_transport = "threads";
int chosen_ranks = 1;
std::unique_ptr<World> process_world;

// Ranks other than 0 print only what failed, each line with the rank.
class FailuresOnly : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    fmt::print("rank {}: {}:{}: {}\n", std::getenv("RANK") ? std::getenv("RANK") : "?",
               result.file_name() ? result.file_name() : "", result.line_number(), result.message());
    std::fflush(stdout);
  }
};

bool is_first_process() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"})
    if (const char* rank = std::getenv(name)) return std::string_view(rank) == "0";
  return true;
}

}  // namespace

const std::string& transport() { return chosen_transport; }
int num_ranks() {
  return ranks_are_threads() ? chosen_ranks : process_world ? process_world->size() : chosen_ranks;
}
bool ranks_are_threads() { return chosen_transport == "threads"; }

World fresh_world(WorldOptions options) {
  options.backend = chosen_transport;
  return World::from_environment(std::move(options));
}

void on_every_rank(const std::function<void(World&)>& body) {
  const WorldOptions options{.timeout = std::chrono::seconds(60), .join_timeout = std::chrono::seconds(60)};
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
  if (!is_first_process()) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    delete listeners.Release(listeners.default_xml_generator());
    listeners.Append(new FailuresOnly);
  }
  const int status = RUN_ALL_TESTS();
  process_world.reset();
  return status;
}
