// Every collective against a reference computed on one rank. Runs on every transport and number of ranks:
// tests/CMakeLists.txt has the table, docs/evidence/conformance.md the results.
#include <chrono>
#include <thread>

#include "support/ranks.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

using std::chrono::milliseconds;

// bf16 and half sums are exact here, but an average need not be: engines that divide a rounded sum and
// engines that round once agree only if the quotient is exact.
void expect_close(const at::Tensor& got, const at::Tensor& expected) {
  ASSERT_EQ(got.scalar_type(), expected.scalar_type());
  EXPECT_TRUE(at::allclose(got.to(at::kDouble), expected.to(at::kDouble), 1e-2, 0)) << "got\n"
                                                                                    << got << "\nexpected\n"
                                                                                    << expected;
}

void expect_reduced(const at::Tensor& got, const at::Tensor& expected, ReduceOp op) {
  if (op == ReduceOp::AVG)
    expect_close(got, expected);
  else
    EXPECT_SAME(got, expected);
}

// NCCL has no bitwise reductions; and, or of booleans are min and max.
bool has_reduction(ReduceOp op, at::ScalarType type) {
  const bool bitwise = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
  return !by_nccls_rules() || !bitwise || (type == at::kBool && op != ReduceOp::BXOR);
}

template <typename F>
void for_every_reduction(F&& f) {
  for (auto type : kTrainingDtypes)
    for (auto op : kReductions)
      if (defined_for(op, type) && has_reduction(op, type)) {
        SCOPED_TRACE(std::string(name(op)) + " of " + c10::toString(type));
        f(type, op);
      }
}

TEST(Conformance, all_reduce) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for_every_reduction([&](at::ScalarType type, ReduceOp op) {
      auto tensor = value(group.rank(), {3, 5}, type, 0, op);
      group.all_reduce(tensor, {.op = op, .tag = "test"}).wait();
      expect_reduced(tensor, reduced_values(group.size(), {3, 5}, type, op), op);
    });
  });
}

TEST(Conformance, all_reduce_of_a_large_tensor) {
  on_every_rank([](World& world) {
    auto group = world.group();
    auto tensor = value(group.rank(), {1'000'003}, at::kFloat);
    group.all_reduce(tensor).wait();
    EXPECT_SAME(tensor, reduced_values(group.size(), {1'000'003}, at::kFloat, ReduceOp::SUM));
  });
}

TEST(Conformance, all_reduce_of_scalars_and_nothing) {
  on_every_rank([](World& world) {
    auto group = world.group();
    auto scalar = at::scalar_tensor(group.rank() + 1.0, on(at::kDouble));
    group.all_reduce(scalar).wait();
    EXPECT_EQ(scalar.item<double>(), group.size() * (group.size() + 1) / 2);
    auto nothing = at::empty({0, 3}, on());
    group.all_reduce(nothing).wait();
    EXPECT_EQ(nothing.numel(), 0);
  });
}

TEST(Conformance, all_reduce_of_views) {
  on_every_rank([](World& world) {
    auto group = world.group();
    auto whole = value(group.rank(), {6, 4}, at::kFloat);
    auto before = whole.clone();
    group.all_reduce(whole.t()).wait();
    EXPECT_SAME(whole, reduced_values(group.size(), {6, 4}, at::kFloat, ReduceOp::SUM));
    auto striped = before.clone();
    group.all_reduce(striped.slice(1, 0, 4, 2)).wait();
    EXPECT_SAME(striped.slice(1, 0, 4, 2), whole.slice(1, 0, 4, 2));
    EXPECT_SAME(striped.slice(1, 1, 4, 2), before.slice(1, 1, 4, 2));
  });
}

TEST(Conformance, all_reduce_passes_nan_and_infinity) {
  on_every_rank([](World& world) {
    auto group = world.group();
    const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
    for (auto op : {ReduceOp::SUM, ReduceOp::MAX, ReduceOp::MIN}) {
      auto tensor = at::ones({3}, on());
      if (group.rank() == group.size() - 1) tensor = at::tensor({nan, infinity, 1.0}, on(at::kFloat));
      group.all_reduce(tensor, {.op = op}).wait();
      const bool drops_nan = transport() == "gloo" && op != ReduceOp::SUM && group.size() > 1;
      EXPECT_TRUE(drops_nan || std::isnan(tensor[0].item<float>())) << name(op);
      EXPECT_EQ(op != ReduceOp::MIN || group.size() == 1, std::isinf(tensor[1].item<float>())) << name(op);
    }
  });
}

