// The collectives in shared memory, with ranks as threads on one mapping, so that a sanitizer sees both ends.
#include <lockstep/comm/transports/shm/engine/engine.h>

#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include <fmt/format.h>
#include <lockstep/comm/reduce/reduce.h>

#include "comm/transports/shm/engine/threads.h"
#include "support/errors.h"
#include "support/eventually.h"

namespace lockstep::shm {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

struct Shape {
  int ranks;
  std::size_t count;         // elements per piece
  std::vector<bool> shared;  // by rank, cyclically: whether its tensors are in shared memory
};

std::string text(const Shape& shape) {
  std::string kinds;
  for (bool each : shape.shared) kinds += each ? 's' : 'p';
  return fmt::format("{} ranks, {} elements, {}", shape.ranks, shape.count, kinds);
}

// Small ones in the slot, some that need one window, some that need many.
std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (int ranks : {1, 2, 3, 4, 5, 8})
    for (std::size_t count : {0u, 1u, 7u, 1000u, 5000u, 70001u})
      for (const auto& shared : {std::vector<bool>{false}, {true}, {true, false}})
        all.push_back({ranks, count, shared});
  return all;
}

// A rank's tensors, filled from its number.
class Tensors {
 public:
  Tensors(ThreadMemory& memory, bool shared) : memory_(memory), shared_(shared) {}
  ~Tensors() {
    for (char* each : all_) memory_.drop(each);
  }
  float* make(std::size_t count, int seed) {
    auto* data = reinterpret_cast<float*>(all_.emplace_back(memory_.take(count * sizeof(float), shared_)));
    std::minstd_rand random(static_cast<unsigned>(seed + 1));
    for (std::size_t i = 0; i < count; ++i)
      data[i] = static_cast<float>(random() % 2000) / 64 - 15 + 1e-3f * static_cast<float>(random() % 7);
    return data;
  }

 private:
  ThreadMemory& memory_;
  const bool shared_;
  std::vector<char*> all_;
};

std::vector<float> copy_of(const float* data, std::size_t count) { return {data, data + count}; }

class EngineTest : public ::testing::Test {
 protected:
  static Call call(Operation operation, int rank, int ranks, std::int64_t count) {
    Call call;
    call.operation = operation;
    call.dtype = Dtype::float32;
    call.rank = rank;
    call.size = ranks;
    call.count = count;
    call.bytes = count * 4;
    call.shape = {count};
    call.group = "test";
    return call;
  }
  static void run(Engine& engine, Op& op) {
    op.item_size = 4;
    engine.begin(op);
    engine.finish(op, Clock::now() + seconds(60));
  }
};

TEST_F(EngineTest, all_reduce_gives_the_trees_bits_on_every_rank) {
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(text(shape));
    std::vector<std::vector<float>> inputs(static_cast<std::size_t>(shape.ranks));
    auto results = inputs;
    Ranks ranks(shape.ranks);
    ranks.run([&](int rank, Engine& engine) {
      Tensors tensors(ranks.memory(), shape.shared[static_cast<std::size_t>(rank) % shape.shared.size()]);
      float* data = tensors.make(shape.count, rank);
      inputs[static_cast<std::size_t>(rank)] = copy_of(data, shape.count);
      Op op;
      op.call = call(Operation::all_reduce, rank, shape.ranks, static_cast<std::int64_t>(shape.count));
      op.outputs = {data};
      run(engine, op);
      results[static_cast<std::size_t>(rank)] = copy_of(data, shape.count);
    });
    std::vector<const void*> pointers;
    for (const auto& input : inputs) pointers.push_back(input.data());
    std::vector<float> expected(shape.count);
    if (shape.count > 0)
      detail::reduce_tree(Dtype::float32, ReduceOp::SUM, pointers, expected.data(), shape.count);
    for (const auto& result : results) EXPECT_EQ(result, expected);
  }
}

