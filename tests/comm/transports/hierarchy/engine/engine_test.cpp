// The collectives of groups that span hosts, with ranks as threads.
#include <lockstep/comm/transports/hierarchy/engine/engine.h>

#include <atomic>
#include <cmath>
#include <latch>
#include <random>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/comm/reduce/reduce.h>

#include "comm/transports/hierarchy/engine/threads.h"
#include "support/errors.h"

namespace lockstep::hierarchy {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::error_of;
using testing::HasSubstr;
using Nodes = std::vector<int>;
using Bytes = std::vector<char>;

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

// Powers of two, other numbers, unequal hosts, alternating ranks, hosts out of order.
const std::vector<Nodes> kShapes = {{0, 0, 1, 1},
                                    {0, 1},
                                    {0, 0, 0, 0, 1, 1, 1, 1},
                                    {0, 0, 1, 1, 2, 2},
                                    {0, 0, 1, 1, 2, 2, 3, 3},
                                    {0, 0, 1},
                                    {0, 0, 0, 1},
                                    {0, 1, 1, 1},
                                    {0, 1, 0, 1},
                                    {0, 1, 2, 0, 1},
                                    {0, 1, 2},
                                    {5, 5, 3, 3, 5},
                                    {0, 0, 0, 1, 1, 1},
                                    {0, 1, 2, 3, 4},
                                    {0, 0, 0, 0, 1, 1, 1}};
const std::vector<std::size_t> kCounts = {0, 1, 7, 500, 1000, 5000, 30011};

std::string text(const Nodes& nodes, std::size_t count) {
  return fmt::format("hosts {}, {} elements", fmt::join(nodes, " "), count);
}

Call describe(Operation operation, int rank, std::size_t ranks, std::int64_t count,
              Dtype dtype = Dtype::float32) {
  Call call;
  call.operation = operation;
  call.dtype = dtype;
  call.rank = rank;
  call.size = static_cast<int>(ranks);
  call.count = count;
  call.bytes = count * static_cast<std::int64_t>(detail::item_size(dtype));
  call.shape = {count};
  call.group = "test";
  call.far_site = fmt::format("test.cpp:{}", rank);
  return call;
}

void run(Engine& engine, Op& part) {
  part.item_size = detail::item_size(part.call.dtype);
  engine.begin(part);
  engine.finish(part, Clock::now() + seconds(60));
}

std::vector<float> numbers(std::size_t count, int seed) {
  std::minstd_rand random(static_cast<unsigned>(seed + 1));
  std::vector<float> result(count);
  for (auto& x : result)
    x = std::ldexp(static_cast<float>(random() % 2000) - 1000, static_cast<int>(random() % 20) - 10);
  return result;
}

// The tree over all ranks, computed in one place.
std::vector<float> tree(const std::vector<std::vector<float>>& inputs, ReduceOp op) {
  std::vector<const void*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.data());
  std::vector<float> result(inputs[0].size());
  if (!result.empty()) detail::reduce_tree(Dtype::float32, op, pointers, result.data(), result.size());
  return result;
}

TEST(Hosts, say_where_the_tree_goes_on) {
  auto follows = [](const Nodes& nodes) { return Hosts(nodes, 0).follow_tree(); };
  for (const Nodes& nodes : {Nodes{0, 0, 1, 1},
                             {0, 1},
                             {4, 4, 4, 4},
                             {0, 1, 2},
                             {1, 1, 0, 0, 2, 2},
                             {0, 0, 1},
                             {0, 0, 0, 0, 1, 1, 1},
                             {0, 0, 1, 1, 2},
                             {3, 3, 3}})
    EXPECT_TRUE(follows(nodes)) << fmt::format("{}", fmt::join(nodes, " "));
  for (const Nodes& nodes :
       {Nodes{0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 1, 1}, {0, 0, 1, 1, 0, 0}, {0, 0, 1, 2, 2}})
    EXPECT_FALSE(follows(nodes)) << fmt::format("{}", fmt::join(nodes, " "));
  EXPECT_EQ(Hosts(Nodes{0, 0, 1, 1}, 0).text(), "2 hosts x 2 ranks");
  EXPECT_EQ(Hosts(Nodes{0, 0, 1}, 0).text(), "hosts of 2, 1 ranks");
  EXPECT_EQ(Hosts(Nodes{0, 1, 2}, 0).text(), "3 hosts x 1 rank");
}