TEST(Conformance, all_reduce_of_a_leaf_that_requires_grad) {
  on_every_rank([](World& world) {
    auto group = world.group();
    auto parameter = at::ones({4}, on()).requires_grad_();
    group.all_reduce(parameter).wait();
    EXPECT_SAME(parameter.detach(), at::full({4}, group.size(), on(at::kFloat)));
  });
}

TEST(Conformance, reduce) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for (int root = 0; root < group.size(); ++root)
      for (auto type : kTrainingDtypes)
        for (auto op : {ReduceOp::SUM, ReduceOp::MAX, ReduceOp::AVG}) {
          if (!defined_for(op, type)) continue;
          auto tensor = value(group.rank(), {7}, type, root);
          const auto before = tensor.clone();
          group.reduce(tensor, {.op = op, .root = root}).wait();
          if (group.rank() == root)
            expect_reduced(tensor, reduced_values(group.size(), {7}, type, op, root), op);
          else
            EXPECT_SAME(tensor, before);
        }
  });
}

TEST(Conformance, broadcast) {
  on_every_rank([](World& world) {
    auto group = world.group();
    auto dtypes = kTrainingDtypes;
    dtypes.insert(dtypes.end(), {at::kChar, at::kShort, at::kComplexFloat});
    for (int root = 0; root < group.size(); ++root)
      for (auto type : dtypes) {
        auto tensor = value(group.rank(), {2, 9}, type, root);
        group.broadcast(tensor, {.root = root}).wait();
        EXPECT_SAME(tensor, value(root, {2, 9}, type, root));
        auto view = value(group.rank(), {9, 2}, type, root).t();
        group.broadcast(view, {.root = root}).wait();
        EXPECT_SAME(view, value(root, {9, 2}, type, root).t());
      }
    auto nothing = at::empty({0}, on());
    group.broadcast(nothing).wait();
  });
}

TEST(Conformance, all_gather) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for (auto type : kTrainingDtypes) {
      std::vector<at::Tensor> expected;
      for (int r = 0; r < group.size(); ++r) expected.push_back(value(r, {2, 3}, type));
      auto out = at::zeros({2 * group.size(), 3}, on(type));
      group.all_gather(out, value(group.rank(), {2, 3}, type)).wait();
      EXPECT_SAME(out, at::cat(expected));
      auto view = at::zeros({3, 2 * group.size()}, on(type)).t();
      group.all_gather(view, value(group.rank(), {3, 2}, type).t().contiguous()).wait();
      for (int r = 0; r < group.size(); ++r)
        EXPECT_SAME(view.narrow(0, 2 * r, 2), value(r, {3, 2}, type).t());
    }
    auto out = at::empty({0}, on());
    group.all_gather(out, at::empty({0}, on())).wait();
  });
}

// Rank r has r * 3 % 4 rows, so some have none.
std::int64_t rows(int rank) { return rank * 3 % 4; }

TEST(Conformance, all_gather_of_unequal_sizes) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for (auto type : kTrainingDtypes) {
      std::vector<at::Tensor> out;
      for (int r = 0; r < group.size(); ++r)
        out.push_back(r % 2 == 0 ? at::zeros({rows(r), 3}, on(type)) : at::zeros({3, rows(r)}, on(type)).t());
      group.all_gather(out, value(group.rank(), {rows(group.rank()), 3}, type)).wait();
      for (int r = 0; r < group.size(); ++r)
        EXPECT_SAME(out[static_cast<std::size_t>(r)], value(r, {rows(r), 3}, type));
    }
  });
}

TEST(Conformance, gather) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for (bool equal : {true, false})
      for (int root = 0; root < group.size(); ++root)
        for (auto type : kTrainingDtypes) {
          auto size = [&](int rank) { return equal ? 2 : rows(rank); };
          std::vector<at::Tensor> out;
          for (int r = 0; r < group.size() && group.rank() == root; ++r)
            out.push_back(at::zeros({size(r), 3}, on(type)));
          group.gather(out, value(group.rank(), {size(group.rank()), 3}, type, root), {.root = root}).wait();
          for (std::size_t r = 0; r < out.size(); ++r)
            EXPECT_SAME(out[r], value(static_cast<int>(r), {size(static_cast<int>(r)), 3}, type, root));
        }
  });
}

