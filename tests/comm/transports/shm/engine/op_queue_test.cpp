// The order of a group's operations, and how they end, with ranks as threads.
#include <lockstep/comm/transports/shm/engine/op_queue.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <future>

#include "comm/transports/shm/engine/threads.h"
#include "support/errors.h"

namespace lockstep::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr std::int64_t kCount = 70000;

// An operation whose end can be waited for.
struct Ticket final : detail::OpItem {
  std::promise<std::string> ended;
  std::function<void()> at_end = [] {}, at_destruction = [] {};

  void done(const std::exception_ptr& error, int) override {
    std::string text;
    try {
      if (error) std::rethrow_exception(error);
    } catch (const std::exception& problem) {
      text = problem.what();
    }
    at_end();
    ended.set_value(text);
  }
  ~Ticket() override { at_destruction(); }
};

class Lanes {
 public:
  explicit Lanes(int ranks)
      : region_memory_(
            static_cast<char*>(std::aligned_alloc(128, (Region::size_for(ranks) + 127) / 128 * 128)),
            &std::free) {
    Region region(region_memory_.get(), ranks);
    region.prepare();
    for (int r = 0; r < ranks; ++r)
      lanes_.push_back(std::make_shared<OpQueue>(
          std::make_unique<Engine>(region, r, Engine::Tuning{}, memory_), region_memory_));
  }
  ~Lanes() {
    for (const auto& op_queue : lanes_) op_queue->close();
    for (char* each : taken_) memory_.drop(each);
  }
  const std::shared_ptr<OpQueue>& op_queue(int rank) { return lanes_[static_cast<std::size_t>(rank)]; }
  ThreadMemory& memory() { return memory_; }

  std::shared_ptr<Ticket> post(
      int rank, Operation operation, std::int64_t count, bool soon, std::function<void()> at_end = [] {}) {
    auto ticket = std::make_shared<Ticket>();
    ticket->at_end = std::move(at_end);
    Call& call = ticket->op.call;
    call.operation = operation;
    call.dtype = Dtype::float32;
    if (operation == Operation::broadcast) call.root = 1;
    call.rank = rank;
    call.size = static_cast<int>(lanes_.size());
    call.count = count;
    call.bytes = count * 4;
    call.shape = {count};
    char* data = memory_.take(static_cast<std::size_t>(call.bytes), true);
    std::memset(data, 0, static_cast<std::size_t>(call.bytes));
    taken_.push_back(data);
    ticket->op.outputs = {data};
    ticket->op.item_size = 4;
    ticket->start(seconds(60));
    op_queue(rank)->post(ticket, soon);
    return ticket;
  }

 private:
  ThreadMemory memory_;
  std::shared_ptr<char> region_memory_;
  std::vector<std::shared_ptr<OpQueue>> lanes_;
  std::vector<char*> taken_;
};

std::string end_of(const std::shared_ptr<Ticket>& ticket) {
  auto future = ticket->ended.get_future();
  return future.wait_for(seconds(60)) == std::future_status::ready ? future.get() : "it has not ended";
}

// The operation in progress may still complete, but none after it.
TEST(OpQueue, everything_that_is_queued_ends_when_it_is_closed) {
  Lanes lanes(2);
  // in the first operation, when rank 0 maps the memory of rank 1
  lanes.memory().on_map = [&](int rank, Place) {
    if (rank != 1) return;
    lanes.op_queue(0)->close();
    std::this_thread::sleep_for(milliseconds(50));
  };
  auto first = lanes.post(0, Operation::broadcast, kCount, true);
  auto second = lanes.post(0, Operation::all_reduce, 10, true);
  auto third = lanes.post(0, Operation::all_reduce, 10, true);
  auto other = lanes.post(1, Operation::broadcast, kCount, true);
  EXPECT_EQ(end_of(other), "");
  EXPECT_EQ(end_of(first), "");
  EXPECT_EQ(end_of(second), "this rank has left the group");
  EXPECT_EQ(end_of(third), "this rank has left the group");
  EXPECT_EQ(end_of(lanes.post(0, Operation::all_reduce, 10, true)), "this rank has left the group");
}

