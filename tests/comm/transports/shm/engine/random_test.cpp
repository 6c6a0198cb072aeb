// Random programs: collectives and messages of every kind, size, dtype and memory, many of them pending at a
// time, waited for in any order, compared with a reference that each process computes alone. A program
// follows from its seed (LOCKSTEP_TEST_SEED; LOCKSTEP_TEST_PROGRAMS sets the number of programs), so a
// failure can be reproduced.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <future>
#include <random>
#include <thread>

#include <fmt/format.h>
#include <lockstep/comm/reduce/reduce.h>

#include "comm/transports/shm/engine/processes.h"
#include "support/errors.h"

namespace lockstep::shm {
namespace {

using lockstep::Operation;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

using Random = std::mt19937;
using Bytes = std::vector<char>;

std::size_t below(Random& random, std::size_t limit) { return random() % limit; }
template <typename T>
const T& one_of(Random& random, const std::vector<T>& list) {
  return list[below(random, list.size())];
}

struct Kind {
  Dtype dtype;
  std::size_t size;
};
const std::vector<Kind> kKinds = {{Dtype::float32, 4},    {Dtype::float64, 8}, {Dtype::bfloat16, 2},
                                  {Dtype::float16, 2},    {Dtype::int8, 1},    {Dtype::int32, 4},
                                  {Dtype::int64, 8},      {Dtype::boolean, 1}, {Dtype::complex64, 8},
                                  {Dtype::uint16, 2},     {Dtype::other, 1},   {Dtype::other, 4},
                                  {Dtype::complex128, 16}};
const std::vector<ReduceOp> kReductions = {ReduceOp::SUM,     ReduceOp::SUM, ReduceOp::AVG,
                                           ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX,
                                           ReduceOp::BAND,    ReduceOp::BOR, ReduceOp::BXOR};

// The same on every rank.
struct Step {
  Operation operation{};  // send stands for a send and its matching receive
  Kind kind{};
  ReduceOp reduction = ReduceOp::SUM;
  int root = 0, peer = 0;  // a message goes from root to peer
  bool from_any = false;
  int number = 0;
  std::vector<std::vector<std::int64_t>> counts;  // [giver][taker], or [giver][0]
};

std::int64_t random_count(Random& random, std::size_t item) {
  // Nothing; some; about a slot; about a chunk of staging; more.
  const auto near = [&](std::size_t bytes) {
    return static_cast<std::int64_t>(bytes / item + below(random, 5)) - 2;
  };
  std::int64_t count = 0;
  switch (below(random, 8)) {
    case 0: break;
    case 1: count = near(kInline); break;
    case 2: count = near(16384); break;
    case 3: count = static_cast<std::int64_t>(below(random, 200'000 / item)); break;
    case 4: count = static_cast<std::int64_t>(below(random, 20'000 / item)); break;
    default: count = static_cast<std::int64_t>(below(random, 300)); break;
  }
  return std::max<std::int64_t>(count, 0);
}

Step random_step(Random& random, int ranks, int number) {
  static const std::vector<Operation> kOperations = {
      Operation::all_reduce, Operation::all_reduce, Operation::reduce,  Operation::broadcast,
      Operation::all_gather, Operation::gather,     Operation::scatter, Operation::reduce_scatter,
      Operation::all_to_all, Operation::barrier,    Operation::send,    Operation::send,
      Operation::send};
  Step step;
  step.number = number;
  step.operation = one_of(random, kOperations);
  step.kind = one_of(random, kKinds);
  if (detail::reduces(step.operation)) do {
      step.kind = one_of(random, kKinds);
      step.reduction = one_of(random, kReductions);
    } while (!detail::reducible(step.kind.dtype, step.reduction));
  step.root = static_cast<int>(below(random, static_cast<std::size_t>(ranks)));
  step.peer = (step.root + 1 + static_cast<int>(below(random, static_cast<std::size_t>(ranks - 1)))) % ranks;
  step.from_any = below(random, 4) == 0;
  const auto p = static_cast<std::size_t>(ranks);
  const auto count = random_count(random, step.kind.size);
  step.counts.assign(p, std::vector<std::int64_t>(p, count));
  const bool unequal = below(random, 2) == 0;
  for (auto& row : step.counts) switch (step.operation) {
      case Operation::all_gather:
      case Operation::gather:
        if (unequal) row.assign(p, random_count(random, step.kind.size));
        break;
      case Operation::scatter:
      case Operation::all_to_all:
        for (auto& each : row)
          if (unequal) each = random_count(random, step.kind.size) / 2;
        break;
      default: break;
    }
  if (step.operation == Operation::reduce_scatter && unequal) {
    for (auto& each : step.counts[0]) each = random_count(random, step.kind.size) / 2;
    step.counts.assign(p, std::vector(step.counts[0]));
  }
  return step;
}

// The data of rank `giver` for rank `taker` in a step: numbers that every dtype can represent are among them.
Bytes data_of(const Step& step, int giver, int taker) {
  const auto count = step.counts[static_cast<std::size_t>(giver)][static_cast<std::size_t>(taker)];
  Bytes bytes(static_cast<std::size_t>(count) * step.kind.size);
  Random random(static_cast<unsigned>(step.number * 64 + giver * 8 + taker + 1));
  for (auto& byte : bytes)
    byte = step.kind.dtype == Dtype::boolean ? static_cast<char>(random() % 2) : static_cast<char>(random());
  return bytes;
}

// Memory of either kind, with guard bytes before and after it.
class Guarded {
 public:
  Guarded(const Bytes& content, bool shared, std::size_t shift)
      : shared_(shared), shift_(kGuard + shift), size_(content.size()) {
    const auto all = size_ + 2 * kGuard + shift;
    memory_ = static_cast<char*>(shared ? Arena::instance().allocate(all) : std::malloc(all));
    std::memset(memory_, kMark, all);
    if (size_ > 0) std::memcpy(data(), content.data(), size_);
  }
  Guarded(Guarded&& other) noexcept
      : shared_(other.shared_),
        shift_(other.shift_),
        size_(other.size_),
        memory_(std::exchange(other.memory_, nullptr)) {}
  Guarded& operator=(Guarded&&) = delete;
  ~Guarded() {
    if (memory_ == nullptr) return;
    if (shared_)
      Arena::instance().free(memory_);
    else
      std::free(memory_);
  }
  char* data() const { return memory_ + shift_; }
  bool holds(const Bytes& expected) const {
    for (std::size_t i = 0; i < kGuard; ++i)
      if (memory_[shift_ - 1 - i] != kMark || memory_[shift_ + size_ + i] != kMark) return false;
    return size_ == expected.size() && (size_ == 0 || std::memcmp(data(), expected.data(), size_) == 0);
  }
  void keep() { memory_ = nullptr; }  // peers may still use it

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr char kMark = 0x5a;
  const bool shared_;
  const std::size_t shift_, size_;
  char* memory_ = nullptr;
};

Bytes tree_of(const Step& step, int ranks, int taker) {
  std::vector<Bytes> inputs;
  std::vector<const void*> pointers;
  for (int r = 0; r < ranks; ++r) inputs.push_back(data_of(step, r, taker));
  for (const auto& each : inputs) pointers.push_back(each.data());
  Bytes sum(inputs[0].size());
  if (!sum.empty())
    detail::reduce_tree(step.kind.dtype, step.reduction, pointers, sum.data(), sum.size() / step.kind.size);
  return sum;
}

// A step in flight on one rank.
class Running {
 public:
  Running(const Step& step, Member& member, Random& own) : step_(step), member_(member) {
    const int rank = member.rank, ranks = member.ranks;
    const auto p = static_cast<std::size_t>(ranks), me = static_cast<std::size_t>(rank);
    const bool shared = below(own, 2) == 0, adjacent = below(own, 2) == 0;
    Op op;
    Call& call = op.call;
    call.operation = step.operation;
    call.dtype = step.kind.dtype;
    call.reduction = step.reduction;
    call.rank = rank;
    call.size = ranks;
    op.item_size = step.kind.size;
    auto buffer = [&](const Bytes& content) -> char* {
      return buffers_.emplace_back(content, shared, below(own, 3) * step.kind.size).data();
    };
    // Pieces in one buffer or in several.
    auto pieces = [&](const std::vector<Bytes>& contents, auto add) {
      if (!adjacent) {
        for (const auto& each : contents) add(buffer(each));
        return;
      }
      Bytes all;
      for (const auto& each : contents) all.insert(all.end(), each.begin(), each.end());
      char* at = buffer(all);
      for (const auto& each : contents) {
        add(at);
        at += each.size();
      }
    };
    // Expected contents of each buffer at the end.
    auto expect = [&](const std::vector<Bytes>& contents) {
      if (adjacent && contents.size() > 1) {
        Bytes all;
        for (const auto& each : contents) all.insert(all.end(), each.begin(), each.end());
        expected_.push_back(all);
      } else {
        expected_.insert(expected_.end(), contents.begin(), contents.end());
      }
    };
    auto give = [&](const std::vector<Bytes>& contents) {
      pieces(contents, [&](char* at) { op.inputs.push_back(at); });
      expect(contents);
    };
    auto take = [&](const std::vector<Bytes>& results) {
      std::vector<Bytes> blank;
      for (const auto& each : results) blank.emplace_back(each.size(), '?');
      pieces(blank, [&](char* at) { op.outputs.push_back(at); });
      expect(results);
    };
    auto from_all = [&](auto f) {
      std::vector<Bytes> all;
      for (int r = 0; r < ranks; ++r) all.push_back(f(r));
      return all;
    };
    const bool is_root = rank == step.root;
    call.count = step.counts[me][0];
    switch (step.operation) {
      case Operation::all_reduce:
      case Operation::reduce:
      case Operation::broadcast: {
        if (step.operation != Operation::all_reduce) call.root = step.root;
        op.outputs = {buffer(data_of(step, rank, 0))};
        expected_.push_back(step.operation == Operation::broadcast               ? data_of(step, step.root, 0)
                            : step.operation == Operation::all_reduce || is_root ? tree_of(step, ranks, 0)
                                                                                 : data_of(step, rank, 0));
        break;
      }
      case Operation::all_gather:
      case Operation::gather: {
        const bool takes = step.operation == Operation::all_gather || is_root;
        if (step.operation == Operation::gather) call.root = step.root;
        give({data_of(step, rank, 0)});
        if (takes) take(from_all([&](int r) { return data_of(step, r, 0); }));
        for (std::size_t r = 0; takes && r < p; ++r) call.from.push_back(step.counts[r][0]);
        break;
      }
      case Operation::scatter:
        call.root = step.root;
        call.count = step.counts[static_cast<std::size_t>(step.root)][me];
        if (is_root) give(from_all([&](int r) { return data_of(step, rank, r); }));
        if (is_root) call.to = step.counts[me];
        take({data_of(step, step.root, rank)});
        break;
      case Operation::reduce_scatter:
        call.count = step.counts[me][me];
        call.to = step.counts[me];
        give(from_all([&](int r) { return data_of(step, rank, r); }));
        take({tree_of(step, ranks, rank)});
        break;
      case Operation::all_to_all:
        call.to = step.counts[me];
        for (std::size_t r = 0; r < p; ++r) call.from.push_back(step.counts[r][me]);
        give(from_all([&](int r) { return data_of(step, rank, r); }));
        take(from_all([&](int r) { return data_of(step, r, rank); }));
        break;
      case Operation::barrier: call.count = 0; break;
      default:
        call.operation = is_root ? Operation::send : Operation::recv;
        call.root = is_root ? step.peer : step.from_any ? detail::kAnySource : step.root;
        call.count = step.counts[0][0];
        if (is_root)
          give({data_of(step, step.root, 0)});
        else
          take({data_of(step, step.root, 0)});
        break;
    }
    call.bytes = call.count * static_cast<std::int64_t>(step.kind.size);
    call.shape = {call.count};
    post(std::move(op), below(own, 2) == 0);
  }

  // Returns what is wrong with it, or nothing.
  std::string end() {
    if (item_) member_.op_queue->wait(*item_, Clock::now() + seconds(60));
    if (message_) member_.messages->wait(*message_, Clock::now() + seconds(60));
    if (auto failed = ended_.get(); !failed.empty()) {
      for (auto& each : buffers_) each.keep();
      return failed;
    }
    for (std::size_t i = 0; i < buffers_.size(); ++i)
      if (!buffers_[i].holds(expected_[i]))
        return fmt::format("wrong: step {}, {} of {} bytes each, buffer {} of {}", step_.number,
                           name(step_.operation), step_.kind.size, i, buffers_.size());
    return {};
  }

 private:
  struct Item final : detail::OpItem {
    std::promise<std::string> told;
    static std::string text(const std::exception_ptr& error) {
      try {
        if (error) std::rethrow_exception(error);
      } catch (const PeerLost&) {
        return "lost";
      } catch (const std::exception& problem) {
        return problem.what();
      }
      return {};
    }
    void done(const std::exception_ptr& error, int) override { told.set_value(text(error)); }
  };

  void post(Op op, bool soon) {
    if (!detail::point_to_point(op.call.operation)) {
      item_ = std::make_shared<Item>();
      item_->op = std::move(op);
      ended_ = item_->told.get_future();
      item_->start(seconds(60));
      member_.op_queue->post(item_, soon);
      return;
    }
    auto told = std::make_shared<std::promise<std::string>>();
    ended_ = told->get_future();
    op.done = [told](const std::exception_ptr& error, int) { told->set_value(Item::text(error)); };
    const int peer = op.call.root;
    message_ = member_.messages->post(std::move(op), peer, step_.number, seconds(60));
  }

  const Step step_;
  Member& member_;
  std::vector<Guarded> buffers_;
  std::vector<Bytes> expected_;
  std::shared_ptr<Item> item_;
  Messages::ItemPtr message_;
  std::future<std::string> ended_;
};

constexpr int kRight = 0;

// Runs some steps, with as many of them pending as this rank likes.
int run_program(Member& member, unsigned seed, int steps) {
  Random shared(seed), own(seed * 31 + static_cast<unsigned>(member.rank) + 7);
  const std::size_t most = one_of(own, std::vector<std::size_t>{1, 4, 32});
  std::vector<std::unique_ptr<Running>> pending;
  auto end_one = [&](std::size_t which) {
    const auto problem = pending[which]->end();
    pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(which));
    if (problem.empty()) return kRight;
    if (problem == "lost") return kLost;
    std::fprintf(stderr, "seed %u, rank %d: %s\n", seed, member.rank, problem.c_str());
    return kWrong;
  };
  for (int i = 0; i < steps; ++i) {
    const auto step = random_step(shared, member.ranks, i);
    if (step.operation != Operation::send || member.rank == step.root || member.rank == step.peer)
      pending.push_back(std::make_unique<Running>(step, member, own));
    if (below(own, 50) == 0) std::this_thread::sleep_for(microseconds(below(own, 2000)));
    while (pending.size() > most || (!pending.empty() && below(own, 3) == 0))
      if (const int status = end_one(below(own, pending.size())); status != kRight) return status;
  }
  while (!pending.empty())
    if (const int status = end_one(below(own, pending.size())); status != kRight) return status;
  return kRight;
}

unsigned from_environment(const char* name, unsigned fallback) {
  const char* text = std::getenv(name);
  return text != nullptr ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : fallback;
}

Engine::Tuning random_tuning(Random& random) {
  Engine::Tuning tuning;
  tuning.spin = microseconds(one_of(random, std::vector<int>{0, 20}));
  tuning.chunk = one_of(random, std::vector<std::size_t>{256, 4096, 16384, 262144});
  tuning.claim = one_of(random, std::vector<std::size_t>{4096, 131072});
  tuning.pull_up_to = one_of(random, std::vector<int>{1, 3, 8});
  tuning.slot_pull = one_of(random, std::vector<std::size_t>{64, 16384, SIZE_MAX});
  return tuning;
}

template <typename Disturb>
void run_programs(unsigned first, int steps, Disturb disturb) {
  const auto programs = from_environment("LOCKSTEP_TEST_PROGRAMS", 6);
  first = from_environment("LOCKSTEP_TEST_SEED", first);
  for (unsigned seed = first; seed < first + programs; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Random random(seed);
    const int ranks = 2 + static_cast<int>(below(random, 4));
    Processes processes(
        ranks, [&](Member& member) { return run_program(member, seed, steps); }, random_tuning(random));
    ASSERT_TRUE(processes.met());
    disturb(processes, random, ranks);
  }
}

void expect_all_right(Processes& processes, int ranks) {
  std::vector<int> statuses;
  for (const auto& each : processes.wait()) statuses.push_back(each.status);
  EXPECT_EQ(statuses, std::vector<int>(static_cast<std::size_t>(ranks), kRight));
}

TEST(RandomPrograms, give_what_one_process_works_out) {
  run_programs(1, 400, [](Processes& processes, Random&, int ranks) { expect_all_right(processes, ranks); });
}

TEST(RandomPrograms, are_right_though_ranks_are_stopped_now_and_then) {
  run_programs(1000, 200, [](Processes& processes, Random& random, int ranks) {
    for (int i = 0; i < 5; ++i) {
      const int rank = static_cast<int>(below(random, static_cast<std::size_t>(ranks)));
      processes.kill(rank, SIGSTOP);
      std::this_thread::sleep_for(milliseconds(below(random, 40)));
      processes.kill(rank, SIGCONT);
      std::this_thread::sleep_for(milliseconds(below(random, 20)));
    }
    expect_all_right(processes, ranks);
  });
}

// The surviving ranks report it and have returned no wrong result.
TEST(RandomPrograms, end_when_a_rank_is_killed) {
  run_programs(2000, 100'000, [](Processes& processes, Random& random, int ranks) {
    const int victim = static_cast<int>(below(random, static_cast<std::size_t>(ranks)));
    std::this_thread::sleep_for(microseconds(below(random, 300'000)));
    processes.kill(victim, SIGKILL);
    const auto ended = processes.wait();
    for (int r = 0; r < ranks; ++r) {
      if (r == victim) continue;
      EXPECT_EQ(ended[static_cast<std::size_t>(r)].status, kLost) << "rank " << r;
    }
  });
}

}  // namespace
}  // namespace lockstep::shm
