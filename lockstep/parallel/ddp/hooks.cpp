#include <lockstep/parallel/ddp_hooks.h>

#include <any>
#include <memory>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/detail/flat_views.h>

namespace lockstep {
namespace {

at::Tensor reachable(GradBucket& bucket, std::int64_t count, at::ScalarType type) {
  return detail::flat_memory(bucket.group(), count, type, bucket.buffer());
}

std::shared_ptr<Work> start_average(GradBucket& bucket, const at::Tensor& tensor) {
  return std::make_shared<Work>(bucket.group().all_reduce(
      tensor, {.op = ReduceOp::AVG, .tag = fmt::format("ddp bucket {}", bucket.index())}));
}

// A hook's state belongs to the bucket, because one hook may serve several models.
template <typename T>
T& kept(GradBucket& bucket, const void* hook) {
  auto& state = bucket.state(hook);
  if (!state.has_value()) state = T();
  return std::any_cast<T&>(state);
}

CommHook compress_hook(at::ScalarType type) {
  return [type, key = std::make_shared<char>()](GradBucket& bucket) -> std::function<void()> {
    if (bucket.buffer().element_size() <= 2 || bucket.buffer().is_complex()) return allreduce_hook()(bucket);
    auto& small = kept<at::Tensor>(bucket, key.get());
    if (!small.defined()) small = reachable(bucket, bucket.buffer().numel(), type);
    small.copy_(bucket.buffer());
    return [work = start_average(bucket, small), small, buffer = bucket.buffer()] {
      work->wait();
      buffer.copy_(small);
    };
  };
}

// In place, by columns. If columns are linearly dependent, any direction will do, as long as it is the same
// on every rank.
void orthogonalize(const at::Tensor& matrix) {
  const auto wide = matrix.element_size() < 4 ? matrix.to(at::kFloat) : matrix;
  matrix.copy_(std::get<0>(at::linalg_qr(wide)));
}

class PowerSgd : public std::enable_shared_from_this<PowerSgd> {
 public:
  explicit PowerSgd(PowerSgdOptions options) : options_(options) {}

  std::function<void()> operator()(GradBucket& bucket) {
    if (bucket.buffer().is_complex()) return allreduce_hook()(bucket);
    auto& state = kept<State>(bucket, this);
    if (state.steps++ < options_.start_power_sgd_iter) return allreduce_hook()(bucket);
    if (state.parts.empty() && !state.rest.defined()) prepare(bucket, state);
    if (options_.use_error_feedback) {
      if (!state.error.defined()) state.error = at::zeros_like(bucket.buffer());
      bucket.buffer().add_(state.error);
      state.error.copy_(bucket.buffer());
    }
    for (auto& [number, copy] : state.uncompressed) copy.copy_(bucket.gradients()[number]);
    std::shared_ptr<Work> rest, left;
    if (state.rest.numel() > 0) rest = start_average(bucket, state.rest);
    for (auto& part : state.parts) at::mm_out(part.p, matrix_of(bucket.gradients()[part.number]), part.q);
    if (!state.parts.empty()) left = start_average(bucket, state.all_p);
    return [self = shared_from_this(), &bucket, &state, rest, left] {
      self->complete(bucket, state, rest, left);
    };
  }

 private:
  struct Part {
    std::size_t number;  // Index of the gradient in its bucket; the tensor itself changes every step.
    at::Tensor p, q;
  };
  struct State {
    std::vector<Part> parts;
    // Index of a gradient, and its place in rest.
    std::vector<std::pair<std::size_t, at::Tensor>> uncompressed;
    at::Tensor rest, all_p, all_q, error;
    std::int64_t steps = 0;
  };

  static at::Tensor matrix_of(const at::Tensor& gradient) { return gradient.reshape({gradient.size(0), -1}); }

