// State that outlives an operation of ranks that share GPUs: memory, streams, and the work left on them when
// a rank ends.
#include <optional>
#include <thread>

#include "comm/transports/cuda_ipc/engine/fake_ranks.h"
#include "support/errors.h"

namespace lockstep::cuda_ipc {
namespace {

using fake_cuda::Stopped;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST(CudaIpcArena, memory_is_given_out_again_when_all_its_streams_are_done) {
  constexpr int kDevice = 7;
  auto& arena = Arena::of(kDevice);
  const auto own = Track::take(kDevice), other = Track::take(kDevice);
  auto* memory = arena.allocate(kMiB, own->stream());
  std::optional<Stopped> reads(std::in_place, other->stream());
  arena.free(memory, other->stream());
  fake_cuda::synchronize(own->stream());
  EXPECT_NE(arena.allocate(kMiB, own->stream()), memory);
  reads.reset();
  fake_cuda::synchronize(other->stream());
  EXPECT_EQ(arena.allocate(kMiB, own->stream()), memory);
}

TEST(CudaIpcArena, a_stage_that_is_outgrown_grows_by_more_than_it_must) {
  const Shape shape{2, true, Memory::plain, 0};
  Job(shape).run([&](Rank& rank) {
    auto* tensor = rank.make(44 * kMiB / sizeof(float));
    const auto before = fake_cuda::allocations();
    for (std::size_t size = 33; size <= 44; ++size) {
      auto op = rank.op(Operation::broadcast, static_cast<std::int64_t>(size * kMiB / sizeof(float)), 0);
      op.outputs = {tensor};
      rank.run(op);
    }
    EXPECT_LE(fake_cuda::allocations() - before, 2u);
    fake_cuda::synchronize(rank.stream());
  });
}

// One handle opens one piece, so tensors in several pieces cannot be used in place.
TEST(CudaIpcArena, tensors_of_one_call_in_several_pieces) {
  const Shape shape{2, true, Memory::allocated, 5001};
  const auto n = shape.count;
  Job(shape).run([&](Rank& rank) {
    auto& arena = Arena::of(0);
    std::vector<float*> inputs;
    for (int r = 0; r < 2; ++r)
      inputs.push_back(reinterpret_cast<float*>(arena.allocate(32 * kMiB, rank.stream())));
    ASSERT_NE(arena.find(inputs[0], 1).handle, arena.find(inputs[1], 1).handle);
    auto* out = rank.make(n);
    std::vector<float> got(static_cast<std::size_t>(n));
    for (int round = 0; round < 3; ++round) {
      const auto whole = values_of(rank.rank(), 2 * n, round);
      for (int r = 0; r < 2; ++r) rank.fill(inputs[at(r)], slice(whole, r * n, n));
      auto op = rank.op(Operation::reduce_scatter, 2 * n);
      op.inputs = {inputs[0], inputs[1]};
      op.outputs = {out};
      op.call.to = {n, n};
      rank.run(op);
      rank.read(got, out);
      for (auto* input : inputs) rank.spoil(input, n);
      fake_cuda::synchronize(rank.stream());
      EXPECT_EQ(got, slice(sum_of(2, 2 * n, round), rank.rank() * n, n));
    }
    for (auto* input : inputs) arena.free(reinterpret_cast<char*>(input));
  });
}

// A rank that died in its kernels after all had arrived: its peers' streams wait for it forever.
TEST(CudaIpcTrack, a_group_after_one_whose_streams_hang) {
  const Shape shape{2, true, Memory::allocated, 100};
  for (bool interrupted : {true, false}) {
    std::vector<cudaStream_t> hung(2);
    std::optional<Stopped> dead;
    Job(shape).run([&](Rank& rank) {
      auto* stream = hung[at(rank.rank())] = rank.peers()->collectives->stream();
      if (rank.rank() == 1) dead.emplace(stream);
      auto op = rank.op(Operation::all_reduce, 100);
      op.outputs = {rank.make(100)};
      rank.engine().begin(op);
      rank.engine().finish(op, soon());
      if (interrupted) rank.engine().interrupt("rank 1 has died");
      rank.engine().give_up();
    });
    Job(shape).run([&](Rank& rank) {
      for (auto* stream : hung)
        for (const auto& track : {rank.peers()->collectives, rank.peers()->messages})
          EXPECT_NE(track->stream(), stream);
      auto* tensor = rank.make(100);
      std::vector<float> got(100);
      rank.fill(tensor, values_of(rank.rank(), 100, 1));
      auto op = rank.op(Operation::all_reduce, 100);
      op.outputs = {tensor};
      rank.run(op);
      rank.read(got, tensor);
      fake_cuda::synchronize(rank.stream());
      EXPECT_EQ(got, sum_of(2, 100, 1));
    });
    dead.reset();
    for (auto* stream : hung) fake_cuda::synchronize(stream);
  }
}

TEST(CudaIpcPeers, who_leaves_waits_for_its_device_as_long_as_that_helps) {
  const Shape shape{2, true, Memory::plain, 0};
  Job(shape).run([&](Rank& rank) {
    if (rank.rank() == 1) return;
    auto& peers = *rank.peers();
    auto& barrier = rank.barrier();
    const std::atomic<bool> no = false, yes = true;
    for (const auto& track : {peers.collectives, peers.messages}) {
      std::optional<Stopped> queue(std::in_place, track->stream());
      std::thread device([&] {
        std::this_thread::sleep_for(milliseconds(200));
        queue.reset();
      });
      EXPECT_TRUE(peers.finish(barrier, soon(), no));
      EXPECT_TRUE(track->is_idle());
      device.join();
    }
    const Stopped queue(peers.collectives->stream());
    EXPECT_FALSE(peers.finish(barrier, soon(), yes));
    // A rank that has left in order is waited for, through its events; one that gave up is not.
    auto& presence = barrier.region().line(1).presence;
    presence = shm::Line::kLeft;
    const auto deadline = shm::Clock::now() + milliseconds(100);
    EXPECT_FALSE(peers.finish(barrier, deadline, no));
    EXPECT_GE(shm::Clock::now(), deadline);
    presence = shm::Line::kFailed;
    const auto late = soon();
    EXPECT_FALSE(peers.finish(barrier, late, no));
    EXPECT_LT(shm::Clock::now(), late);
  });
}

TEST(CudaIpcPeers, gpus_that_are_not_seen_are_named) {
  const Shape shape{2, true, Memory::plain, 0};
  Job job(shape);
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r)
    ranks.emplace_back([&job, r] {
      fake_cuda::show_only(r);
      const auto host = job.host(r);
      EXPECT_THAT(
          testing::error_of<ConfigError>([&] { Peers(*host, r, 2, 0, soon()); }),
          AllOf(HasSubstr("GPU-00000000-0000-"), HasSubstr("GPU-01000000-0000-"), HasSubstr("cuda:nccl")));
    });
  for (auto& rank : ranks) rank.join();
}

}  // namespace
}  // namespace lockstep::cuda_ipc