TEST_F(EngineTest, a_refusal_reaches_every_rank_and_the_next_operation_works) {
  constexpr std::size_t kLarge = 70001;
  for (const Shape& shape :
       {Shape{1, 7, {false}}, {2, 7, {true}}, {2, kLarge, {false}}, {5, kLarge, {true, false}}}) {
    SCOPED_TRACE(text(shape));
    const auto count = static_cast<std::int64_t>(shape.count);
    Ranks ranks(shape.ranks);
    ranks.run([&](int rank, Engine& engine) {
      const auto me = static_cast<std::size_t>(rank);
      Tensors tensors(ranks.memory(), shape.shared[me % shape.shared.size()]);
      const auto all_reduce = [&](const std::string& refusal) {
        float* data = tensors.make(shape.count, rank);
        std::fill_n(data, shape.count, 1.f);
        Op op;
        op.call = call(Operation::all_reduce, rank, shape.ranks, count);
        op.refusal = refusal;
        if (refusal.empty()) op.outputs = {data};
        run(engine, op);
        EXPECT_EQ(data[shape.count - 1], static_cast<float>(shape.ranks));
      };
      const auto refused = [&](const std::string& refusal) {
        return testing::error_of<detail::Refused>([&] { all_reduce(refusal); });
      };
      const int last = shape.ranks - 1;
      // The peers have made new staging for it, which no rank has mapped when the next operation comes.
      EXPECT_EQ(refused(rank == last ? "not this" : ""), "not this");
      all_reduce("");
      EXPECT_EQ(refused("all refuse, rank " + std::to_string(rank)),
                "all refuse, rank " + std::to_string(rank));
      all_reduce("");
      const std::string longest(2 * kRefusal, 'x');
      EXPECT_EQ(refused(rank == last ? longest : ""), longest.substr(0, kRefusal - 1));

      // A different operation from the refused one, with a size for each pair of ranks.
      Op op;
      op.call = call(Operation::all_to_all, rank, shape.ranks, count * shape.ranks);
      op.call.to.assign(static_cast<std::size_t>(shape.ranks), count);
      op.call.from = op.call.to;
      float* data = tensors.make(shape.count * op.call.to.size(), rank);
      for (std::size_t r = 0; r < op.call.to.size(); ++r) {
        op.inputs.push_back(data + r * shape.count);
        op.outputs.push_back(data + r * shape.count);
      }
      if (rank == 0) op.refusal = "rank 0 refuses";
      EXPECT_EQ(testing::error_of<detail::Refused>([&] { run(engine, op); }), "rank 0 refuses");
      all_reduce("");
    });
  }
}

