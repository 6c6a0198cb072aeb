#include <lockstep/comm/call.h>

#include <lockstep/base/error.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using detail::find_mismatch;

// Two ranks that make the same call.
struct Two {
  Call a, b;
  explicit Two(Operation operation) {
    a.operation = operation;
    a.site = std::source_location::current();
    a.dtype = Dtype::float32;
    a.size = 2;
    a.count = 10;
    a.bytes = 40;
    a.shape = {10};
    if (detail::rooted(operation)) a.root = 0;
    b = a;
    b.rank = 1;
  }
  std::optional<std::string> mismatch() const {
    const Call* calls[] = {&a, &b};
    return find_mismatch(calls);
  }
};

constexpr Operation kCollectives[] = {Operation::all_reduce, Operation::reduce,         Operation::broadcast,
                                      Operation::all_gather, Operation::reduce_scatter, Operation::barrier};

TEST(Call, equal_calls_agree) {
  for (auto operation : kCollectives) EXPECT_EQ(Two(operation).mismatch(), std::nullopt);
}

TEST(Call, each_difference_is_named_with_both_calls) {
  auto expect = [](Two two, const char* field) {
    ASSERT_TRUE(two.mismatch().has_value()) << field;
    EXPECT_THAT(*two.mismatch(), AllOf(HasSubstr(field), HasSubstr("rank 0 called"),
                                       HasSubstr("rank 1 called"), HasSubstr("call_test.cpp")));
  };
  Two operation(Operation::all_reduce), dtype(Operation::all_reduce), reduction(Operation::all_reduce),
      root(Operation::broadcast), size(Operation::all_reduce), shape(Operation::all_reduce),
      tag(Operation::barrier), sequence(Operation::barrier);
  operation.b.operation = Operation::broadcast;
  dtype.b.dtype = Dtype::int32;
  reduction.b.reduction = ReduceOp::MAX;
  root.b.root = 1;
  size.b.count = 20;
  size.b.bytes = 80;
  shape.b.shape = {5, 2};
  tag.b.tag = "other";
  sequence.b.sequence = 5;
  expect(operation, "operation");
  expect(dtype, "dtype");
  expect(reduction, "reduction");
  expect(root, "root");
  expect(size, "size");
  expect(shape, "shape");
  expect(tag, "tag");
  expect(sequence, "sequence number");
}

TEST(Call, what_an_operation_does_not_use_may_differ) {
  Two two(Operation::broadcast);
  two.b.reduction = ReduceOp::MAX;
  EXPECT_EQ(two.mismatch(), std::nullopt);
}

TEST(Call, sizes_are_compared_between_giver_and_taker) {
  Two gather(Operation::gather);
  gather.a.from = {10, 10};
  EXPECT_EQ(gather.mismatch(), std::nullopt);
  gather.a.from = {10, 7};
  EXPECT_THAT(gather.mismatch().value_or(""),
              AllOf(HasSubstr("rank 1 gives rank 0 10 elements"), HasSubstr("expects 7")));

  Two scatter(Operation::scatter);
  scatter.a.to = {10, 3};
  EXPECT_THAT(scatter.mismatch().value_or(""), HasSubstr("rank 0 gives rank 1 3 elements"));

  Two exchange(Operation::all_to_all);
  exchange.a.to = {1, 2}, exchange.a.from = {1, 3};
  exchange.b.to = {3, 4}, exchange.b.from = {2, 4};
  EXPECT_EQ(exchange.mismatch(), std::nullopt);
  exchange.b.to = {5, 4};
  EXPECT_THAT(exchange.mismatch().value_or(""), HasSubstr("rank 1 gives rank 0 5 elements"));

  Two unequal(Operation::all_gather);
  unequal.a.from = unequal.b.from = {10, 4};
  unequal.b.count = 4;
  unequal.b.bytes = 16;
  EXPECT_EQ(unequal.mismatch(), std::nullopt);
  unequal.b.from = {10, 5};
  EXPECT_TRUE(unequal.mismatch().has_value());
}

TEST(Call, packing_keeps_what_is_compared_and_shown) {
  Two two(Operation::all_to_all);
  two.b.to = {1, 2}, two.b.from = {3, 4};
  two.b.tag = "grads";
  two.b.sequence = 1ull << 40;
  const auto bytes = detail::pack(two.b);
  EXPECT_EQ(bytes.size(), detail::packed_size(2));
  const auto back = detail::unpack(bytes, 2);
  EXPECT_EQ(back.to, two.b.to);
  EXPECT_EQ(back.from, two.b.from);
  EXPECT_EQ(back.sequence, two.b.sequence);
  EXPECT_EQ(detail::describe(back), detail::describe(two.b));
  EXPECT_TRUE(detail::unpack(detail::pack(two.a), 2).to.empty());
}

TEST(Call, bytes_that_make_no_sense_are_refused) {
  auto bytes = detail::pack(Two(Operation::all_reduce).a);
  for (std::size_t i = 0; i < 12; ++i) {  // operations, dtypes, reductions, root, rank
    auto spoiled = bytes;
    spoiled[i] = 0xee;
    EXPECT_THROW(detail::unpack(spoiled, 2), Error) << i;
  }
  bytes.pop_back();
  EXPECT_THROW(detail::unpack(bytes, 2), Error);
}

TEST(Call, a_description_names_only_what_the_operation_has) {
  Two two(Operation::barrier);
  two.a.tag = "epoch";
  EXPECT_THAT(detail::describe(two.a), HasSubstr("barrier(tag 'epoch') at call_test.cpp:"));
}

TEST(Call, long_texts_are_cut_not_overrun) {
  Two two(Operation::barrier);
  two.a.tag = std::string(1000, 'x');
  const auto back = detail::unpack(detail::pack(two.a), 2);
  EXPECT_EQ(back.tag, std::string(63, 'x'));
}

}  // namespace
}  // namespace lockstep::testing
