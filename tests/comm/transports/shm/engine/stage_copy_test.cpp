// How data is copied to staging: with non-temporal stores if the peer's processor is far.
#include <lockstep/comm/transports/shm/engine/stage_copy.h>

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace lockstep::shm {
namespace {

TEST(StageCopy, streams_any_size_at_any_alignment_and_nothing_beside_it) {
  std::vector<unsigned char> from(5000);
  std::iota(from.begin(), from.end(), 1);
  for (const std::size_t bytes : {0, 1, 15, 63, 64, 65, 127, 128, 200, 1000, 4097})
    for (const std::size_t out : {0, 1, 16, 33, 63})
      for (const std::size_t in : {0, 1, 8}) {
        std::vector<unsigned char> to(5000, 0xee);
        stream_bytes(to.data() + 64 + out, from.data() + in, bytes);
        const auto begin = to.begin() + 64 + static_cast<std::ptrdiff_t>(out);
        const auto end = begin + static_cast<std::ptrdiff_t>(bytes);
        EXPECT_TRUE(std::equal(begin, end, from.begin() + static_cast<std::ptrdiff_t>(in))) << bytes;
        EXPECT_TRUE(std::all_of(to.begin(), begin, [](auto byte) { return byte == 0xee; })) << bytes;
        EXPECT_TRUE(std::all_of(end, to.end(), [](auto byte) { return byte == 0xee; })) << bytes;
      }
}

TEST(StageCopy, copies_whichever_way_it_takes) {
  StageCopy copier;
  std::vector<int> from(8192);
  for (int round = 0; round < 300; ++round) {
    std::iota(from.begin(), from.end(), round);
    std::vector<int> to(8192);
    // Whatever the measurements are, both kinds must have been tried by now.
    if (round == 100)
      for (int i = 0; i < 4; ++i) copier.note(true, 1e-9);
    copier.copy(to.data(), from.data(), to.size() * sizeof(int));
    ASSERT_EQ(to, from) << round;
    const auto small = static_cast<std::size_t>(round) * 4;
    std::fill(to.begin(), to.end(), -1);
    copier.copy(to.data(), from.data(), small);
    ASSERT_TRUE(std::equal(to.begin(), to.begin() + round, from.begin())) << round;
    ASSERT_EQ(to[static_cast<std::size_t>(round)], -1);
  }
}

// Simulates copies with these costs, whatever kind the copier chooses.
void run(StageCopy& copier, int copies, double ordinary, double streamed) {
  for (int i = 0; i < copies; ++i) {
    const bool streams = copier.streams() != copier.tries();
    copier.note(streams, streams ? streamed : ordinary);
  }
}

TEST(StageCopy, streams_where_the_other_processor_is_far_and_for_as_long_as_it_is) {
  constexpr double kNear = 0.12, kFar = 0.48, kStreamed = 0.08;
  StageCopy copier;
  EXPECT_FALSE(copier.streams());
  run(copier, 300, kNear, kStreamed);
  EXPECT_FALSE(copier.streams());
  run(copier, 64, kFar, kStreamed);
  EXPECT_TRUE(copier.streams());
  run(copier, 1000, kFar, kStreamed);
  EXPECT_TRUE(copier.streams());
  run(copier, 300, kNear, kStreamed);
  EXPECT_FALSE(copier.streams());
}

TEST(StageCopy, is_not_misled_by_a_copy_that_lost_its_processor) {
  StageCopy copier;
  for (int i = 0; i < 100; ++i) {
    run(copier, 50, 0.12, 0.08);
    copier.note(false, 50.0);
    copier.note(false, 50.0);
    EXPECT_FALSE(copier.streams());
  }
}

}  // namespace
}  // namespace lockstep::shm