TEST(Conformance, scatter) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for (bool equal : {true, false})
      for (int root = 0; root < group.size(); ++root)
        for (auto type : kTrainingDtypes) {
          auto size = [&](int rank) { return equal ? 2 : rows(rank); };
          std::vector<at::Tensor> in;
          for (int r = 0; r < group.size() && group.rank() == root; ++r)
            in.push_back(value(r, {3, size(r)}, type, root).t());
          auto out = at::zeros({size(group.rank()), 3}, on(type));
          group.scatter(out, in, {.root = root}).wait();
          EXPECT_SAME(out, value(group.rank(), {3, size(group.rank())}, type, root).t());
        }
  });
}

TEST(Conformance, reduce_scatter) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for_every_reduction([&](at::ScalarType type, ReduceOp op) {
      auto in = value(group.rank(), {2 * group.size(), 3}, type, 0, op);
      auto out = at::zeros({3, 2}, on(type)).t();
      group.reduce_scatter(out, in, {.op = op}).wait();
      auto all = reduced_values(group.size(), {2 * group.size(), 3}, type, op);
      expect_reduced(out, all.narrow(0, 2 * group.rank(), 2), op);
      EXPECT_SAME(in, value(group.rank(), {2 * group.size(), 3}, type, 0, op));
    });
  });
}

TEST(Conformance, reduce_scatter_of_unequal_sizes) {
  on_every_rank([](World& world) {
    auto group = world.group();
    for_every_reduction([&](at::ScalarType type, ReduceOp op) {
      std::vector<at::Tensor> in;
      for (int r = 0; r < group.size(); ++r) in.push_back(value(group.rank(), {rows(r), 3}, type, r, op));
      auto out = at::zeros({3, rows(group.rank())}, on(type)).t();
      group.reduce_scatter(out, in, {.op = op}).wait();
      expect_reduced(out, reduced_values(group.size(), {rows(group.rank()), 3}, type, op, group.rank()), op);
    });
  });
}

TEST(Conformance, all_to_all) {
  on_every_rank([](World& world) {
    auto group = world.group();
    const int n = group.size(), me = group.rank();
    for (auto type : kTrainingDtypes) {
      auto in = value(me, {2 * n, 3}, type);
      auto out = at::zeros({2 * n, 3}, on(type));
      group.all_to_all(out, in).wait();
      for (int r = 0; r < n; ++r)
        EXPECT_SAME(out.narrow(0, 2 * r, 2), value(r, {2 * n, 3}, type).narrow(0, 2 * me, 2));
    }
  });
}

TEST(Conformance, all_to_all_of_unequal_splits) {
  on_every_rank([](World& world) {
    auto group = world.group();
    const int n = group.size(), me = group.rank();
    auto split = [](int from, int to) -> std::int64_t { return (from + 2 * to) % 3; };
    for (auto type : kTrainingDtypes) {
      std::vector<std::int64_t> to, from;
      std::vector<at::Tensor> in, expected;
      for (int r = 0; r < n; ++r) {
        to.push_back(split(me, r));
        from.push_back(split(r, me));
        in.push_back(value(me, {split(me, r), 2}, type, r));
        expected.push_back(value(r, {split(r, me), 2}, type, me));
      }
      auto out = at::zeros({at::cat(expected).size(0), 2}, on(type));
      group.all_to_all(out, at::cat(in), {.out_splits = from, .in_splits = to}).wait();
      EXPECT_SAME(out, at::cat(expected));
    }
  });
}

// Messages that ranks send each other at the same time: without tags they must start them in the same order
// or coalesce.
void both(Group& group, const std::function<void()>& messages) {
  if (group.has_tags(test_device().type())) return messages();
  group.coalesce(messages);
}