  void prepare(GradBucket& bucket, State& state) {
    struct Shape {
      std::int64_t rows, columns, rank;
    };
    std::vector<std::pair<std::size_t, Shape>> compressed;
    std::vector<std::size_t> uncompressed;
    std::int64_t p = 0, q = 0, rest = 0;
    for (std::size_t number = 0; number < bucket.gradients().size(); ++number) {
      const auto& gradient = bucket.gradients()[number];
      const auto rows = gradient.dim() > 1 ? gradient.size(0) : 1,
                 columns = rows == 0 ? 0 : gradient.numel() / rows;
      const auto rank = std::min({options_.matrix_approximation_rank, rows, columns});
      const auto sent = static_cast<double>((rows + columns) * rank);
      if (gradient.dim() > 1 &&
          sent * options_.min_compression_rate < static_cast<double>(gradient.numel())) {
        compressed.emplace_back(number, Shape{rows, columns, rank});
        p += rows * rank, q += columns * rank;
      } else {
        uncompressed.push_back(number);
        rest += gradient.numel();
      }
    }
    const auto type = bucket.buffer().scalar_type();
    state.rest = reachable(bucket, rest, type);
    state.all_p = reachable(bucket, p, type);
    state.all_q = reachable(bucket, q, type);
    // Seeded from the options and the bucket, not from the global generator, so that it is the same on every
    // rank.
    auto generator = at::make_generator<at::CPUGeneratorImpl>(options_.random_seed + bucket.index());
    state.all_q.copy_(at::randn({q}, generator));
    p = q = rest = 0;
    for (const auto& [number, shape] : compressed) {
      state.parts.push_back(
          {number, state.all_p.narrow(0, p, shape.rows * shape.rank).view({shape.rows, shape.rank}),
           state.all_q.narrow(0, q, shape.columns * shape.rank).view({shape.columns, shape.rank})});
      orthogonalize(state.parts.back().q);
      p += shape.rows * shape.rank, q += shape.columns * shape.rank;
    }
    for (const auto number : uncompressed) {
      const auto& gradient = bucket.gradients()[number];
      state.uncompressed.emplace_back(number,
                                      state.rest.narrow(0, rest, gradient.numel()).view(gradient.sizes()));
      rest += gradient.numel();
    }
  }

  void complete(GradBucket& bucket, State& state, const std::shared_ptr<Work>& rest,
                const std::shared_ptr<Work>& left) {
    if (rest) rest->wait();
    for (auto& [number, copy] : state.uncompressed) bucket.gradients()[number].copy_(copy);
    if (left) {
      left->wait();
      for (auto& part : state.parts) {
        orthogonalize(part.p);
        at::mm_out(part.q, matrix_of(bucket.gradients()[part.number]).t(), part.p);
      }
      start_average(bucket, state.all_q)->wait();
      for (auto& part : state.parts) {
        const auto& gradient = bucket.gradients()[part.number];
        gradient.copy_(part.p.mm(part.q.t()).view(gradient.sizes()));
        if (!options_.warm_start) {
          auto generator = at::make_generator<at::CPUGeneratorImpl>(
              options_.random_seed + bucket.index() + 1000003 * static_cast<std::uint64_t>(state.steps));
          part.q.copy_(at::randn(part.q.sizes(), generator));
        }
      }
    }
    if (options_.use_error_feedback) state.error.sub_(bucket.buffer());
  }

  const PowerSgdOptions options_;
};

}  // namespace

CommHook allreduce_hook() {
  return [](GradBucket& bucket) -> std::function<void()> {
    return [work = start_average(bucket, bucket.buffer())] { work->wait(); };
  };
}

CommHook bf16_compress_hook() { return compress_hook(at::kBFloat16); }
CommHook fp16_compress_hook() { return compress_hook(at::kHalf); }

CommHook power_sgd_hook(PowerSgdOptions options) {
  if (options.matrix_approximation_rank < 1 || options.start_power_sgd_iter < 2 ||
      options.min_compression_rate <= 0)
    throw ConfigError(fmt::format(
        "PowerSgdOptions: expected matrix_approximation_rank of at least 1, start_power_sgd_iter of at "
        "least 2 (buckets are made in the first step) and min_compression_rate above 0, got {}, {} and {}",
        options.matrix_approximation_rank, options.start_power_sgd_iter, options.min_compression_rate));
  auto state = std::make_shared<PowerSgd>(options);
  return [state](GradBucket& bucket) { return (*state)(bucket); };
}

}  // namespace lockstep