// A callback at the end of an operation may wait for a later one, and that one's callback too.
TEST(OpQueue, ends_of_operations_may_wait_for_later_ones) {
  constexpr int kDeep = 5;
  std::promise<void> last;
  auto future = last.get_future().share();
  std::vector<std::shared_ptr<Ticket>> tickets;
  std::atomic<int> in_time = 0;
  Lanes lanes(1);
  for (int i = 0; i < kDeep; ++i)
    tickets.push_back(lanes.post(0, Operation::all_reduce, 10, true, [&] {
      in_time += future.wait_for(seconds(60)) == std::future_status::ready;
    }));
  tickets.push_back(lanes.post(0, Operation::all_reduce, 10, true, [&] { last.set_value(); }));
  for (const auto& each : tickets) EXPECT_EQ(each->ended.get_future().get(), "");
  EXPECT_EQ(in_time, kDeep);
}

// An operation may hold the last reference to its group.
TEST(OpQueue, whoever_lets_go_of_an_operation_may_close_the_lane) {
  std::promise<void> closed;
  Lanes lanes(1);
  auto ticket = lanes.post(0, Operation::all_reduce, 10, false);
  ticket->at_destruction = [&] {
    lanes.op_queue(0)->close();
    closed.set_value();
  };
  ticket.reset();  // now the queue's thread owns it
  ASSERT_EQ(closed.get_future().wait_for(seconds(60)), std::future_status::ready);
}

// The waiting thread does the work, so a process that cannot start threads can continue.
TEST(OpQueue, works_without_a_thread_of_its_own) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "under ThreadSanitizer a child of fork() cannot start threads";
#endif
  Lanes lanes(1);
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit as_it_is{(pages + 256) * 4096, RLIM_INFINITY};  // no room for a stack
    ::setrlimit(RLIMIT_AS, &as_it_is);
    int status = 1;
    try {
      // uses up the stacks that are left
      for (int i = 0; i < 1000; ++i) std::thread([] { ::pause(); }).detach();
      status = 2;
    } catch (const std::system_error&) {
    }
    try {
      auto ticket = lanes.post(0, Operation::all_reduce, 10, true);
      lanes.op_queue(0)->wait(*ticket, Clock::now() + seconds(60));
      if (status == 1 && ticket->settled) status = 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    ::_exit(status);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 0);
}

// The engine's destructor may touch process-wide state: it must run in the thread that waited for the queue's
// threads.
TEST(OpQueue, who_waits_for_its_threads_lets_go_of_the_engine) {
  struct Marked final : detail::CollectiveEngine {
    explicit Marked(std::thread::id& its_end) : end(its_end) {}
    ~Marked() override { end = std::this_thread::get_id(); }
    void begin(detail::Op&) override {}
    void finish(detail::Op&, Clock::time_point) override {}
    void give_up() noexcept override {}
    void interrupt(const std::string&) override {}
    std::string absent() const override { return {}; }
    std::thread::id& end;
  };
  for (int round = 0; round < 200; ++round) {
    std::thread::id end;
    auto op_queue = std::make_shared<OpQueue>(std::make_unique<Marked>(end), nullptr);
    auto ticket = std::make_shared<Ticket>();
    ticket->op.call.operation = Operation::barrier;
    ticket->start(seconds(60));
    op_queue->post(ticket, /*soon=*/true);
    op_queue->wait(*ticket, Clock::now() + seconds(60));
    op_queue->close();
    ASSERT_TRUE(op_queue->wait_for_threads(seconds(20)));
    ASSERT_EQ(end, std::thread::id());
    op_queue.reset();
    ASSERT_EQ(end, std::this_thread::get_id()) << round;
  }
}

}  // namespace
}  // namespace lockstep::shm