TEST_F(EngineTest, data_goes_where_it_belongs) {
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(text(shape));
    const auto p = static_cast<std::size_t>(shape.ranks);
    const auto count = static_cast<std::int64_t>(shape.count);
    const int root = shape.ranks - 1;
    std::vector<float> expected_sum(shape.count);
    Ranks ranks(shape.ranks);
    ranks.run([&](int rank, Engine& engine) {
      const auto me = static_cast<std::size_t>(rank);
      Tensors tensors(ranks.memory(), shape.shared[me % shape.shared.size()]);
      auto value = [&](int from, int to) { return 100 * from + to; };  // a seed for each pair
      auto expect = [&](const float* data, int seed) {
        Tensors other(ranks.memory(), false);
        EXPECT_EQ(copy_of(data, shape.count), copy_of(other.make(shape.count, seed), shape.count));
      };
      for (int repeat = 0; repeat < 2; ++repeat) {
        {
          Op op;
          op.call = call(Operation::broadcast, rank, shape.ranks, count);
          op.call.root = root;
          float* data = tensors.make(shape.count, rank);
          op.outputs = {data};
          run(engine, op);
          expect(data, root);
        }
        for (auto operation : {Operation::all_gather, Operation::gather}) {
          Op op;
          op.call = call(operation, rank, shape.ranks, count);
          if (operation == Operation::gather) op.call.root = root;
          op.inputs = {tensors.make(shape.count, rank)};
          const bool gets = operation == Operation::all_gather || rank == root;
          if (gets) op.call.from.assign(p, count);
          float* out = tensors.make(shape.count * p, 77);
          for (std::size_t r = 0; gets && r < p; ++r) op.outputs.push_back(out + r * shape.count);
          run(engine, op);
          for (std::size_t r = 0; gets && r < p; ++r) expect(out + r * shape.count, static_cast<int>(r));
        }
        {
          Op op;
          op.call = call(Operation::scatter, rank, shape.ranks, count);
          op.call.root = root;
          if (rank == root) op.call.to.assign(p, count);
          for (std::size_t r = 0; rank == root && r < p; ++r)
            op.inputs.push_back(tensors.make(shape.count, static_cast<int>(r)));  // not adjacent
          float* data = tensors.make(shape.count, 77);
          op.outputs = {data};
          run(engine, op);
          expect(data, rank);
        }
        {
          Op op;
          op.call = call(Operation::all_to_all, rank, shape.ranks, count * shape.ranks);
          op.call.to.assign(p, count);
          op.call.from.assign(p, count);
          float* in = tensors.make(shape.count * p, 0);
          float* out = tensors.make(shape.count * p, 0);
          for (std::size_t r = 0; r < p; ++r) {
            Tensors other(ranks.memory(), false);
            const float* piece = other.make(shape.count, value(rank, static_cast<int>(r)));
            std::memcpy(in + r * shape.count, piece, shape.count * 4);
            op.inputs.push_back(in + r * shape.count);
            op.outputs.push_back(out + r * shape.count);
          }
          run(engine, op);
          for (std::size_t r = 0; r < p; ++r) expect(out + r * shape.count, value(static_cast<int>(r), rank));
        }
        {
          Op op;
          op.call = call(Operation::reduce, rank, shape.ranks, count);
          op.call.root = root;
          op.call.reduction = ReduceOp::MAX;
          float* data = tensors.make(shape.count, rank);
          op.outputs = {data};
          run(engine, op);
          if (rank != root) expect(data, rank);
          std::vector<std::vector<float>> all;
          std::vector<const void*> pointers;
          for (std::size_t r = 0; r < p; ++r) {
            Tensors other(ranks.memory(), false);
            all.push_back(copy_of(other.make(shape.count, static_cast<int>(r)), shape.count));
          }
          for (const auto& each : all) pointers.push_back(each.data());
          std::vector<float> most(shape.count), sum(shape.count);
          if (shape.count > 0) {
            detail::reduce_tree(Dtype::float32, ReduceOp::MAX, pointers, most.data(), shape.count);
            detail::reduce_tree(Dtype::float32, ReduceOp::AVG, pointers, sum.data(), shape.count);
          }
          EXPECT_TRUE(rank != root || copy_of(data, shape.count) == most);

          Op scattered;
          scattered.call = call(Operation::reduce_scatter, rank, shape.ranks, count);
          scattered.call.reduction = ReduceOp::AVG;
          scattered.call.to.assign(p, count);
          for (std::size_t r = 0; r < p; ++r) {
            scattered.inputs.push_back(tensors.make(shape.count, rank));
          }
          float* out = tensors.make(shape.count, 77);
          scattered.outputs = {out};
          run(engine, scattered);
          EXPECT_EQ(copy_of(out, shape.count), sum);
        }
        Op op;
        op.call = call(Operation::barrier, rank, shape.ranks, 0);
        run(engine, op);
      }
    });
  }
}