TEST(Conformance, send_and_recv) {
  LOCKSTEP_NEEDS_RANKS(2);
  on_every_rank([](World& world) {
    auto group = world.group();
    const int n = group.size(), me = group.rank(), next = (me + 1) % n, previous = (me + n - 1) % n;
    const bool tags = group.has_tags(test_device().type());
    EXPECT_EQ(tags, !by_nccls_rules());
    for (auto type : kTrainingDtypes) {
      auto in = at::zeros({4, 3}, on(type)).t();
      std::vector<Work> works;
      both(group, [&] {
        works.push_back(group.recv(in, {.peer = previous}));
        works.push_back(group.send(value(me, {4, 3}, type).t(), {.peer = next}));
      });
      for (auto& work : works) work.wait();
      EXPECT_SAME(in, value(previous, {4, 3}, type).t());
      EXPECT_EQ(works[0].source(), previous);
    }
    // One after another, in the same order on both ranks: many may be in flight.
    if (me < 2) {
      std::vector<at::Tensor> in;
      std::vector<Work> works;
      for (int i = 0; i < 8; ++i) {
        if (i % 2 == me) {
          works.push_back(group.send(value(me, {1000 + i}, at::kFloat, i), {.peer = 1 - me}));
        } else {
          in.push_back(at::zeros({1000 + i}, on()));
          works.push_back(group.recv(in.back(), {.peer = 1 - me}));
        }
      }
      for (auto& work : works) work.wait();
      for (int i = 0; i < 8; ++i)
        if (i % 2 != me)
          EXPECT_SAME(in[static_cast<std::size_t>(i / 2)], value(1 - me, {1000 + i}, at::kFloat, i));
    }
    if (!tags) {
      auto tensor = at::zeros({3}, on());
      EXPECT_THAT(error_of<ConfigError>([&] { (void)group.send(tensor, {.peer = next, .tag = 3}); }),
                  HasSubstr("tag=3 is not supported on group 'world': nccl has no tags"));
      EXPECT_THAT(error_of<ConfigError>([&] { (void)group.recv(tensor, {.peer = kAnyRank}); }),
                  HasSubstr("recv from any rank is not supported on group 'world': with nccl"));
      return;
    }
    // Tags pair them, whatever the order.
    std::vector<at::Tensor> in;
    std::vector<Work> works;
    for (int tag = 0; tag < 8; ++tag) {
      in.push_back(at::zeros({1000 + tag}, on()));
      works.push_back(group.recv(in.back(), {.peer = previous, .tag = tag}));
    }
    for (int tag = 7; tag >= 0; --tag)
      works.push_back(group.send(value(me, {1000 + tag}, at::kFloat, tag), {.peer = next, .tag = tag}));
    for (auto& work : works) work.wait();
    for (int tag = 0; tag < 8; ++tag)
      EXPECT_SAME(in[static_cast<std::size_t>(tag)], value(previous, {1000 + tag}, at::kFloat, tag));
  });
}

// Longer than the group's own timeout.
TEST(Conformance, send_and_recv_with_a_timeout_of_their_own) {
  LOCKSTEP_NEEDS_RANKS(2);
  if (transport() == "gloo" || transport() == "mpi" || transport() == "nccl")
    GTEST_SKIP() << "the engine decides how long making a group may take";
  on_every_rank([](World& world) {
    auto group = world.group();
    if (group.rank() < 2) {
      // For groups of processes, the timeout covers the creation of the group too.
      const milliseconds timeout(ranks_are_threads() ? 200 : 1000);
      auto hasty = group.subgroup({0, 1}, {.timeout = timeout});
      const PeerOptions patient{.peer = 1 - group.rank(), .timeout = std::chrono::seconds(60)};
      auto tensor = value(group.rank(), {5}, at::kFloat);
      if (group.rank() == 0) {
        std::this_thread::sleep_for(timeout + milliseconds(200));
        hasty.send(tensor, patient).wait();
      } else {
        hasty.recv(tensor, patient).wait();
        EXPECT_SAME(tensor, value(0, {5}, at::kFloat));
      }
    }
    group.barrier().wait();
  });
}

TEST(Conformance, recv_from_any_rank) {
  LOCKSTEP_NEEDS_RANKS(2);
  if (by_nccls_rules()) GTEST_SKIP() << "NCCL cannot receive from any rank";
  on_every_rank([](World& world) {
    auto group = world.group();
    if (group.rank() != 0)
      return group.send(value(group.rank(), {5}, at::kFloat), {.peer = 0, .tag = 9}).wait();
    std::vector<bool> seen(static_cast<std::size_t>(group.size()));
    for (int i = 1; i < group.size(); ++i) {
      auto in = at::zeros({5}, on());
      auto work = group.recv(in, {.peer = kAnyRank, .tag = 9});
      work.wait();
      ASSERT_TRUE(work.source().has_value());
      EXPECT_SAME(in, value(*work.source(), {5}, at::kFloat));
      EXPECT_FALSE(seen.at(static_cast<std::size_t>(*work.source())));
      seen[static_cast<std::size_t>(*work.source())] = true;
    }
  });
}

