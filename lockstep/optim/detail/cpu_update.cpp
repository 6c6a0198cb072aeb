#include <lockstep/optim/detail/cpu_update.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <random>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/sqrt_cpu_dispatch.h>

namespace lockstep::detail {
namespace {

// Elements between two rounds of square roots: five arrays of this size fit into the L2 cache.
constexpr std::size_t kChunk = 8192;
// Smaller shares are not worth waking a thread for; LibTorch's own threshold.
constexpr std::size_t kGrain = at::internal::GRAIN_SIZE;

template <typename Slice>
std::size_t elements(std::span<const Slice> slices) {
  std::size_t total = 0;
  for (const auto& slice : slices) total += slice.piece.count;
  return total;
}

std::size_t shares_of(std::size_t total) {
  if (total < 2 * kGrain || at::in_parallel_region()) return 1;
  return std::min(static_cast<std::size_t>(at::get_num_threads()), total / kGrain);
}

// Calls body(share) for each share on LibTorch's threads. at::parallel_for is a template and would start
// threads of the OpenMP that this library was compiled with; TensorIterator's loop runs inside LibTorch.
void on_threads(std::size_t shares, const std::function<void(std::size_t)>& body) {
  if (shares == 1) return body(0);
  auto places = at::empty({static_cast<std::int64_t>(shares)}, at::kByte);
  const auto* begin = static_cast<const char*>(places.const_data_ptr());
  at::TensorIterator::nullary_op(places).for_each(
      [&](char** data, const std::int64_t* strides, std::int64_t inner, std::int64_t outer) {
        for (std::int64_t o = 0; o < outer; ++o)
          for (std::int64_t i = 0; i < inner; ++i)
            body(static_cast<std::size_t>(data[0] + i * strides[0] + o * strides[1] - begin));
      },
      /*grain_size=*/1);
}

// Buffer for square roots; one per thread, kept for the next step.
at::Tensor& roots_of(std::size_t count) {
  thread_local at::Tensor kept;
  const auto size = static_cast<std::int64_t>(count);
  if (!kept.defined() || kept.numel() != size) kept = at::empty({size}, at::kFloat);
  return kept;
}

// The share's range of elements: [first, last).
std::pair<std::size_t, std::size_t> part_of(std::size_t total, std::size_t share, std::size_t shares) {
  return {total / shares * share + std::min(share, total % shares),
          total / shares * (share + 1) + std::min(share + 1, total % shares)};
}

}  // namespace

bool rows_alike(const at::Tensor& parameter, std::initializer_list<const at::Tensor*> others) {
  auto row = [](const at::Tensor& t) {
    return t.scalar_type() == at::kFloat && t.device().is_cpu() && t.layout() == at::kStrided && !t.is_neg();
  };
  if (!row(parameter) || !parameter.is_non_overlapping_and_dense()) return false;
  return std::all_of(others.begin(), others.end(), [&](const at::Tensor* other) {
    return row(*other) && other->sizes() == parameter.sizes() &&
           (other->strides() == parameter.strides() || (other->is_contiguous() && parameter.is_contiguous()));
  });
}

void cpu_update(std::span<const AdamSlice> slices) {
  const std::size_t total = elements(slices);
  if (total == 0) return;
  const std::size_t shares = shares_of(total);
  on_threads(shares, [&](std::size_t share) {
    const auto [first, last] = part_of(total, share, shares);
    auto& roots = roots_of(std::min(total, kChunk));
    adam_update(slices, first, last - first,
                {roots.mutable_data_ptr<float>(), static_cast<std::size_t>(roots.numel())},
                [&roots] { at::cpu::sqrt_(roots); });
  });
}

void cpu_update(std::span<const SgdSlice> slices) {
  const std::size_t total = elements(slices);
  if (total == 0) return;
  const std::size_t shares = shares_of(total);
  on_threads(shares, [&](std::size_t share) {
    const auto [first, last] = part_of(total, share, shares);
    sgd_update(slices, first, last - first);
  });
}

at::Tensor as_in_python(double number) { return at::native::wrapped_scalar_tensor(number); }

at::Tensor probe_numbers(std::int64_t count, std::uint32_t seed, float scale) {
  std::mt19937 draw(seed);
  auto numbers = at::empty({count}, at::kFloat);
  for (float& x : std::span(numbers.mutable_data_ptr<float>(), static_cast<std::size_t>(count))) {
    x = scale * (static_cast<float>(draw()) / 4294967296.0f - 0.5f);
    if (draw() % 64 == 0) x *= 1e-30f;
    if (draw() % 1024 == 0) x = std::numeric_limits<float>::infinity();
  }
  return numbers;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  return at::logical_or(a.view(at::kInt) == b.view(at::kInt), at::logical_and(a.isnan(), b.isnan()))
      .all()
      .item<bool>();
}

}  // namespace lockstep::detail