TEST_F(EngineTest, a_mismatch_is_an_error_on_every_rank_and_nothing_is_written) {
  struct Case {
    std::function<void(Call&)> change;
    const char* text;
  };
  const std::vector<Case> cases = {
      {[](Call& each) { each.count = 3, each.bytes = 12, each.shape = {3}; }, "size"},
      {[](Call& each) { each.shape = {2, 2}; }, "shape"},
      {[](Call& each) { each.dtype = Dtype::int32; }, "dtype"},
      {[](Call& each) { each.reduction = ReduceOp::MAX; }, "reduction"},
      {[](Call& each) { each.tag = "other"; }, "tag"},
      {[](Call& each) { each.operation = Operation::reduce, each.root = 0; }, "operation"},
  };
  for (const Case& each : cases) {
    Ranks ranks(3);
    std::vector<std::string> errors(3);
    ranks.run([&](int rank, Engine& engine) {
      std::vector<float> data(4, 1.0f);
      Op op;
      op.call = call(Operation::all_reduce, rank, 3, 4);
      if (rank == 1) each.change(op.call);
      op.outputs = {data.data()};
      try {
        run(engine, op);
      } catch (const Mismatch& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
      EXPECT_EQ(data, std::vector<float>(4, 1.0f));
    });
    EXPECT_THAT(errors[0], HasSubstr(each.text));
    EXPECT_EQ(errors[1], errors[0]);
    EXPECT_EQ(errors[2], errors[0]);
  }
}

TEST_F(EngineTest, a_wait_ends_at_its_deadline_when_it_is_interrupted_and_when_the_other_leaves) {
  for (int end : {0, 1, 2}) {
    Ranks ranks(2);
    std::atomic<bool> waits = false;
    ranks.run([&](int rank, Engine& engine) {
      if (rank == 1) {
        while (!waits) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        if (end == 1) ranks.engine(0).barrier().interrupt("enough");
        if (end == 2) engine.barrier().leave();
        return;
      }
      float data = 1;
      Op op;
      op.call = call(Operation::all_reduce, rank, 2, 1);
      op.outputs = {&data};
      op.item_size = 4;
      engine.begin(op);
      EXPECT_EQ(engine.barrier().absent(), "rank 1 has not arrived");
      waits = true;
      const auto deadline = Clock::now() + (end == 0 ? seconds(0) : seconds(60));
      switch (end) {
        case 0: EXPECT_THROW(engine.finish(op, deadline), TimedOut); break;
        case 1: EXPECT_THROW(engine.finish(op, deadline), Interrupted); break;
        default: EXPECT_THROW(engine.finish(op, deadline), PeerLost); break;
      }
    });
  }
}

thread_local int self = -1;
thread_local std::set<std::pair<int, std::uint64_t>> seen;  // (rank, offset) of the memory seen so far

// A rank may end once its operation has: no peer needs its memory afterwards.
TEST_F(EngineTest, nobody_looks_for_the_memory_of_a_rank_that_is_done) {
  constexpr int kRanks = 3;
  for (const auto& shared :
       {std::vector<bool>{false, false, false}, {true, true, true}, {true, false, false}})
    for (const auto& operations : {std::vector<Operation>{Operation::broadcast},
                                   {Operation::all_reduce},
                                   {Operation::gather, Operation::broadcast}})
      for (int held_up = 0; held_up < kRanks; ++held_up) {
        SCOPED_TRACE(fmt::format("{} {} {}", name(operations[0]), shared[0], held_up));
        Ranks ranks(kRanks);
        std::array<std::atomic<bool>, kRanks> ended{};
        ranks.memory().on_map = [&](int rank, Place place) {
          if (!seen.insert({rank, place.offset}).second) return;  // memory that was mapped once stays mapped
          if (self == held_up) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          if (ended[static_cast<std::size_t>(rank)]) throw std::runtime_error("it has ended");
        };
        ranks.run([&](int rank, Engine& engine) {
          self = rank;
          Tensors tensors(ranks.memory(), shared[static_cast<std::size_t>(rank)]);
          for (auto each : operations) {
            constexpr std::int64_t kCount = 4000;  // one window
            // After a gather only the root has mapped its peers' stages.
            const int root = operations.size() > 1 && each == Operation::broadcast ? 1 : 0;
            Op op;
            op.call = call(each, rank, kRanks, kCount);
            if (each != Operation::all_reduce) op.call.root = root;
            float* data = tensors.make(kCount, rank);
            op.outputs = {data};
            if (each == Operation::gather) {
              op.inputs = {data};
              op.outputs.clear();
              if (rank == root)
                for (int r = 0; r < kRanks; ++r) op.outputs.push_back(tensors.make(kCount, r));
              if (rank == root) op.call.from.assign(kRanks, kCount);
            }
            EXPECT_NO_THROW(run(engine, op));
          }
          ended[static_cast<std::size_t>(rank)] = true;
        });
      }
}

// Chunks that it has claimed are not done by another rank: its peers must not wait for them.
TEST_F(EngineTest, a_rank_that_fails_in_the_middle_keeps_nobody_waiting) {
  constexpr int kRanks = 3;
  Ranks ranks(kRanks);
  std::atomic<bool> has_failed = false;
  ranks.memory().on_map = [&](int, Place) {
    if (self != 1) return;
    has_failed = true;
    throw std::runtime_error("no memory to map it");
  };
  std::array<std::string, kRanks> errors;
  const auto began = Clock::now();
  std::vector<Tensors> kept(kRanks, {ranks.memory(), true});  // peers may still use them
  ranks.run([&](int rank, Engine& engine) {
    self = rank;
    Tensors& tensors = kept[static_cast<std::size_t>(rank)];
    Op op;
    op.call = call(Operation::all_reduce, rank, kRanks, 70000);
    op.outputs = {tensors.make(70000, rank)};
    op.item_size = 4;
    engine.begin(op);
    // Not before rank 1 has claimed one.
    EXPECT_TRUE(rank == 1 || testing::eventually([&] { return has_failed.load(); }));
    try {
      engine.finish(op, Clock::now() + seconds(120));
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(rank)] = error.what();
      engine.give_up();
    }
  });
  EXPECT_THAT(errors[1], HasSubstr("no memory"));
  EXPECT_THAT(errors[0], HasSubstr("aborted"));
  EXPECT_THAT(errors[2], HasSubstr("aborted"));
  EXPECT_LT(Clock::now() - began, seconds(90)) << "the deadline is 120 s";
}