TEST(Conformance, barrier) {
  on_every_rank([](World& world) {
    auto group = world.group();
    auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
    for (int round = 0; round < 3; ++round) {
      std::this_thread::sleep_for(milliseconds((group.rank() * 7 + round * 3) % 20));
      const auto entered = now();
      group.barrier().wait();
      const auto left = now();
      // All ranks of a host share a clock.
      const auto entries = group.all_gather_values(entered);
      EXPECT_GE(left, *std::max_element(entries.begin(), entries.end()));
    }
  });
}

TEST(Conformance, values_and_strings) {
  on_every_rank([](World& world) {
    auto group = world.group();
    struct Point {
      int x;
      double y;
    };
    for (int root = 0; root < group.size(); ++root) {
      auto point = group.broadcast_value(Point{group.rank(), group.rank() * 0.5}, {.root = root});
      EXPECT_EQ(point.x, root);
      EXPECT_EQ(point.y, root * 0.5);
      for (std::size_t length : {0, 1, 247, 248, 249, 100'000}) {
        auto text = group.broadcast_value(
            std::string(group.rank() == root ? length : 3, static_cast<char>('a' + group.rank())),
            {.root = root});
        EXPECT_EQ(text, std::string(length, static_cast<char>('a' + root)));
      }
    }
    auto all = group.all_gather_values(std::string(static_cast<std::size_t>(group.rank()) * 200, 'x'));
    for (std::size_t r = 0; r < all.size(); ++r) EXPECT_EQ(all[r], std::string(r * 200, 'x'));
  });
}

TEST(Conformance, overlapping_operations) {
  on_every_rank([](World& world) {
    auto group = world.group();
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 24; ++i) {
      tensors.push_back(value(group.rank(), {1 + i * 977}, at::kFloat, i));
      if (i % 3 == 2)
        works.push_back(group.broadcast(tensors.back(), {.root = i % group.size()}));
      else
        works.push_back(group.all_reduce(tensors.back()));
    }
    for (int i = 23; i >= 0; --i) {
      works[static_cast<std::size_t>(i)].wait();
      EXPECT_TRUE(works[static_cast<std::size_t>(i)].done());
      auto expected = i % 3 == 2 ? value(i % group.size(), {1 + i * 977}, at::kFloat, i)
                                 : reduced_values(group.size(), {1 + i * 977}, at::kFloat, ReduceOp::SUM, i);
      EXPECT_SAME(tensors[static_cast<std::size_t>(i)], expected);
    }
  });
}

TEST(Conformance, coalesced_operations) {
  on_every_rank([](World& world) {
    auto group = world.group();
    const int n = group.size(), me = group.rank(), next = (me + 1) % n, previous = (me + n - 1) % n;
    for (int round = 0; round < 3; ++round) {
      std::vector<at::Tensor> sums;
      std::vector<Work> works;
      auto gathered = at::zeros({n * 3}, on(at::kLong)), part = at::zeros({5}, on()),
           received = at::zeros({1000}, on());
      auto half_a_matrix = at::zeros({4, 6}, on());
      half_a_matrix.slice(1, 0, 6, 2).copy_(value(me, {4, 3}, at::kFloat, round));
      group.coalesce([&] {
        for (int i = 0; i < 6; ++i) {
          sums.push_back(value(me, {1 + i * 977}, at::kFloat, i));
          works.push_back(group.all_reduce(sums.back()));
        }
        works.push_back(group.all_gather(gathered, value(me, {3}, at::kLong, round)));
        works.push_back(group.reduce_scatter(part, value(me, {5 * n}, at::kFloat, round)));
        works.push_back(group.all_reduce(half_a_matrix.slice(1, 0, 6, 2)));
        if (n > 1) {
          works.push_back(group.send(value(me, {1000}, at::kFloat, round), {.peer = next}));
          works.push_back(group.recv(received, {.peer = previous}));
        }
        EXPECT_FALSE(works.back().done());
        auto dropped = group.all_reduce(at::ones({10}, on()));
      });
      for (auto& work : works) work.wait();
      for (int i = 0; i < 6; ++i)
        EXPECT_SAME(sums[static_cast<std::size_t>(i)],
                    reduced_values(n, {1 + i * 977}, at::kFloat, ReduceOp::SUM, i));
      for (int r = 0; r < n; ++r) EXPECT_SAME(gathered.narrow(0, 3 * r, 3), value(r, {3}, at::kLong, round));
      EXPECT_SAME(part, reduced_values(n, {5 * n}, at::kFloat, ReduceOp::SUM, round).narrow(0, 5 * me, 5));
      EXPECT_SAME(half_a_matrix.slice(1, 0, 6, 2),
                  reduced_values(n, {4, 3}, at::kFloat, ReduceOp::SUM, round));
      if (n > 1) EXPECT_SAME(received, value(previous, {1000}, at::kFloat, round));
    }
    group.coalesce([] {});  // empty
  });
}