TEST(Hosts, have_their_ranks_in_the_groups_order) {
  const Hosts hosts(Nodes{7, 3, 7, 3, 3}, 3);
  EXPECT_EQ(hosts.count(), 2);
  EXPECT_EQ(hosts.host(), 1);
  EXPECT_EQ(hosts.place(), 1);
  EXPECT_EQ(hosts.neighbours(), (std::vector{1, 3, 4}));
  EXPECT_EQ(hosts.leader_of(0), 0);
  EXPECT_EQ(hosts.carrier(0, 4), 0);  // two ranks there, so the first again
}

TEST(Hierarchy, sums_are_the_trees_where_hosts_are_subtrees_and_close_to_it_elsewhere) {
  for (const Nodes& nodes : kShapes)
    for (auto count : kCounts)
      for (auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
        SCOPED_TRACE(text(nodes, count));
        std::vector<std::vector<float>> inputs, results(nodes.size());
        for (std::size_t r = 0; r < nodes.size(); ++r) inputs.push_back(numbers(count, static_cast<int>(r)));
        HostRanks ranks(nodes);
        ranks.run([&](int rank, Engine& engine) {
          auto data = inputs[at(rank)];
          Op part;
          part.call = describe(Operation::all_reduce, rank, nodes.size(), static_cast<std::int64_t>(count));
          part.call.reduction = op;
          part.outputs = {data.data()};
          run(engine, part);
          results[at(rank)] = data;
        });
        const auto expected = tree(inputs, op);
        for (const auto& result : results) ASSERT_EQ(result, results[0]);
        if (Hosts(nodes, 0).follow_tree()) {
          ASSERT_EQ(results[0], expected);
          continue;
        }
        // docs/reference/shared-memory.md states this bound.
        for (std::size_t i = 0; i < count; ++i) {
          double magnitude = 0;
          for (const auto& input : inputs) magnitude += std::fabs(input[i]);
          if (op == ReduceOp::AVG) magnitude /= static_cast<double>(nodes.size());
          const double levels = 1 + std::ceil(std::log2(static_cast<double>(nodes.size())));
          ASSERT_LE(std::fabs(results[0][i] - expected[i]), 2 * (levels + 1) * 0x1p-24 * magnitude);
        }
      }
}

TEST(Hierarchy, every_dtype_and_reduction_has_the_bits_of_one_host) {
  std::mt19937 random(5);
  for (const Nodes& nodes : {Nodes{0, 0, 1, 1}, {0, 1}, {0, 0, 1, 1, 2, 2}})
    for (auto dtype : {Dtype::float32, Dtype::float64, Dtype::bfloat16, Dtype::float16, Dtype::int8,
                       Dtype::int64, Dtype::uint8, Dtype::boolean, Dtype::complex64})
      for (auto op :
           {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX, ReduceOp::BXOR}) {
        if (!detail::reducible(dtype, op)) continue;
        for (std::size_t count : {3u, 900u, 9000u}) {
          SCOPED_TRACE(text(nodes, count) + fmt::format(", {} of {}", name(op), name(dtype)));
          const auto item = detail::item_size(dtype);
          std::vector<Bytes> inputs(nodes.size(), Bytes(count * item)), results(nodes.size());
          std::vector<const void*> pointers;
          for (auto& input : inputs) {  // any bits, including NaN and infinity
            for (auto& byte : input)
              byte = static_cast<char>(dtype == Dtype::boolean ? random() % 2 : random() % 256);
            pointers.push_back(input.data());
          }
          Bytes expected(count * item);
          detail::reduce_tree(dtype, op, pointers, expected.data(), count);
          HostRanks ranks(nodes);
          ranks.run([&](int rank, Engine& engine) {
            auto data = inputs[at(rank)];
            Op part;
            part.call =
                describe(Operation::all_reduce, rank, nodes.size(), static_cast<std::int64_t>(count), dtype);
            part.call.reduction = op;
            part.outputs = {data.data()};
            run(engine, part);
            results[at(rank)] = data;
          });
          for (const auto& result : results) ASSERT_EQ(result, expected);
        }
      }
}

// Unequal on purpose: the number of elements of rank r.
std::size_t some(std::size_t count, int rank) { return count * static_cast<std::size_t>(rank * 3 % 4) / 2; }

