#include <lockstep/comm/c10d/op_checks.h>

#include <ATen/ATen.h>
#include <lockstep/comm/engine/op.h>
#include <lockstep/comm/reduce/reduce.h>

namespace lockstep::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

// Advice for a reduction that does not exist.
const char* advice(ReduceOp op, Dtype dtype) {
  if (dtype == Dtype::complex64 || dtype == Dtype::complex128)
    return "complex numbers support sum and avg; for other reductions use torch.view_as_real(tensor)";
  if (dtype == Dtype::boolean) return "convert the tensor to numbers, e.g. with tensor.float()";
  if (dtype == Dtype::float32 || dtype == Dtype::float64 || dtype == Dtype::bfloat16 ||
      dtype == Dtype::float16)
    return "bitwise reductions require integers or bool";
  return op == ReduceOp::AVG ? "convert the tensor to a floating-point type or to int64"
                             : "convert the tensor to int64 or a floating-point type";
}

}  // namespace

const at::Tensor& only(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "expected one tensor, got ", tensors.size(),
              ": make a separate call for each");
  return tensors[0];
}

void check_pairs(const Tensors& outputs, const Tensors& inputs) {
  TORCH_CHECK(outputs.size() == inputs.size(), "expected as many outputs as inputs, got ", outputs.size(),
              " and ", inputs.size());
}

void check_operands(const Call& call, const Tensors& inputs, const Tensors& outputs) {
  const auto operation = call.operation;
  const auto all = static_cast<std::size_t>(call.size), rank = static_cast<std::size_t>(call.rank);
  const bool root = call.root == call.rank;
  if (point_to_point(operation)) {
    const bool any = operation == Operation::recv && call.root == kAnySource;
    TORCH_CHECK(any || (call.root >= 0 && call.root < call.size && call.root != call.rank),
                "expected another rank of the group as the peer, got ", call.root);
  }
  TORCH_CHECK(!rooted(operation) || (call.root >= 0 && call.root < call.size),
              "expected a root below the group's size of ", call.size, ", got ", call.root);
  auto expect = [&](const char* what, const Tensors& tensors, std::size_t expected) {
    TORCH_CHECK(tensors.size() == expected, "expected ", expected, " ", what, ", got ", tensors.size());
  };
  if (operation == Operation::reduce_scatter || operation == Operation::all_to_all)
    expect("inputs", inputs, all);
  if (operation == Operation::scatter) expect("inputs", inputs, root ? all : 0);
  if (operation == Operation::all_gather || operation == Operation::all_to_all)
    expect("outputs", outputs, all);
  if (operation == Operation::gather) expect("outputs", outputs, root ? all : 0);
  if (operation == Operation::all_gather)
    TORCH_CHECK(inputs[0].numel() == outputs[rank].numel(), "the input has ", inputs[0].numel(),
                " elements, but this rank's part of the output has room for ", outputs[rank].numel());
  if (operation == Operation::reduce_scatter)
    TORCH_CHECK(inputs[rank].numel() == outputs[0].numel(), "this rank's part of the input has ",
                inputs[rank].numel(), " elements, but the output has ", outputs[0].numel());
}

void check_reduction(const Call& call, bool truncates) {
  const auto op = call.reduction;
  const bool truncated = truncates && op == ReduceOp::AVG && averages_truncated(call.dtype);
  TORCH_CHECK(truncated || reducible(call.dtype, op), name(op), " of ", name(call.dtype),
              " is not defined: ", advice(op, call.dtype));
}

}  // namespace lockstep::detail
