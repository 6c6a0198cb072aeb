#include <lockstep/profile/libtorch/flops.h>

#include <string_view>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace lockstep::profile {

namespace {

using Values = c10::ArrayRef<const c10::IValue>;

const at::Tensor* tensor(Values values, std::size_t place) {
  if (place >= values.size() || !values[place].isTensor()) return nullptr;
  const at::Tensor& found = values[place].toTensor();
  return found.defined() ? &found : nullptr;
}

// (..., m, k) times (..., k, n).
std::int64_t product(const at::Tensor* left, const at::Tensor* right) {
  if (!left || !right || left->dim() < 2 || right->dim() < 1) return 0;
  return 2 * left->numel() * (right->dim() < 2 ? 1 : right->size(-1));
}

// Multiplications and additions per element that the weight is applied to. Layout: (out, in / groups,
// kernel...), or (in, out / groups, kernel...) if transposed.
std::int64_t per_element(const at::Tensor* weight) {
  if (!weight || weight->dim() < 3 || weight->size(0) == 0) return 0;
  return 2 * (weight->numel() / weight->size(0));
}

// (batch, heads, queries, width) and (batch, heads, keys, width).
std::int64_t attention(const at::Tensor* query, const at::Tensor* key) {
  if (!query || !key || query->dim() != 4 || key->dim() != 4) return 0;
  return 4 * query->numel() * key->size(2);
}

enum class Kind { mm, addmm, linear, convolution, convolution_backward, attention, attention_backward };

// Only the innermost operators: aten::linear calls addmm and must not be counted twice.
const std::unordered_map<std::string_view, Kind> kKinds{
    {"aten::mm", Kind::mm},
    {"aten::mv", Kind::mm},
    {"aten::bmm", Kind::mm},
    {"aten::addmm", Kind::addmm},
    {"aten::addmv", Kind::addmm},
    {"aten::baddbmm", Kind::addmm},
    {"aten::mkldnn_linear", Kind::linear},
    {"aten::convolution", Kind::convolution},
    {"aten::convolution_backward", Kind::convolution_backward},
    {"aten::_scaled_dot_product_flash_attention_for_cpu", Kind::attention},
    {"aten::_scaled_dot_product_flash_attention", Kind::attention},
    {"aten::_scaled_dot_product_efficient_attention", Kind::attention},
    {"aten::_scaled_dot_product_cudnn_attention", Kind::attention},
    {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", Kind::attention_backward},
    {"aten::_scaled_dot_product_flash_attention_backward", Kind::attention_backward},
    {"aten::_scaled_dot_product_efficient_attention_backward", Kind::attention_backward},
    {"aten::_scaled_dot_product_cudnn_attention_backward", Kind::attention_backward},
};

}  // namespace

Flops flops_of(const at::RecordFunction& operation) {
  const auto kind = kKinds.find(operation.name());
  if (kind == kKinds.end()) return {};
  const Values in = operation.inputs();
  const bool transposed = in.size() > 6 && in[6].isBool() && in[6].toBool();
  switch (kind->second) {
    case Kind::mm: return {product(tensor(in, 0), tensor(in, 1))};
    case Kind::linear:  // (..., in) and (out, in)
      return {tensor(in, 0) && tensor(in, 1) ? 2 * tensor(in, 0)->numel() * tensor(in, 1)->size(0) : 0};
    case Kind::addmm: return {product(tensor(in, 1), tensor(in, 2))};
    case Kind::convolution:
      if (!transposed) return {0, per_element(tensor(in, 1))};
      return {tensor(in, 0) ? tensor(in, 0)->numel() * per_element(tensor(in, 1)) : 0};
    // The input's gradient takes as much as the weight's. Inputs: (gradient, input, weight).
    case Kind::convolution_backward: {
      const bool backwards = in.size() > 7 && in[7].isBool() && in[7].toBool();
      const auto* moved = tensor(in, backwards ? 1 : 0);
      // Mask of requested gradients: input, weight, bias.
      std::int64_t wanted = 2;
      if (in.size() > 10 && in[10].isBoolList()) {
        const auto mask = in[10].toBoolList();
        wanted = mask.size() == 3 ? mask.get(0) + mask.get(1) : 2;
      }
      return {moved ? wanted * moved->numel() * per_element(tensor(in, 2)) : 0};
    }
    case Kind::attention: return {attention(tensor(in, 0), tensor(in, 1))};
    // Five products, compared with two in forward. Inputs: (gradient, query, key).
    case Kind::attention_backward: return {attention(tensor(in, 1), tensor(in, 2)) * 5 / 2};
  }
  return {};
}

std::int64_t elements_of_output(const at::RecordFunction& operation) {
  const auto& out = operation.outputs();
  const auto* first = tensor(Values(out.data(), out.size()), 0);
  return first ? first->numel() : 0;
}

}  // namespace lockstep::profile