TEST(Conformance, coalesced_operations_that_go_wrong) {
  on_every_rank([](World& world) {
    auto group = world.group();
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    const auto works_within = [&](const std::function<void()>& call) {
      group.coalesce([&] {
        tensors.push_back(at::ones({3}, on()));
        works.push_back(group.all_reduce(tensors.back()));
        call();
      });
    };
    EXPECT_THAT(error_of<ConfigError>([&] { works_within([&] { works.back().wait(); }); }),
                HasSubstr("cannot be waited for within coalesce"));
    EXPECT_THAT(error_of<ConfigError>([&] { works_within([&] { (void)group.barrier(); }); }),
                HasSubstr("barrier on group 'world' cannot be called within coalesce of"));
    EXPECT_THAT(error_of<ConfigError>([&] { works_within([&] { (void)group.all_gather_values(1); }); }),
                HasSubstr("all_gather_values on group"));
    EXPECT_THAT(error_of<ConfigError>([&] { works_within([&] { group.coalesce([] {}); }); }),
                HasSubstr("coalesce on group"));
    auto another = group.split(0);
    EXPECT_THAT(
        error_of<ConfigError>([&] { works_within([&] { (void)another.all_reduce(at::ones({1}, on())); }); }),
        HasSubstr("cannot be called within coalesce of group"));
    // The program's exception propagates; operations started before it still run.
    EXPECT_THAT(error_of<std::runtime_error>(
                    [&] { works_within([] { throw std::runtime_error("the program's own"); }); }),
                HasSubstr("the program's own"));
    for (auto& work : works) work.wait();
    EXPECT_EQ(tensors.size(), 6u);
    for (const auto& tensor : tensors) EXPECT_EQ(tensor[0].item<double>(), group.size());
    // Calls of other threads come after the batch, on every rank.
    auto first = at::full({1}, group.rank() + 1.0, on()), second = first.clone();
    std::thread other;
    std::vector<Work> batch;
    group.coalesce([&] {
      batch.push_back(group.all_reduce(first));
      other = std::thread([&] { group.all_reduce(second, {.op = ReduceOp::MAX}).wait(); });
      std::this_thread::sleep_for(milliseconds(20));
      batch.push_back(group.broadcast(tensors[0]));
    });
    other.join();
    EXPECT_EQ(batch[1].call().sequence, batch[0].call().sequence + 1);
    for (auto& work : batch) work.wait();
    EXPECT_EQ(first.item<double>(), group.size() * (group.size() + 1) / 2);
    EXPECT_EQ(second.item<double>(), group.size());
  });
}

TEST(Conformance, subgroups_at_the_same_time) {
  on_every_rank([](World& world) {
    auto group = world.group();
    const int parity = group.rank() % 2;
    auto half = group.split(parity);
    EXPECT_EQ(half.size(), (group.size() + 1 - parity) / 2);
    EXPECT_EQ(half.rank(), group.rank() / 2);
    for (int round = 0; round < 10; ++round) {
      auto a = value(half.rank(), {100}, at::kFloat, round),
           b = value(group.rank(), {100}, at::kFloat, round);
      auto first = half.all_reduce(a);
      auto second = group.all_reduce(b);
      if (parity == 0) std::this_thread::sleep_for(milliseconds(1));
      second.wait();
      first.wait();
      EXPECT_SAME(a, reduced_values(half.size(), {100}, at::kFloat, ReduceOp::SUM, round));
      EXPECT_SAME(b, reduced_values(group.size(), {100}, at::kFloat, ReduceOp::SUM, round));
    }
  });
}