// After that its owner may reuse its tensor.
TEST_F(EngineTest, what_a_rank_has_begun_and_given_up_is_complete_for_nobody) {
  Ranks ranks(2);
  std::atomic<bool> gone = false;
  std::vector<Tensors> kept(2, {ranks.memory(), true});
  ranks.run([&](int rank, Engine& engine) {
    Tensors& tensors = kept[static_cast<std::size_t>(rank)];
    Op op;
    op.call = call(Operation::all_reduce, rank, 2, 70000);
    op.outputs = {tensors.make(70000, rank)};
    op.item_size = 4;
    if (rank == 0) {
      engine.begin(op);
      engine.give_up();
      gone = true;
      return;
    }
    while (!gone) std::this_thread::yield();
    engine.begin(op);
    EXPECT_THROW(engine.finish(op, Clock::now() + seconds(60)), PeerLost);
  });
}

// A dtype without a name here is still distinguished by its size.
TEST_F(EngineTest, elements_of_another_size_are_a_mismatch) {
  Ranks ranks(2);
  ranks.run([&](int rank, Engine& engine) {
    std::vector<char> data(400, 1);
    Op op;
    op.call = call(Operation::broadcast, rank, 2, 100);
    op.call.dtype = Dtype::other;
    op.call.root = 0;
    op.outputs = {data.data()};
    op.item_size = rank == 0 ? 4 : 1;
    engine.begin(op);
    EXPECT_THROW(engine.finish(op, Clock::now() + seconds(60)), Mismatch);
  });
}

TEST_F(EngineTest, ranks_that_are_tuned_differently_are_told) {
  const Engine::Tuning all{.chunk = 16384, .claim = 8192};
  for (const auto& other : {Engine::Tuning{.chunk = 32768, .claim = 8192},
                            {.chunk = 16384, .claim = 16384},
                            {.chunk = 16384, .claim = 8192, .pull_up_to = 5},
                            {.chunk = 16384, .claim = 8192, .slot_pull = 5}}) {
    Ranks ranks({all, other});
    ranks.run([&](int rank, Engine& engine) {
      Tensors tensors(ranks.memory(), true);
      Op op;
      op.call = call(Operation::all_reduce, rank, 2, 70000);
      op.outputs = {tensors.make(70000, rank)};
      EXPECT_THROW(run(engine, op), Mismatch);
    });
  }
}

// Many operations of different kinds and sizes, one right after another.
TEST_F(EngineTest, operations_follow_one_another) {
  constexpr int kRanks = 4, kRounds = 300;
  Ranks ranks(kRanks);
  ranks.run([&](int rank, Engine& engine) {
    std::minstd_rand random(7);  // the same on every rank
    for (int i = 0; i < kRounds; ++i) {
      const std::size_t count = random() % 3 == 0 ? random() % 40000 : random() % 3000;
      const bool mixed = random() % 4 == 0;
      Tensors tensors(ranks.memory(), mixed ? rank % 2 == 0 : random() % 2 == 0);
      float* data = tensors.make(count, 0);
      for (std::size_t k = 0; k < count; ++k) data[k] = static_cast<float>(rank + i);
      Op op;
      op.call = call(Operation::all_reduce, rank, kRanks, static_cast<std::int64_t>(count));
      op.outputs = {data};
      run(engine, op);
      for (std::size_t k = 0; k < count; ++k)
        ASSERT_EQ(data[k], static_cast<float>(0 + 1 + 2 + 3 + 4 * i)) << "round " << i << ", element " << k;
    }
  });
}

}  // namespace
}  // namespace lockstep::shm
