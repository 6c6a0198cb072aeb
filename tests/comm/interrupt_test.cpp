// Waits end when a failure is reported, on every transport: the peer is stopped by a signal or never arrives,
// and the waiter and ~World return within 1 s on an idle machine. Two ranks. Between processes a case must be
// the only one of its run, because it ends the World of the process; otherwise it is skipped.
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>

#include <lockstep/control/agent/process.h>

#include "support/eventually.h"
#include "support/quiet_limit.h"
#include "support/ranks.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kPromised = std::chrono::seconds(1);
constexpr std::int64_t kLarge = 512 << 20;  // bytes: about 100 ms on any transport

class Interrupt : public ::testing::Test {
 protected:
  void SetUp() override {
    if (ranks_are_threads()) return;
    const auto& unit = *::testing::UnitTest::GetInstance();
    if (unit.test_to_run_count() > 1 || num_ranks() != 2)
      GTEST_SKIP() << "ends the World of its process; run it alone on 2 ranks: "
                   << "lockstep run -n 2 conformance --transport=" << transport()
                   << " --gtest_filter=Interrupt." << unit.current_test_info()->name();
  }
};

using Action = std::function<Work(Group&, at::Tensor)>;

// Rank 0 waits in the operation, gets the failure after a while, and measures. If rank 1 is a process, rank 0
// stops it: at once, or while the operation is in progress. If the transfer had ended by then, the case did
// not test anything: returns false, to repeat it. may_complete: a message can be read from the memory of a
// stopped process, so it may complete, with the right data.
bool wait_and_be_told(World& world, const Action& action, std::optional<pid_t> peer, bool inside,
                      bool may_complete, std::unique_ptr<QuietLimit>& told) {
  auto group = world.group();
  auto tensor = at::ones({kLarge}, on(at::kByte));
  std::atomic<bool> begun = false, over = false;
  std::thread teller([&] {
    while (!begun) std::this_thread::sleep_for(milliseconds(1));
    if (inside) std::this_thread::sleep_for(milliseconds(20));
    if (peer) ::kill(*peer, SIGSTOP);
    while (peer && control::look_at(*peer)->state != 'T') std::this_thread::sleep_for(milliseconds(1));
    // Until rank 0 waits, or has received what its peer sent.
    std::this_thread::sleep_for(milliseconds(inside ? 300 : 50));
    if (over && !may_complete) return;
    told = std::make_unique<QuietLimit>(kPromised);
    world.fail("rank 1 is stopped", 1);
  });
  std::string text;
  begun = true;
  try {
    action(group, tensor).wait();
  } catch (const CommError& error) {
    text = error.what();
  }
  const auto returned = Clock::now();
  over = true;
  teller.join();
  if (text.empty() && !may_complete) return false;
  if (told == nullptr) {
    ADD_FAILURE() << "the operation failed before the failure was reported: " << text;
    return true;
  }
  EXPECT_TRUE(told->met_at(returned));
  if (!text.empty()) {
    EXPECT_GE(returned, told->begin()) << text;
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1 is stopped"), HasSubstr("peer: rank 1"),
                            HasSubstr("interrupt_test.cpp")));
  }
  EXPECT_THAT(error_of<CommError>([&] { group.barrier().wait(); }), HasSubstr("rank 1 is stopped"));
  return true;
}

sem_t may_end;  // posted by SIGUSR1

// Rank 1's process: its side of the operation, again and again, until rank 0 has reported. mpirun ends rank 0
// when this process ends, so rank 0 ends first.
[[noreturn]] void be_stopped(World& world, const Action& action, pid_t rank_0) {
  ::sem_init(&may_end, 0, 0);
  ::signal(SIGUSR1, [](int) { ::sem_post(&may_end); });
  std::thread([rank_0] {
    while (::sem_wait(&may_end) != 0) {  // interrupted by a signal
    }
    const auto ends = [&] {
      const auto process = control::look_at(rank_0);
      return !process || process->ending;
    };
    eventually(ends, std::chrono::seconds(20));
    std::this_thread::sleep_for(milliseconds(100));  // so that its launcher can read its output
    ::_exit(0);
  }).detach();
  auto group = world.group();
  auto tensor = at::ones({kLarge}, on(at::kByte));
  group.barrier().wait();
  try {
    while (action) action(group, tensor).wait();
  } catch (const CommError&) {  // rank 0 has ended
  }
  for (;;) ::pause();
}

// action runs on rank 0; inside, if any, is in progress on rank 1 when that is stopped.
void expect_interrupt(const Action& action, const Action& inside = nullptr) {
  if (inside && ranks_are_threads()) GTEST_SKIP() << "a thread cannot be stopped inside an operation";
  if (inside && transport() == "cuda_ipc")
    GTEST_SKIP() << "an operation on a GPU ends before a signal arrives";
  std::unique_ptr<QuietLimit> told;
  if (ranks_are_threads()) {
    std::promise<void> over;
    auto future = over.get_future();
    run_threads(2, [&](World& world) {
      if (world.rank() == 1) return future.wait();
      EXPECT_TRUE(wait_and_be_told(world, action, {}, false, false, told)) << "no error";
      over.set_value();
    });
    EXPECT_TRUE(told && told->met_at(Clock::now()));
    return;
  }
  auto world = std::make_unique<World>(fresh_world({.timeout = std::chrono::minutes(3)}));
  const auto pids = world->group().all_gather_values(::getpid());
  if (world->rank() == 1) be_stopped(*world, inside, pids[0]);
  world->group().barrier().wait();
  const bool may_complete = inside && (transport() == "mpi" || transport() == "shm");
  bool interrupted = false;
  for (int attempt = 0; attempt < (inside ? 20 : 1) && !interrupted; ++attempt) {
    if (attempt > 0) ::kill(pids[1], SIGCONT);
    interrupted = wait_and_be_told(*world, action, pids[1], bool(inside), may_complete, told);
  }
  EXPECT_TRUE(interrupted) << "no error";
  world.reset();
  EXPECT_TRUE(told && told->met_at(Clock::now()));
  ::kill(pids[1], SIGUSR1);
  ::kill(pids[1], SIGCONT);
}

Work sum(Group& group, at::Tensor tensor) { return group.all_reduce(std::move(tensor)); }
Work send(Group& group, at::Tensor tensor) {
  return group.send(std::move(tensor), {.peer = 1 - group.rank()});
}
Work recv(Group& group, at::Tensor tensor) {
  return group.recv(std::move(tensor), {.peer = 1 - group.rank()});
}

Work from_root(Group& group, at::Tensor tensor) { return group.broadcast(std::move(tensor)); }

TEST_F(Interrupt, broadcast_whose_peer_stops_inside) { expect_interrupt(from_root, from_root); }
TEST_F(Interrupt, all_reduce_whose_peer_never_comes) { expect_interrupt(sum); }
TEST_F(Interrupt, send_whose_peer_never_comes) { expect_interrupt(send); }
TEST_F(Interrupt, recv_whose_peer_never_comes) { expect_interrupt(recv); }
TEST_F(Interrupt, all_reduce_whose_peer_stops_inside) { expect_interrupt(sum, sum); }
TEST_F(Interrupt, send_whose_peer_stops_inside) { expect_interrupt(send, recv); }
TEST_F(Interrupt, recv_whose_peer_stops_inside) { expect_interrupt(recv, send); }

}  // namespace
}  // namespace lockstep::testing
