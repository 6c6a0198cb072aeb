// Numbers that tests send, and the expected reductions, computed on one rank. All are exact in every dtype,
// so that results are compared bit for bit whatever the engine's order of sums.
#pragma once

#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "support/ranks.h"

namespace lockstep::testing {

inline const std::vector<at::ScalarType> kTrainingDtypes = {
    at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt, at::kLong, at::kByte, at::kBool};
inline const std::vector<ReduceOp> kReductions = {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT,
                                                  ReduceOp::MIN, ReduceOp::MAX, ReduceOp::BAND,
                                                  ReduceOp::BOR, ReduceOp::BXOR};

inline at::TensorOptions on(at::ScalarType type = at::kFloat) {
  return at::TensorOptions(type).device(test_device());
}

inline bool defined_for(ReduceOp op, at::ScalarType type) {
  const bool bitwise = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
  if (at::isFloatingType(type)) return !bitwise;
  return op != ReduceOp::AVG;
}

// Rank r's tensor: small integers that differ between ranks and elements. salt distinguishes calls.
inline at::Tensor value(int rank, at::IntArrayRef sizes, at::ScalarType type, int salt = 0,
                        ReduceOp op = ReduceOp::SUM) {
  auto index = at::arange(c10::multiply_integers(sizes), on(at::kLong));
  if (type == at::kBool) return ((index + rank + salt) % 3 == 0).view(sizes);
  // A product of 8 ranks' values fits in a byte; a sum in bfloat16's exact integers.
  auto numbers = op == ReduceOp::PRODUCT ? ((index + rank + salt) % 5 == 0).to(at::kLong) + 1
                                         : (index * 3 + rank * 7 + salt) % 5 + 1;
  return numbers.to(type).view(sizes);
}

inline at::Tensor reduced(const std::vector<at::Tensor>& tensors, ReduceOp op) {
  const auto type = tensors[0].scalar_type();
  const bool floating = at::isFloatingType(type);
  auto result = tensors[0].to(floating ? at::kDouble : at::kLong);
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    auto next = tensors[i].to(result.scalar_type());
    switch (op) {
      case ReduceOp::SUM:
      case ReduceOp::AVG: result = result + next; break;
      case ReduceOp::PRODUCT: result = result * next; break;
      case ReduceOp::MIN: result = at::minimum(result, next); break;
      case ReduceOp::MAX: result = at::maximum(result, next); break;
      case ReduceOp::BAND: result = result.bitwise_and(next); break;
      case ReduceOp::BOR: result = result.bitwise_or(next); break;
      case ReduceOp::BXOR: result = result.bitwise_xor(next); break;
    }
  }
  if (op == ReduceOp::AVG) result = result / static_cast<double>(tensors.size());
  return result.to(type);
}

// The reduction over all ranks of value(rank, ...).
inline at::Tensor reduced_values(int ranks, at::IntArrayRef sizes, at::ScalarType type, ReduceOp op,
                                 int salt = 0) {
  std::vector<at::Tensor> tensors;
  for (int r = 0; r < ranks; ++r) tensors.push_back(value(r, sizes, type, salt, op));
  return reduced(tensors, op);
}

}  // namespace lockstep::testing

// Same shape, dtype and bits.
#define EXPECT_SAME(a, b)                                                                              \
  do {                                                                                                 \
    const at::Tensor a_ = (a), b_ = (b);                                                               \
    EXPECT_TRUE(a_.scalar_type() == b_.scalar_type() && a_.sizes() == b_.sizes() && at::equal(a_, b_)) \
        << "got\n"                                                                                     \
        << a_ << "\nexpected\n"                                                                        \
        << b_;                                                                                         \
  } while (false)