// All other collectives one after another on one engine, twice.
TEST(Hierarchy, data_goes_where_it_belongs) {
  for (const Nodes& nodes : kShapes)
    for (std::size_t count : {0u, 1u, 100u, 5000u, 20000u}) {
      SCOPED_TRACE(text(nodes, count));
      const auto p = nodes.size();
      const auto n = static_cast<std::int64_t>(count);
      HostRanks ranks(nodes);
      ranks.run([&](int rank, Engine& engine) {
        for (int root : {static_cast<int>(p) - 1, 0, static_cast<int>(p) / 2}) {
          {
            Op part;
            part.call = describe(Operation::broadcast, rank, p, n);
            part.call.root = root;
            auto data = numbers(count, rank);
            part.outputs = {data.data()};
            run(engine, part);
            ASSERT_EQ(data, numbers(count, root));
          }
          {
            Op part;
            part.call = describe(Operation::reduce, rank, p, n);
            part.call.root = root;
            part.call.reduction = ReduceOp::MAX;
            auto data = numbers(count, rank);
            part.outputs = {data.data()};
            run(engine, part);
            std::vector<std::vector<float>> inputs;
            for (int r = 0; r < static_cast<int>(p); ++r) inputs.push_back(numbers(count, r));
            ASSERT_EQ(data, rank == root ? tree(inputs, ReduceOp::MAX) : numbers(count, rank));
          }
          {
            Op part;
            part.call = describe(Operation::gather, rank, p, static_cast<std::int64_t>(some(count, rank)));
            part.call.root = root;
            auto data = numbers(some(count, rank), rank);
            data.reserve(1);
            part.inputs = {data.data()};
            std::vector<std::vector<float>> out(p);
            if (rank == root)
              for (int r = 0; r < static_cast<int>(p); ++r) {
                out[at(r)].resize(some(count, r) + 1);
                part.outputs.push_back(out[at(r)].data());
                part.call.from.push_back(static_cast<std::int64_t>(some(count, r)));
              }
            run(engine, part);
            for (int r = 0; r < static_cast<int>(p) && rank == root; ++r) {
              out[at(r)].pop_back();
              ASSERT_EQ(out[at(r)], numbers(some(count, r), r));
            }
          }
          {
            Op part;
            part.call = describe(Operation::scatter, rank, p, static_cast<std::int64_t>(some(count, rank)));
            part.call.root = root;
            std::vector<float> data(some(count, rank) + 1);
            part.outputs = {data.data()};
            std::vector<std::vector<float>> in(p);
            if (rank == root)
              for (int r = 0; r < static_cast<int>(p); ++r) {
                in[at(r)] = numbers(some(count, r), 10 * root + r);
                in[at(r)].reserve(1);
                part.inputs.push_back(in[at(r)].data());
                part.call.to.push_back(static_cast<std::int64_t>(some(count, r)));
              }
            run(engine, part);
            data.pop_back();
            ASSERT_EQ(data, numbers(some(count, rank), 10 * root + rank));
          }
          for (bool even : {true, false}) {
            auto size = [&](int r) { return even ? count : some(count, r); };
            Op part;
            part.call = describe(Operation::all_gather, rank, p, static_cast<std::int64_t>(size(rank)));
            auto data = numbers(size(rank), rank);
            data.reserve(1);
            part.inputs = {data.data()};
            std::vector<std::vector<float>> out(p);
            for (int r = 0; r < static_cast<int>(p); ++r) {
              out[at(r)].resize(size(r) + 1);
              part.outputs.push_back(out[at(r)].data());
              part.call.from.push_back(static_cast<std::int64_t>(size(r)));
            }
            run(engine, part);
            for (int r = 0; r < static_cast<int>(p); ++r) {
              out[at(r)].pop_back();
              ASSERT_EQ(out[at(r)], numbers(size(r), r));
            }
          }
          for (bool even : {true, false}) {
            auto size = [&](int r) { return even ? count : some(count, r); };
            Op part;
            part.call = describe(Operation::reduce_scatter, rank, p, static_cast<std::int64_t>(size(rank)));
            part.call.reduction = ReduceOp::MIN;
            std::vector<std::vector<float>> in(p);
            for (int r = 0; r < static_cast<int>(p); ++r) {
              in[at(r)] = numbers(size(r), 10 * rank + r);
              in[at(r)].reserve(1);
              part.inputs.push_back(in[at(r)].data());
              part.call.to.push_back(static_cast<std::int64_t>(size(r)));
            }
            std::vector<float> data(size(rank) + 1);
            part.outputs = {data.data()};
            run(engine, part);
            std::vector<std::vector<float>> inputs;
            for (int r = 0; r < static_cast<int>(p); ++r)
              inputs.push_back(numbers(size(rank), 10 * r + rank));
            data.pop_back();
            ASSERT_EQ(data, tree(inputs, ReduceOp::MIN));
          }
          for (bool even : {true, false}) {
            auto size = [&](int from, int to) { return even ? count : some(count, from + 2 * to); };
            Op part;
            part.call = describe(Operation::all_to_all, rank, p, 0);
            std::vector<std::vector<float>> in(p), out(p);
            for (int r = 0; r < static_cast<int>(p); ++r) {
              in[at(r)] = numbers(size(rank, r), 10 * rank + r);
              in[at(r)].reserve(1);
              out[at(r)].resize(size(r, rank) + 1);
              part.inputs.push_back(in[at(r)].data());
              part.outputs.push_back(out[at(r)].data());
              part.call.to.push_back(static_cast<std::int64_t>(size(rank, r)));
              part.call.from.push_back(static_cast<std::int64_t>(size(r, rank)));
            }
            run(engine, part);
            for (int r = 0; r < static_cast<int>(p); ++r) {
              out[at(r)].pop_back();
              ASSERT_EQ(out[at(r)], numbers(size(r, rank), 10 * r + rank));
            }
          }
          {
            Op part;
            part.call = describe(Operation::barrier, rank, p, 0);
            run(engine, part);
          }
        }
      });
      for (const auto& [key, waiting] : ranks.network->letters) ASSERT_TRUE(waiting.empty());
    }
}

