#include <lockstep/nn/dropout.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/nn/detail/philox.h>
#include <torch/csrc/autograd/custom_function.h>

namespace lockstep::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

thread_local std::optional<DropoutStep> present;

std::uint64_t fnv1a(std::string_view text) {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

// SplitMix64's finaliser: every bit of the result depends on every bit of the input.
std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

std::uint64_t generator_key(std::uint64_t seed, std::uint64_t step, std::string_view layer) {
  constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15;
  return mixed(mixed(mixed(seed + kOdd) ^ (step + kOdd)) ^ fnv1a(layer));
}

void check_p(double p) {
  if (!(p >= 0 && p <= 1))
    throw ConfigError(fmt::format("dropout: p: expected a probability from 0 to 1, got {}", p));
}

// Determines a mask, together with its size and dtype.
struct Source {
  std::uint64_t key;
  std::int64_t first_sample;
  double p;
  Shard shard;
};

// A tensor's samples as runs of elements that are also contiguous in the whole sample.
struct Rows {
  std::int64_t samples, runs, length;  // runs per sample, elements per run
  std::int64_t first, stride;  // position of the first run in the whole sample, and the distance between runs
  std::int64_t sample_offset;
};
Rows rows_of(at::IntArrayRef sizes, const Shard& shard) {
  Rows rows{.samples = sizes.empty() ? 1 : sizes[0],
            .runs = 1,
            .length = 1,
            .first = 0,
            .stride = 0,
            .sample_offset = 0};
  const auto dim = shard.count == 1 ? 0 : shard.dim;
  if (dim == 0) rows.sample_offset = shard.index * rows.samples;
  for (std::size_t i = 1; i < sizes.size(); ++i)
    (static_cast<std::int64_t>(i) < dim ? rows.runs : rows.length) *= sizes[i];
  if (dim > 0) rows.first = shard.index * rows.length;
  rows.stride = rows.length * (dim > 0 ? shard.count : 1);
  return rows;
}

// Fills `count` elements of a sample, starting at number `first`. Four neighbours share a counter.
template <typename T>
void fill_run(T* out, std::int64_t first, std::int64_t count, std::uint64_t sample, std::uint64_t key,
              std::uint32_t threshold, T scale) {
  constexpr auto kElements = static_cast<std::int64_t>(4 * detail::kPhiloxLanes);
  const std::int64_t end = first + count;
  for (std::int64_t block = first / 4; block * 4 < end; block += kElements / 4) {
    detail::PhiloxBlocks blocks;
    auto& [w0, w1, w2, w3] = blocks.words;
    for (std::size_t i = 0; i < detail::kPhiloxLanes; ++i) {
      const auto counter = static_cast<std::uint64_t>(block) + i;
      w0[i] = static_cast<std::uint32_t>(counter);
      w1[i] = static_cast<std::uint32_t>(counter >> 32);
      w2[i] = static_cast<std::uint32_t>(sample);
      w3[i] = static_cast<std::uint32_t>(sample >> 32);
    }
    detail::philox(blocks, static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32));
    std::array<std::uint32_t, kElements> words;
    for (std::size_t i = 0; i < detail::kPhiloxLanes; ++i)
      for (std::size_t word = 0; word < 4; ++word) words[4 * i + word] = blocks.words[word][i];
    const auto from = std::max(first - block * 4, std::int64_t{0}), to = std::min(end - block * 4, kElements);
    T* const place = out + (block * 4 - first);
    for (std::int64_t e = from; e < to; ++e)
      place[e] = words[static_cast<std::size_t>(e)] >= threshold ? scale : T(0);
  }
}

// Noise: 0 where an element is dropped, 1 / (1 - p) elsewhere. Generated on the CPU, so that every device
// gets the same mask, at the cost of a copy.
at::Tensor noise_for(at::IntArrayRef sizes, const at::TensorOptions& options, const Source& source) {
  auto noise = at::empty(sizes, options.device(at::kCPU).requires_grad(false));
  if (noise.numel() == 0) return noise.to(options.device());
  const auto rows = rows_of(sizes, source.shard);
  // For p = 1 the scale is zero, so it does not matter which elements are kept.
  const auto threshold = static_cast<std::uint32_t>(std::min(std::llround(source.p * 0x1p32), 0xFFFFFFFFLL));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, noise.scalar_type(), "lockstep_dropout", [&] {
    auto* const out = noise.mutable_data_ptr<scalar_t>();
    const auto scale =
        static_cast<scalar_t>(static_cast<at::opmath_type<scalar_t>>(source.p < 1 ? 1 / (1 - source.p) : 0));
    const auto grain = std::max<std::int64_t>(1, 16384 / rows.length);
    at::parallel_for(0, rows.samples * rows.runs, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const auto sample = row / rows.runs + rows.sample_offset + source.first_sample;
        fill_run<scalar_t>(out + row * rows.length, rows.first + row % rows.runs * rows.stride, rows.length,
                           static_cast<std::uint64_t>(sample), source.key, threshold, scale);
      }
    });
  });
  return noise.to(options.device());
}

