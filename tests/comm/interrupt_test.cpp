// Waits end when a failure is told, on every transport: the peer is stopped by a signal or never comes, the
// waiter and ~World return within 1 s. Two ranks; each test is run alone, because it ends its World.
#include <signal.h>
#include <unistd.h>

#include <future>
#include <thread>

#include <lockstep/control/process.h>

#include "support/ranks.h"

namespace lockstep::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kPromised = std::chrono::seconds(1);
constexpr std::int64_t kLarge = 512 << 20;  // bytes: more than is sent before the peer stops

using Action = std::function<Work(Group&, at::Tensor)>;

// Rank 0: waits in the operation, is told after a while, and measures.
// stops: the process of rank 1, which has stopped itself by then.
void wait_and_be_told(World& world, const Action& action, bool may_complete, Clock::time_point& told,
                      std::optional<pid_t> stops = {}) {
  auto group = world.group();
  auto tensor = at::ones({kLarge}, at::kByte);
  auto work = action(group, tensor);
  std::thread teller([&] {
    std::this_thread::sleep_for(milliseconds(300));
    while (stops && control::look_at(*stops)->state != 'T') std::this_thread::sleep_for(milliseconds(10));
    told = Clock::now();
    world.fail("rank 1 is stopped", 1);
  });
  std::string text;
  try {
    work.wait();
  } catch (const CommError& error) {
    text = error.what();
  }
  const auto returned = Clock::now();
  teller.join();
  EXPECT_LT(returned - told, kPromised);
  if (text.empty()) {
    // A message may be read out of the memory of a process that is stopped: complete, and as it should be.
    EXPECT_TRUE(may_complete) << "no error";
  } else {
    EXPECT_GE(returned, told) << text;
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1 is stopped"), HasSubstr("peer: rank 1"),
                            HasSubstr("interrupt_test.cpp")));
  }
  EXPECT_THAT(error_of<CommError>([&] { group.barrier().wait(); }), HasSubstr("rank 1 is stopped"));
}

// action is rank 0's; peer's, if any, is under way on rank 1 when that stops.
void expect_interrupt(const Action& action, const Action& peer = nullptr) {
  Clock::time_point told;
  if (ranks_are_threads()) {
    std::promise<void> over;
    auto future = over.get_future();
    run_threads(2, [&](World& world) {
      if (world.rank() == 1) return future.wait();
      wait_and_be_told(world, action, false, told);
      over.set_value();
    });
  } else {
    auto world = std::make_unique<World>(fresh_world({.timeout = std::chrono::seconds(60)}));
    const auto pids = world->group().all_gather_values(::getpid());
    if (world->rank() == 1) {
      auto group = world->group();
      auto tensor = at::ones({kLarge}, at::kByte);
      std::optional<Work> work;
      if (peer) work.emplace(peer(group, tensor));
      ::raise(SIGSTOP);
      // Continued below, when rank 0 is done. mpirun ends rank 0 when this rank ends: not before it has
      // reported.
      std::this_thread::sleep_for(milliseconds(700));
      ::_exit(0);
    }
    wait_and_be_told(*world, action, peer && (transport() == "mpi" || transport() == "shm"), told, pids[1]);
    world.reset();
    EXPECT_LT(Clock::now() - told, kPromised);
    ::kill(pids[1], SIGCONT);
    return;
  }
  EXPECT_LT(Clock::now() - told, kPromised);
}

Work sum(Group& group, at::Tensor tensor) { return group.all_reduce(std::move(tensor)); }
Work send(Group& group, at::Tensor tensor) {
  return group.send(std::move(tensor), {.peer = 1 - group.rank()});
}
Work recv(Group& group, at::Tensor tensor) {
  return group.recv(std::move(tensor), {.peer = 1 - group.rank()});
}

Work from_root(Group& group, at::Tensor tensor) { return group.broadcast(std::move(tensor)); }

TEST(Interrupt, broadcast_whose_peer_stops_inside) { expect_interrupt(from_root, from_root); }
TEST(Interrupt, all_reduce_whose_peer_never_comes) { expect_interrupt(sum); }
TEST(Interrupt, send_whose_peer_never_comes) { expect_interrupt(send); }
TEST(Interrupt, recv_whose_peer_never_comes) { expect_interrupt(recv); }
TEST(Interrupt, all_reduce_whose_peer_stops_inside) { expect_interrupt(sum, sum); }
TEST(Interrupt, send_whose_peer_stops_inside) { expect_interrupt(send, recv); }
TEST(Interrupt, recv_whose_peer_stops_inside) { expect_interrupt(recv, send); }

}  // namespace
}  // namespace lockstep::testing
