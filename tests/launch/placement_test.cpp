#include <lockstep/launch/placement.h>

#include <lockstep/base/error.h>
#include <lockstep/os/host.h>

#include "support/environment.h"
#include "support/errors.h"

namespace lockstep::testing {
namespace {

using ::testing::ElementsAre;

TEST(Cores, of_neighbours_are_close) {
  EXPECT_THAT(detail::share_out_cores(4, 2, "pack:2 core:4 pu:1").lists,
              ElementsAre("0-1", "2-3", "4-5", "6-7"));
  EXPECT_THAT(detail::share_out_cores(2, 1, "pack:2 core:4 pu:1").lists, ElementsAre("0-3", "4-7"));
  // Two threads of one core before two cores.
  EXPECT_THAT(detail::share_out_cores(2, 2, "core:2 pu:2").lists, ElementsAre("0-1", "2-3"));
}

TEST(Cores, are_enough_for_every_rank_also_where_they_do_not_divide) {
  EXPECT_THAT(detail::share_out_cores(3, 2, "pack:2 core:3 pu:1").lists, ElementsAre("0-1", "2-3", "4-5"));
  EXPECT_THAT(detail::share_out_cores(3, 1, "core:4 pu:1").lists.size(), 3);
}

TEST(Cores, are_masks_that_do_not_overlap) {
  const auto cores = detail::share_out_cores(3, 21, "pack:2 numa:2 core:8 pu:2");
  detail::CpuMask seen(1, 0);
  for (const auto& mask : cores.masks) {
    EXPECT_GE(__builtin_popcountl(mask.at(0)), 21);
    EXPECT_EQ(seen[0] & mask[0], 0);
    seen[0] |= mask[0];
  }
}

detail::Placement place(int ranks, int threads, detail::Bind bind) {
  detail::LaunchOptions options;
  options.num_ranks = ranks;
  options.threads = threads;
  options.bind = bind;
  return detail::place_ranks(options);
}

TEST(Placement, binds_where_there_are_cores_for_all) {
  ScopedEnvironment unset("OMP_NUM_THREADS", std::nullopt);
  const int cores = host::affinity_cores();
  EXPECT_EQ(place(1, 1, detail::Bind::cores).masks.size(), 1);
  EXPECT_THAT(place(1, 1, detail::Bind::cores).text, HasSubstr("bound to cores "));
  EXPECT_TRUE(place(1, 1, detail::Bind::none).masks.empty());
  EXPECT_TRUE(place(cores + 1, 1, detail::Bind::automatic).masks.empty());
  EXPECT_THAT(place(cores + 1, 1, detail::Bind::automatic).text, HasSubstr("not bound ("));
  EXPECT_THAT(error_of<ConfigError>([&] { place(cores + 1, 1, detail::Bind::cores); }),
              HasSubstr("--bind none"));
}

TEST(Placement, shares_out_threads) {
  {
    ScopedEnvironment unset("OMP_NUM_THREADS", std::nullopt);
    EXPECT_EQ(place(1, 0, detail::Bind::none).threads, host::available_cores());
    EXPECT_EQ(place(10000, 0, detail::Bind::none).threads, 1);
  }
  ScopedEnvironment set("OMP_NUM_THREADS", "7");
  EXPECT_EQ(place(1, 0, detail::Bind::none).threads, 7);
  EXPECT_EQ(place(1, 3, detail::Bind::none).threads, 3);
}

}  // namespace
}  // namespace lockstep::testing