// Saves the inputs of the mask rather than the mask.
struct DropoutFunction : torch::autograd::Function<DropoutFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const Source& source) {
    context->saved_data["key"] = static_cast<std::int64_t>(source.key);
    context->saved_data["first_sample"] = source.first_sample;
    context->saved_data["p"] = source.p;
    context->saved_data["shard"] =
        std::vector<std::int64_t>{source.shard.dim, source.shard.index, source.shard.count};
    return input * noise_for(input.sizes(), input.options(), source);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto shard = context->saved_data["shard"].toIntVector();
    const Source source{.key = static_cast<std::uint64_t>(context->saved_data["key"].toInt()),
                        .first_sample = context->saved_data["first_sample"].toInt(),
                        .p = context->saved_data["p"].toDouble(),
                        .shard = {shard[0], static_cast<int>(shard[1]), static_cast<int>(shard[2])}};
    const auto& gradient = gradients[0];
    return {gradient * noise_for(gradient.sizes(), gradient.options(), source), {}};
  }
};

// Validates the shard and makes its dimension non-negative.
Shard checked(std::optional<Shard> shard, const at::Tensor& input, std::string_view key) {
  if (!shard || shard->count == 1) return {};
  const auto dim = shard->dim < 0 ? shard->dim + input.dim() : shard->dim;
  if (dim < 0 || dim >= input.dim() || shard->index < 0 || shard->index >= shard->count)
    throw ConfigError(
        fmt::format("dropout '{}': a tensor of [{}] cannot be slice {} of {} along dimension {}", key,
                    fmt::join(input.sizes(), ", "), shard->index, shard->count, shard->dim));
  return {dim, shard->index, shard->count};
}

}  // namespace

DropoutScope::DropoutScope(DropoutStep step) : outer_(present) { present = step; }
DropoutScope::~DropoutScope() { present = outer_; }

std::optional<DropoutStep> dropout_step() { return present; }

DropoutScope shift_samples(std::int64_t offset) {
  if (!present) throw ConfigError("shift_samples: no lockstep::nn::DropoutScope is open on this thread");
  auto step = *present;
  step.first_sample += offset;
  return DropoutScope(step);
}

at::Tensor dropout(const at::Tensor& input, double p, std::string_view key, std::optional<Shard> shard) {
  check_p(p);
  if (key.empty())
    throw ConfigError(
        "dropout: a layer in training has no key, which determines its mask: call "
        "lockstep::nn::name_layers(*model) once, or set its key");
  if (!present)
    throw ConfigError(
        fmt::format("dropout '{}': no lockstep::nn::DropoutScope is open on this thread; open one around "
                    "forward to set the seed, the step and the first sample",
                    key));
  if (!input.is_floating_point())
    throw ConfigError(fmt::format("dropout '{}': expected a floating-point tensor, got {}", key,
                                  at::toString(input.scalar_type())));
  const auto slice = checked(shard, input, key);
  if (p == 0) return input;
  return DropoutFunction::apply(input, Source{.key = generator_key(present->seed, present->step, key),
                                              .first_sample = present->first_sample,
                                              .p = p,
                                              .shard = slice});
}

DropoutImpl::DropoutImpl(DropoutOptions given) : options(std::move(given)) { reset(); }

void DropoutImpl::reset() { check_p(options.p); }

void DropoutImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("lockstep::nn::Dropout(p={}, key='{}')", options.p, options.key);
}

at::Tensor DropoutImpl::forward(const at::Tensor& input) {
  if (!is_training() || options.p == 0) return input;
  return dropout(input, options.p, options.key, options.shard);
}

int name_layers(torch::nn::Module& module, const std::string& prefix) {
  int named = 0;
  const auto name = [&](torch::nn::Module& each, const std::string& path) {
    auto* layer = dynamic_cast<DropoutImpl*>(&each);
    if (!layer || !layer->options.key.empty()) return;
    layer->options.key = path.empty() ? "dropout" : path;
    ++named;
  };
  name(module, prefix);
  for (const auto& each : module.named_modules(prefix, /*include_self=*/false))
    name(*each.value(), each.key());
  return named;
}

}  // namespace lockstep::nn
