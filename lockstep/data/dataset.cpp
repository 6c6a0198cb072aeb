#include <lockstep/data/dataset.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include <ATen/ATen.h>
#include <lockstep/base/error.h>
#include <lockstep/data/subset.h>

namespace lockstep::detail {
namespace {

// Copies rows of sizeof(T) bytes: one load and one store each.
template <typename T>
void copy_rows(void* out, const void* source, std::span<const std::int64_t> indices) {
  auto* to = static_cast<T*>(out);
  const auto* from = static_cast<const T*>(source);
  for (const auto index : indices) *to++ = from[index];
}

void copy_rows(void* out, const void* source, std::size_t row, std::span<const std::int64_t> indices) {
  switch (row) {
    case 1: return copy_rows<std::uint8_t>(out, source, indices);
    case 2: return copy_rows<std::uint16_t>(out, source, indices);
    case 4: return copy_rows<std::uint32_t>(out, source, indices);
    case 8: return copy_rows<std::uint64_t>(out, source, indices);
    default: break;
  }
  auto* to = static_cast<char*>(out);
  const auto* from = static_cast<const char*>(source);
  for (std::size_t i = 0; i < indices.size(); ++i, to += row)
    std::memcpy(to, from + static_cast<std::size_t>(indices[i]) * row, row);
}

}  // namespace

std::int64_t known_size(std::optional<std::int64_t> size) {
  if (!size) throw ConfigError("the dataset is a stream of unknown size, so its samples have no indices");
  return *size;
}

std::int64_t checked_size(std::int64_t size) {
  if (size < 0) throw ConfigError("dataset size: expected 0 or more, got " + std::to_string(size));
  return size;
}

void refuse_index(std::int64_t index, std::int64_t size) {
  throw ConfigError("index " + std::to_string(index) + " is out of range for a dataset of " +
                    std::to_string(size) + " samples");
}

std::int64_t equal_rows(std::span<const at::Tensor> tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto name = "TensorDataset: tensor " + std::to_string(i);
    if (!tensors[i].defined()) throw ConfigError(name + " is undefined");
    if (tensors[i].dim() == 0) throw ConfigError(name + " is a scalar; expected at least one dimension");
    if (tensors[i].size(0) != tensors[0].size(0))
      throw ConfigError(name + " has " + std::to_string(tensors[i].size(0)) + " rows, but tensor 0 has " +
                        std::to_string(tensors[0].size(0)));
  }
  return tensors[0].size(0);
}

at::Tensor row(const at::Tensor& tensor, std::int64_t index) {
  check_index(index, tensor.size(0));
  return tensor.select(0, index);
}

// For dense rows that need no gradient: index_select without its 2 us of overhead.
at::Tensor rows(const at::Tensor& tensor, std::span<const std::int64_t> indices) {
  const auto size = tensor.size(0), count = static_cast<std::int64_t>(indices.size());
  for (const auto index : indices) check_index(index, size);
  const bool plain = tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
                     !tensor.requires_grad() && !tensor.is_neg() && !tensor.is_conj() &&
                     !tensor.is_quantized();
  if (!plain) {
    auto list =
        at::from_blob(const_cast<std::int64_t*>(indices.data()), {count}, at::TensorOptions(at::kLong));
    return at::index_select(tensor, 0, tensor.is_cpu() ? list : list.to(tensor.device()));
  }
  at::DimVector sizes(tensor.sizes());
  sizes[0] = count;
  auto out = at::empty(sizes, tensor.options());
  if (out.numel() > 0)
    copy_rows(out.mutable_data_ptr(), tensor.const_data_ptr(), out.nbytes() / indices.size(), indices);
  return out;
}

std::vector<std::vector<std::int64_t>> split(std::int64_t size, const std::vector<double>& parts,
                                             std::optional<at::Generator> generator) {
  // The same rule as in Python: parts that add up to 1, up to rounding, are fractions.
  const double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
  const bool fractions = std::abs(sum - 1) <= 1e-9 * std::max(sum, 1.0);
  std::vector<std::int64_t> lengths;
  std::int64_t total = 0;
  for (const double part : parts) {
    if (!(part >= 0) || (!fractions && part != std::floor(part)) || part > 9e15)
      throw ConfigError("random_split: expected lengths, or fractions that add up to 1, got " +
                        std::to_string(part));
    lengths.push_back(
        static_cast<std::int64_t>(fractions ? std::floor(static_cast<double>(size) * part) : part));
    total += lengths.back();
  }
  for (std::size_t i = 0; fractions && total < size; ++total) ++lengths[i++ % lengths.size()];
  if (total != size)
    throw ConfigError("random_split: expected parts that add up to " + std::to_string(size) +
                      " samples, got " + std::to_string(total));
  const auto order = at::randperm(size, std::move(generator), at::TensorOptions(at::kLong));
  const auto* next = order.const_data_ptr<std::int64_t>();
  std::vector<std::vector<std::int64_t>> found;
  for (const auto length : lengths) {
    found.emplace_back(next, next + length);
    next += length;
  }
  return found;
}

}  // namespace lockstep::detail
