#include <lockstep/comm/transports/mpi/module/datatypes.h>

#include <array>
#include <map>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <lockstep/comm/c10d/tensors.h>
#include <lockstep/comm/reduce/reduce.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

namespace lockstep::detail {
namespace {

// MPI passes no context to a reduction function, so each pair has its own.
template <Dtype dtype, ReduceOp op>
void combine(void* in, void* inout, int* count, MPI_Datatype* /*type*/) {
  const std::array<const void*, 2> inputs = {in, inout};
  reduce_tree(dtype, op, inputs, inout, static_cast<std::size_t>(*count));
}

template <Dtype dtype>
MPI_User_function* combiner(ReduceOp op) {
  switch (op) {
    case ReduceOp::SUM: return &combine<dtype, ReduceOp::SUM>;
    case ReduceOp::PRODUCT: return &combine<dtype, ReduceOp::PRODUCT>;
    case ReduceOp::MIN: return &combine<dtype, ReduceOp::MIN>;
    case ReduceOp::MAX: return &combine<dtype, ReduceOp::MAX>;
    default: return nullptr;
  }
}

// MPI has no 16-bit floats, and its MIN and MAX may drop a NaN where LibTorch's keep it.
MPI_User_function* own_combiner(Dtype dtype, ReduceOp op) {
  const bool ordered = op == ReduceOp::MIN || op == ReduceOp::MAX;
  switch (dtype) {
    case Dtype::bfloat16: return combiner<Dtype::bfloat16>(op);
    case Dtype::float16: return combiner<Dtype::float16>(op);
    case Dtype::float32: return ordered ? combiner<Dtype::float32>(op) : nullptr;
    case Dtype::float64: return ordered ? combiner<Dtype::float64>(op) : nullptr;
    default: return nullptr;
  }
}

// Types and operations that MPI lacks, created at first use. Progress thread only.
struct Made {
  MPI_Datatype two_bytes = MPI_DATATYPE_NULL;
  std::map<std::pair<Dtype, ReduceOp>, MPI_Op> ops;
};

Made& made() {
  static auto* value = new Made;
  return *value;
}

MPI_Datatype two_bytes() {
  MPI_Datatype& type = made().two_bytes;
  if (type == MPI_DATATYPE_NULL) {
    check_mpi(MPI_Type_contiguous(2, MPI_BYTE, &type), "MPI_Type_contiguous");
    check_mpi(MPI_Type_commit(&type), "MPI_Type_commit");
  }
  return type;
}

MPI_Datatype type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32: return MPI_FLOAT;
    case Dtype::float64: return MPI_DOUBLE;
    case Dtype::bfloat16:
    case Dtype::float16: return two_bytes();
    case Dtype::int8: return MPI_INT8_T;
    case Dtype::int16: return MPI_INT16_T;
    case Dtype::int32: return MPI_INT32_T;
    case Dtype::int64: return MPI_INT64_T;
    case Dtype::uint8:
    case Dtype::boolean: return MPI_UINT8_T;
    default: break;
  }
  throw std::runtime_error("the MPI transport does not reduce this dtype");
}

MPI_Op native_op(Dtype dtype, ReduceOp op) {
  const bool boolean = dtype == Dtype::boolean;
  switch (op) {
    case ReduceOp::SUM: return boolean ? MPI_BOR : MPI_SUM;
    case ReduceOp::PRODUCT: return boolean ? MPI_BAND : MPI_PROD;
    case ReduceOp::MIN: return MPI_MIN;
    case ReduceOp::MAX: return MPI_MAX;
    case ReduceOp::BAND: return MPI_BAND;
    case ReduceOp::BOR: return MPI_BOR;
    case ReduceOp::BXOR: return MPI_BXOR;
    case ReduceOp::AVG: break;
  }
  throw std::runtime_error("MPI does not support this reduction");
}

template <typename T, typename Wide = T>
void divide_as(void* values, std::int64_t count, int divisor) {
  T* data = static_cast<T*>(values);
  const auto by = static_cast<Wide>(divisor);
  for (std::int64_t i = 0; i < count; ++i) data[i] = static_cast<T>(static_cast<Wide>(data[i]) / by);
}

}  // namespace

std::string mpi_error_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS || length <= 0)
    return fmt::format("MPI error {}", code);
  return {text.data(), static_cast<std::size_t>(length)};
}

void check_mpi(int code, const char* what) {
  if (code != MPI_SUCCESS) throw std::runtime_error(fmt::format("{} failed: {}", what, mpi_error_text(code)));
}

bool mpi_is_up() {
  int finalized = 0;
  return MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0;
}

ReduceOp mpi_reduction(Dtype dtype, const c10d::ReduceOp& op) {
  const auto ours = from_c10d(op);
  const bool complex = dtype == Dtype::complex64 || dtype == Dtype::complex128;
  TORCH_CHECK(!complex && reducible(dtype, ours), "mpi: ", std::string(name(ours)), " of ",
              std::string(name(dtype)), " is not supported");
  return ours;
}

MpiReduction mpi_reduction_of(Dtype dtype, ReduceOp op) {
  if (op == ReduceOp::AVG) op = ReduceOp::SUM;
  MPI_User_function* own = own_combiner(dtype, op);
  if (own == nullptr) return {type_of(dtype), native_op(dtype, op)};
  MPI_Op& created = made().ops.try_emplace({dtype, op}, MPI_OP_NULL).first->second;
  if (created == MPI_OP_NULL) check_mpi(MPI_Op_create(own, /*commute=*/1, &created), "MPI_Op_create");
  return {type_of(dtype), created};
}

void free_mpi_reductions() noexcept {
  for (auto& [key, op] : made().ops)
    if (op != MPI_OP_NULL) MPI_Op_free(&op);
  if (made().two_bytes != MPI_DATATYPE_NULL) MPI_Type_free(&made().two_bytes);
}

void divide(Dtype dtype, void* values, std::int64_t count, int divisor) {
  switch (dtype) {
    case Dtype::float32: return divide_as<float>(values, count, divisor);
    case Dtype::float64: return divide_as<double>(values, count, divisor);
    case Dtype::bfloat16: return divide_as<c10::BFloat16, float>(values, count, divisor);
    case Dtype::float16: return divide_as<c10::Half, float>(values, count, divisor);
    default: throw std::runtime_error("this dtype does not support averages");
  }
}

}  // namespace lockstep::detail
