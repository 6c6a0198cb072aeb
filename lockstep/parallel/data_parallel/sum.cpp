#include <lockstep/parallel/data_parallel/sum.h>

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <lockstep/comm/c10d/tensors.h>
#include <lockstep/comm/reduce/reduce.h>

namespace lockstep::detail {
namespace {

constexpr std::size_t kSplit = 16 * 1024;  // Number of elements from which a sum is split over threads.
constexpr std::size_t kLine = 64;          // In elements: two threads must not write to the same cache line.

bool has_one_layout(const std::vector<at::Tensor>& tensors) {
  const auto& first = tensors[0];
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& each) {
    return each.layout() == at::kStrided && each.is_cpu() && each.is_non_overlapping_and_dense() &&
           !each.is_conj() && !each.is_neg() && each.scalar_type() == first.scalar_type() &&
           each.sizes() == first.sizes() && each.strides() == first.strides() &&
           reducible(dtype_of(each.scalar_type()), ReduceOp::SUM);
  });
}

// True if nothing else refers to the tensor, so it may be changed. One tensor may be the gradient of several
// others, such as of a and b in a + b.
bool is_ours_alone(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

at::Tensor tree_sum(std::vector<at::Tensor> tensors) {
  for (; tensors.size() > 1; tensors.resize((tensors.size() + 1) / 2))
    for (std::size_t i = 0; i < tensors.size(); i += 2)
      tensors[i / 2] = i + 1 < tensors.size() ? tensors[i] + tensors[i + 1] : tensors[i];
  return tensors[0];
}

}  // namespace

void GradientSums::add(std::vector<at::Tensor> gradients) {
  std::erase_if(gradients, [](const at::Tensor& each) { return !each.defined(); });
  auto& sum = sums_.emplace_back();
  if (gradients.empty()) return;
  if (gradients.size() == 1) {
    sum.result = std::move(gradients[0]);
    return;
  }
  for (const auto& each : gradients)
    if (each.layout() == at::kStrided) bytes_ += each.nbytes();
  sum.dense = has_one_layout(gradients);
  if (sum.dense) sum.result = is_ours_alone(gradients[0]) ? gradients[0] : at::empty_like(gradients[0]);
  sum.gradients = std::move(gradients);
}

void GradientSums::do_share(std::size_t share, std::size_t shares) {
  for (std::size_t s = 0; s < sums_.size(); ++s) {
    auto& sum = sums_[s];
    if (sum.gradients.empty()) continue;
    const auto count = sum.dense ? static_cast<std::size_t>(sum.result.numel()) : 0;
    const bool split = count >= kSplit;
    if (!split && s % shares != share) continue;
    if (!sum.dense) {
      sum.result = tree_sum(std::move(sum.gradients));
      continue;
    }
    const auto bound = [&](std::size_t i) {
      return i == shares ? count : count * i / shares / kLine * kLine;
    };
    const std::size_t begin = split ? bound(share) : 0, end = split ? bound(share + 1) : count;
    const auto dtype = dtype_of(sum.result.scalar_type());
    const auto at = [&](const at::Tensor& tensor) {
      return static_cast<char*>(tensor.data_ptr()) + begin * item_size(dtype);
    };
    std::vector<const void*> inputs;
    for (const auto& each : sum.gradients) inputs.push_back(at(each));
    reduce_tree(dtype, ReduceOp::SUM, inputs, at(sum.result), end - begin);
  }
}

std::vector<at::Tensor> GradientSums::take() {
  std::vector<at::Tensor> results;
  for (auto& each : sums_) results.push_back(std::move(each.result));
  sums_.clear();
  return results;
}

}  // namespace lockstep::detail