TEST(Hierarchy, sends_between_hosts_no_more_than_it_must) {
  // n = 64 KiB, p = 4, h = 2: n (h - 1) / p from each of 4 ranks for the sums, and as much for their results;
  // in addition the greetings of the leaders.
  constexpr std::size_t kCount = 16384;
  HostRanks ranks({0, 0, 1, 1}, {.window = 1 << 20});
  ranks.run([&](int rank, Engine& engine) {
    auto data = numbers(kCount, rank);
    Op part;
    part.call = describe(Operation::all_reduce, rank, 4, kCount);
    part.outputs = {data.data()};
    run(engine, part);
  });
  EXPECT_GE(ranks.network->sent, 2 * 4 * kCount);
  EXPECT_LE(ranks.network->sent, 2 * 4 * kCount + 2 * 4096);
  EXPECT_EQ(ranks.network->messages, 2u + 4u + 4u);
}

TEST(Hierarchy, ranks_whose_calls_differ_are_told_on_every_host_and_nothing_is_written) {
  struct Case {
    std::function<void(Call&)> change;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases = {
      {[](Call& call) { call.operation = Operation::barrier; }, {"operation", "barrier()"}},
      {[](Call& call) { call.operation = Operation::broadcast, call.root = 0; }, {"operation", "broadcast("}},
      {[](Call& call) { call.dtype = Dtype::int32; }, {"dtype", "int32"}},
      {[](Call& call) { call.reduction = ReduceOp::MAX; }, {"reduction", "max"}},
      {[](Call& call) { call.count = 5, call.bytes = 20, call.shape = {5}; }, {"size", "[5]"}},
      {[](Call& call) { call.tag = "other"; }, {"tag", "'other'"}}};
  for (const Nodes& nodes : {Nodes{0, 0, 1, 1}, {0, 1}, {0, 0, 1}, {0, 1, 2}, {0, 0, 1, 1, 2, 2, 3, 3}})
    for (int odd : {0, 1, static_cast<int>(nodes.size()) - 1})
      for (std::int64_t count : {10, 9000})
        for (const Case& each : cases) {
          SCOPED_TRACE(text(nodes, static_cast<std::size_t>(count)) + fmt::format(", odd rank {}", odd));
          HostRanks ranks(nodes);
          std::vector<std::string> texts(nodes.size());
          ranks.run([&](int rank, Engine& engine) {
            auto data = numbers(static_cast<std::size_t>(count), rank);
            Op part;
            part.call = describe(Operation::all_reduce, rank, nodes.size(), count);
            if (rank == odd) each.change(part.call);
            part.outputs = {data.data()};
            texts[at(rank)] = error_of<shm::Mismatch>([&] { run(engine, part); });
            EXPECT_EQ(data, numbers(static_cast<std::size_t>(count), rank));
          });
          for (const auto& text : texts) {
            EXPECT_EQ(text, texts[0]);
            EXPECT_THAT(text, AllOf(HasSubstr(fmt::format("rank {} called", odd)), HasSubstr("all_reduce("),
                                    HasSubstr(fmt::format("test.cpp:{}", odd))));
            for (const auto& part : each.parts) EXPECT_THAT(text, HasSubstr(part));
          }
        }
}

TEST(Hierarchy, sizes_of_pairs_that_differ_are_told) {
  for (const Nodes& nodes : {Nodes{0, 0, 1, 1}, {0, 1, 2}}) {
    HostRanks ranks(nodes);
    ranks.run([&](int rank, Engine& engine) {
      // Rank 1 gives rank 0 one element too many.
      std::vector<std::vector<float>> in(nodes.size(), std::vector<float>(3)), out = in;
      Op part;
      part.call = describe(Operation::all_to_all, rank, nodes.size(), 0);
      for (std::size_t r = 0; r < nodes.size(); ++r) {
        part.inputs.push_back(in[r].data());
        part.outputs.push_back(out[r].data());
        part.call.to.push_back(rank == 1 && r == 0 ? 3 : 2);
        part.call.from.push_back(2);
      }
      EXPECT_THAT(error_of<shm::Mismatch>([&] { run(engine, part); }),
                  AllOf(HasSubstr("rank 1 gives rank 0 3 elements"), HasSubstr("expects 2")));
    });
  }
}

TEST(Hierarchy, a_wait_ends_when_it_is_told_to) {
  for (const Nodes& nodes : {Nodes{0, 0, 1, 1}, {0, 1}}) {
    HostRanks ranks(nodes);
    const int missing = static_cast<int>(nodes.size()) - 1;
    std::atomic<bool> all_told = false;
    ranks.run([&](int rank, Engine& engine) {
      if (rank == missing) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        // The rank that its neighbours wait for is interrupted last: they would otherwise get the failure
        // from it.
        for (int r = missing - 1; r >= 0; --r) ranks.engine(r).interrupt("enough");
        all_told = true;
        return;
      }
      std::vector<float> data(10);
      Op part;
      part.call = describe(Operation::all_reduce, rank, nodes.size(), 10);
      part.outputs = {data.data()};
      EXPECT_THAT(error_of<shm::Interrupted>([&] { run(engine, part); }), HasSubstr("enough"));
      while (!all_told) std::this_thread::yield();  // otherwise the peers might see this rank's end first
      engine.give_up();
    });
  }
}

