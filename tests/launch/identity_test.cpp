#include <lockstep/launch/identity.h>

#include <lockstep/base/error.h>

#include "support/environment.h"
#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::identity_from_environment;
using Variables = std::map<std::string, std::optional<std::string>>;

// Every variable that counts, unset but for those given.
Variables only(Variables given) {
  Variables all;
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
        "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "LOCKSTEP_LISTEN_FD"})
    all[name] = std::nullopt;
  for (auto& [name, value] : given) all[name] = value;
  return all;
}

Variables torchrun(Variables changes = {}) {
  Variables variables{{"RANK", "3"},        {"WORLD_SIZE", "4"},
                      {"LOCAL_RANK", "1"},  {"LOCAL_WORLD_SIZE", "2"},
                      {"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}};
  for (auto& [name, value] : changes) variables[name] = value;
  return only(variables);
}

TEST(Identity, without_a_launcher_it_is_a_world_of_one) {
  ScopedEnvironment scope(only({{"MASTER_ADDR", "left.over"}}));
  const auto identity = identity_from_environment();
  EXPECT_EQ(identity.rank, 0);
  EXPECT_EQ(identity.size, 1);
  EXPECT_EQ(identity.local_rank, 0);
  EXPECT_EQ(identity.launcher, "none");
}

TEST(Identity, torchruns_variables_are_the_contract) {
  ScopedEnvironment scope(
      torchrun({{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "2"}}));
  const auto identity = identity_from_environment();
  EXPECT_EQ(identity.rank, 3);
  EXPECT_EQ(identity.size, 4);
  EXPECT_EQ(identity.local_rank, 1);
  EXPECT_EQ(identity.local_size, 2);
  EXPECT_EQ(identity.master_address, "a");
  EXPECT_EQ(identity.master_port, 29500);
  EXPECT_TRUE(identity.store_is_served);
  EXPECT_EQ(identity.restart_count, 2);
}

TEST(Identity, local_variables_may_be_missing) {
  ScopedEnvironment scope(torchrun({{"LOCAL_RANK", std::nullopt}, {"LOCAL_WORLD_SIZE", std::nullopt}}));
  EXPECT_EQ(identity_from_environment().local_rank, std::nullopt);
}

TEST(Identity, mpiruns_variables_count_where_torchruns_are_missing) {
  ScopedEnvironment open_mpi(only({{"OMPI_COMM_WORLD_RANK", "1"},
                                   {"OMPI_COMM_WORLD_SIZE", "2"},
                                   {"MASTER_ADDR", "a"},
                                   {"MASTER_PORT", "1"}}));
  EXPECT_EQ(identity_from_environment().rank, 1);
  EXPECT_EQ(identity_from_environment().launcher, "Open MPI");
  ScopedEnvironment both(torchrun({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}));
  EXPECT_EQ(identity_from_environment().rank, 3);
}

TEST(Identity, arguments_go_before_the_environment) {
  ScopedEnvironment scope(torchrun());
  EXPECT_EQ(identity_from_environment(1, 2).rank, 1);
  EXPECT_EQ(identity_from_environment(1, 2).size, 2);
  for (auto [rank, size] : {std::pair(2, 2), {-1, 2}, {0, 0}, {0, -1}})
    EXPECT_THAT(error_of<ConfigError>([&, r = rank, s = size] { identity_from_environment(r, s); }),
                HasSubstr("allowed"));
}

struct BadCase {
  Variables changes;
  std::vector<std::string> parts;  // of the error
};

TEST(Identity, what_is_wrong_is_named) {
  const BadCase cases[] = {
      {{{"RANK", "4"}}, {"RANK=4", "WORLD_SIZE=4", "0 to 3"}},
      {{{"RANK", "-1"}}, {"RANK='-1'"}},
      {{{"RANK", "two"}}, {"RANK='two'", "number"}},
      {{{"RANK", std::nullopt}}, {"WORLD_SIZE=4", "RANK is not"}},
      {{{"WORLD_SIZE", std::nullopt}}, {"RANK=3", "WORLD_SIZE is not"}},
      {{{"WORLD_SIZE", "0"}}, {"WORLD_SIZE='0'", "1 to"}},
      {{{"MASTER_ADDR", ""}}, {"MASTER_ADDR is not set", "4 ranks"}},
      {{{"MASTER_PORT", std::nullopt}}, {"MASTER_PORT is not set", "65535"}},
      {{{"MASTER_PORT", "70000"}}, {"MASTER_PORT='70000'", "65535"}},
      {{{"LOCAL_RANK", "2"}}, {"LOCAL_RANK='2'", "0 to 1"}},
      {{{"LOCAL_WORLD_SIZE", "5"}}, {"LOCAL_WORLD_SIZE='5'", "1 to 4"}},
      {{{"TORCHELASTIC_USE_AGENT_STORE", "perhaps"}}, {"TORCHELASTIC_USE_AGENT_STORE='perhaps'"}},
  };
  for (const auto& [changes, parts] : cases) {
    ScopedEnvironment scope(torchrun(changes));
    const auto text = error_of<ConfigError>([] { identity_from_environment(); });
    for (const auto& part : parts) EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST(Identity, a_host_is_the_same_to_all_its_processes) {
  EXPECT_EQ(detail::host_identity(), detail::host_identity());
  EXPECT_GT(detail::host_identity().size(), 10u);
}

}  // namespace
}  // namespace lockstep::testing