TEST(Conformance, split_orders_by_key) {
  on_every_rank([](World& world) {
    auto group = world.group();
    auto reversed = group.split(0, -group.rank());
    EXPECT_EQ(reversed.rank(), group.size() - 1 - group.rank());
    auto out = at::zeros({group.size()}, on(at::kLong));
    reversed.all_gather(out, at::full({1}, group.rank(), on(at::kLong))).wait();
    EXPECT_SAME(out, at::arange(group.size() - 1, -1, -1, on(at::kLong)));
  });
}

TEST(Conformance, groups_of_listed_ranks) {
  LOCKSTEP_NEEDS_RANKS(3);
  on_every_rank([](World& world) {
    if (world.rank() != 0 && world.rank() != 2) return;
    for (int round = 0; round < 2; ++round) {  // the same list again makes another group
      auto pair = world.group({2, 0});
      EXPECT_EQ(pair.rank(), world.rank() == 2 ? 0 : 1);
      auto tensor = at::full({3}, world.rank() + 1.0, on());
      pair.all_reduce(tensor).wait();
      EXPECT_SAME(tensor, at::full({3}, 4.0, on()));
    }
  });
}

TEST(Conformance, dropped_works_complete) {
  on_every_rank([](World& world) {
    auto group = world.group();
    auto kept = at::ones({1000}, on());
    for (int i = 0; i < 5; ++i) {
      auto gone = value(group.rank(), {5000}, at::kFloat, i);
      auto dropped = group.all_reduce(gone);  // the tensor is destroyed before the Work
    }
    if (group.size() > 1 && group.rank() < 2) {
      const PeerOptions other{.peer = 1 - group.rank(), .tag = by_nccls_rules() ? 0 : 3};
      std::vector<Work> received;
      both(group, [&] {
        auto gone = group.send(at::ones({20}, on()), other);
        received.push_back(group.recv(at::zeros({20}, on()), other));
      });
      received[0].wait();
    }
    group.all_reduce(kept).wait();
    EXPECT_SAME(kept, at::full({1000}, static_cast<double>(group.size()), on(at::kFloat)));
  });
}

TEST(Conformance, done_turns_true_by_polling) {
  on_every_rank([](World& world) {
    auto group = world.group();
    auto poll = [](Work& work) {
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (!work.done() && std::chrono::steady_clock::now() < limit)
        std::this_thread::sleep_for(milliseconds(1));
      EXPECT_TRUE(work.done());
      work.wait();
    };
    auto tensor = at::ones({10}, on());
    auto work = group.all_reduce(tensor);
    poll(work);
    EXPECT_SAME(tensor, at::full({10}, static_cast<double>(group.size()), on(at::kFloat)));
    if (group.size() == 1) return;
    const int n = group.size(), next = (group.rank() + 1) % n, previous = (group.rank() + n - 1) % n;
    auto in = at::zeros({4}, on());
    std::vector<Work> works;
    both(group, [&] {
      works.push_back(group.recv(in, {.peer = previous}));
      works.push_back(group.send(at::full({4}, static_cast<double>(group.rank()), on()), {.peer = next}));
    });
    for (auto& each : works) poll(each);
    EXPECT_SAME(in, at::full({4}, static_cast<double>(previous), on()));
  });
}

TEST(Conformance, allocate_gives_tensors_that_travel) {
  on_every_rank([](World& world) {
    auto group = world.group();
    auto tensor = group.allocate({3, 4}, at::kDouble);
    tensor.fill_(group.rank() + 1.0);
    group.all_reduce(tensor.narrow(0, 1, 1)).wait();
    EXPECT_EQ(tensor[1][0].item<double>(), group.size() * (group.size() + 1) / 2);
    EXPECT_EQ(tensor[0][0].item<double>(), group.rank() + 1.0);
    tensor.resize_({5000, 4}).fill_(group.rank() + 1.0);
    group.all_reduce(tensor).wait();
    EXPECT_EQ(tensor[4999][3].item<double>(), group.size() * (group.size() + 1) / 2);
    EXPECT_EQ(group.allocate({0, 3}).numel(), 0);
    for (const std::vector<std::int64_t>& sizes :
         {std::vector<std::int64_t>{-1}, {3, -4}, {1LL << 62}, {1LL << 32, 1LL << 32}})
      EXPECT_THROW((void)group.allocate(sizes), ConfigError);
  });
}

}  // namespace
}  // namespace lockstep::testing