TEST(Hierarchy, at_the_deadline_it_is_said_who_is_absent) {
  HostRanks ranks({0, 0, 1, 1});
  std::vector<std::string> absent(4);
  std::latch ready(3), recorded(3);
  ranks.run([&](int rank, Engine& engine) {
    if (rank == 3) return;
    ready.arrive_and_wait();
    std::vector<float> data(10);
    Op part;
    part.call = describe(Operation::all_reduce, rank, 4, 10);
    part.item_size = 4;
    part.outputs = {data.data()};
    // The ranks give up one after another, the first one only after all have checked.
    const auto deadline = Clock::now() + std::chrono::milliseconds(100 + 300 * (2 - rank));
    try {
      engine.finish(part, deadline);
      ADD_FAILURE() << "no error";
      recorded.count_down();
    } catch (const std::exception& error) {
      absent[at(rank)] = std::string(error.what()) + ": " + engine.absent();
      recorded.arrive_and_wait();
      if (rank != 2) engine.give_up();
    }
  });
  EXPECT_THAT(absent[2], HasSubstr("rank 3 has not arrived"));
  EXPECT_THAT(absent[1], HasSubstr("rank 0 waits for rank 2 on another host"));
  EXPECT_THAT(absent[0], HasSubstr("rank 2 has not answered: it, or another rank of its host (2, 3)"));
}

}  // namespace
}  // namespace lockstep::hierarchy
