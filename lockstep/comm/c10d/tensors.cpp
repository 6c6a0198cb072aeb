#include <lockstep/comm/c10d/tensors.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ostream.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {

Dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return Dtype::float32;
    case at::kDouble: return Dtype::float64;
    case at::kBFloat16: return Dtype::bfloat16;
    case at::kHalf: return Dtype::float16;
    case at::kChar: return Dtype::int8;
    case at::kShort: return Dtype::int16;
    case at::kInt: return Dtype::int32;
    case at::kLong: return Dtype::int64;
    case at::kByte: return Dtype::uint8;
    case at::kBool: return Dtype::boolean;
    case at::kComplexFloat: return Dtype::complex64;
    case at::kComplexDouble: return Dtype::complex128;
    case at::kUInt16: return Dtype::uint16;
    case at::kUInt32: return Dtype::uint32;
    case at::kUInt64: return Dtype::uint64;
    case at::kFloat8_e5m2: return Dtype::float8_e5m2;
    case at::kFloat8_e4m3fn: return Dtype::float8_e4m3fn;
    default: return Dtype::other;
  }
}

void check_tensor(const at::Tensor& tensor, std::string_view what, bool writable) {
  if (!tensor.defined())
    throw ConfigError(fmt::format("{}: expected a tensor with data, got an undefined tensor", what));
  if (tensor.layout() != at::kStrided || tensor.is_quantized())
    throw ConfigError(fmt::format("{}: expected a dense tensor, got a sparse or quantized one (layout {})",
                                  what, fmt::streamed(tensor.layout())));
  if (!writable || tensor.is_contiguous()) return;
  // Sorted by stride, each dimension must step over the whole extent of the smaller ones.
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (std::int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  std::sort(dims.begin(), dims.end());
  std::int64_t reach = 0;
  for (auto [stride, size] : dims) {
    if (stride <= reach && tensor.numel() > 0)
      throw ConfigError(fmt::format(
          "{}: cannot write a result to a tensor whose elements may overlap in memory (sizes [{}], "
          "strides [{}], for example from expand()); use clone()",
          what, fmt::join(tensor.sizes(), ", "), fmt::join(tensor.strides(), ", ")));
    reach += stride * (size - 1);
  }
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  auto range = [](const at::Tensor& t) {
    const auto* begin = static_cast<const char*>(t.const_data_ptr());
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    return std::pair(begin, begin + (last + 1) * static_cast<std::int64_t>(t.element_size()));
  };
  const auto [a_begin, a_end] = range(a);
  const auto [b_begin, b_end] = range(b);
  return a_begin < b_end && b_begin < a_end;
}

std::vector<at::Tensor> copy_what_is_written_over(Op& part, at::Device device) {
  std::vector<at::Tensor> copies;
  const Call& call = part.call;
  const auto rank = static_cast<std::size_t>(call.rank);
  auto bytes = [&](std::int64_t elements) { return static_cast<std::size_t>(elements) * part.item_size; };
  auto given = [&](std::size_t i) { return bytes(call.to.empty() ? call.count : call.to[i]); };
  auto taken = [&](std::size_t o) { return call.from.empty() ? given(rank) : bytes(call.from[o]); };
  for (std::size_t i = 0; i < part.inputs.size(); ++i)
    for (std::size_t o = 0; o < part.outputs.size(); ++o) {
      const auto* in = static_cast<const char*>(part.inputs[i]);
      const auto* out = static_cast<const char*>(part.outputs[o]);
      if (given(i) == 0 || in >= out + taken(o) || out >= in + given(i)) continue;
      const bool own = (part.inputs.size() == 1 || i == rank) && (part.outputs.size() == 1 || o == rank);
      if (own && in == out) continue;
      // On a device, in the order of the current stream.
      auto copy = at::from_blob(const_cast<char*>(in), {static_cast<std::int64_t>(given(i))},
                                at::TensorOptions(at::kByte).device(device))
                      .clone();
      part.inputs[i] = copies.emplace_back(std::move(copy)).const_data_ptr();
      break;
    }
  return copies;
}

Call describe_call(Operation operation, const at::Tensor& tensor, Site site) {
  Call call;
  call.operation = operation;
  call.site = site;
  if (!tensor.defined()) return call;
  call.dtype = dtype_of(tensor.scalar_type());
  call.count = tensor.numel();
  call.bytes = static_cast<std::int64_t>(tensor.nbytes());
  call.shape = tensor.sizes().vec();
  return call;
}

namespace {

// A conjugate or negative view is lazy: its memory does not contain its values.
bool is_dense(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

at::Tensor dense(const at::Tensor& tensor) {
  if (is_dense(tensor)) return tensor;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

at::Tensor dense_target(WorkState& pending, const at::Tensor& tensor, bool reads) {
  pending.keep.push_back(tensor);
  if (is_dense(tensor)) return tensor;
  auto target = tensor.detach();
  auto staged = reads ? dense(target) : at::empty(target.sizes(), target.options());
  pending.keep.push_back(staged);
  pending.finish.emplace_back([target, staged] { target.copy_(staged); });
  return staged;
}

at::Tensor to_move(const Transport& engine, const at::Tensor& tensor) {
  // Lockstep's own engines take the memory unchanged.
  if (engine.traits().any_dtype) return tensor;
  return tensor.detach().view({-1}).view(at::kByte);
}

at::Tensor to_reduce(const Transport& engine, const at::Tensor& tensor) {
  if (engine.traits().any_dtype) return tensor;
  auto flat = tensor.detach().view({-1});
  if (flat.is_complex()) return at::view_as_real(flat).view({-1});
  return flat.scalar_type() == at::kBool ? flat.view(at::kByte) : flat;
}

ReduceOp engine_reduction(const Transport& engine, Dtype dtype, ReduceOp op) {
  if (op == ReduceOp::AVG && !engine.traits().avg) return ReduceOp::SUM;
  if (dtype != Dtype::boolean || engine.traits().any_dtype) return op;
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::BOR: return ReduceOp::MAX;
    case ReduceOp::PRODUCT:
    case ReduceOp::BAND: return ReduceOp::MIN;
    default: return op;
  }
}

static_assert(static_cast<int>(ReduceOp::SUM) == c10d::ReduceOp::SUM &&
              static_cast<int>(ReduceOp::AVG) == c10d::ReduceOp::AVG &&
              static_cast<int>(ReduceOp::BXOR) == c10d::ReduceOp::BXOR);

c10d::ReduceOp to_c10d(ReduceOp op) { return static_cast<c10d::ReduceOp::RedOpType>(op); }

ReduceOp from_c10d(const c10d::ReduceOp& op) {
  TORCH_CHECK(
      op.op_ <= c10d::ReduceOp::BXOR,
      "expected sum, avg, product, min, max, band, bor or bxor, got another reduction; instead of PREMUL_SUM "
      "multiply the tensor first and use SUM");
  return static_cast<ReduceOp>(op.op_);
}

}  // namespace lockstep::detail
