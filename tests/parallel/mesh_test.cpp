// Pipelines, replicas and split layers at once: every layout trains as one rank does.
#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

constexpr int kWidth = 8, kBatch = 24, kMicrobatches = 4, kPieces = 8;

struct MixerImpl : torch::nn::Module {
  MixerImpl()
      : norm(torch::nn::LayerNormOptions({kWidth})),
        up(kWidth, 16),
        down(16, kWidth),
        dropout(0.2),
        inner(0.1) {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    register_module("dropout", dropout);
    register_module("inner", inner);
  }
  at::Tensor forward(const at::Tensor& x) { return x + dropout(down(inner(torch::gelu(up(norm(x)))))); }
  Unit<torch::nn::LayerNorm> norm;
  Unit<torch::nn::Linear> up;
  Unit<nn::Linear> down;
  Unit<nn::Dropout> dropout;
  Unit<nn::Dropout> inner;  // on slices
};
TORCH_MODULE(Mixer);

struct StackImpl : torch::nn::Module {
  StackImpl() {
    for (int i = 0; i < kPieces; ++i) {
      mixers.emplace_back();
      register_module("mixer" + std::to_string(i), mixers.back());
    }
    to(at::kDouble);
    fill_parameters(*this, 300);
    nn::name_layers(*this);
  }
  std::vector<Unit<Mixer>> mixers;
};
TORCH_MODULE(Stack);

at::Tensor data_of(int what, int step) {
  return numbers(static_cast<std::uint64_t>(4000 + 100 * what + step), {kBatch, 5, kWidth}).to(at::kDouble);
}

struct Trained {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> weights;  // whole, of this rank's stages
};

// A few steps on the ranks of a mesh.
struct Layout {
  Group pp, dp, tp, whole_model;
};
Trained train(Layout layout, const std::string& schedule) {
  auto& [pp, dp, tp, whole_model] = layout;
  Stack model;
  parallelize_module(
      *model, tp,
      {{"mixer*.up", Colwise{}}, {"mixer*.down", Rowwise{}}, {"mixer*.inner", SequenceParallel{.dim = -1}}});
  Pipeline pipeline(stages_at(*model, {"mixer*"}), pp, ScheduleNamed{schedule, kMicrobatches});
  DistributedDataParallel ddp(pipeline.module(), dp, {.reduce_in_backward = false});
  AdamW optimizer(pipeline.parameters(), {.lr = 0.01});
  const auto counted = own_parameters(*pipeline.module(), tp, pipeline.own_parameters());
  Trained result;
  for (int step = 0; step < 3; ++step) {
    const std::int64_t samples = kBatch / dp.size(), first = dp.rank() * samples;
    const nn::DropoutScope scope(
        {.seed = 9, .step = static_cast<std::uint64_t>(step), .first_sample = first});
    optimizer.zero_grad();
    pipeline.step(
        data_of(0, step).narrow(0, first, samples), data_of(1, step).narrow(0, first, samples),
        [](const at::Tensor& output, const at::Tensor& target) { return torch::mse_loss(output, target); });
    ddp.reduce();
    const auto norm = clip_grad_norm(pipeline.parameters(), 0.5, {.group = whole_model, .counted = counted});
    result.norms.push_back(norm.item<double>());
    optimizer.step();
    auto loss = pipeline.loss();
    dp.all_reduce(loss, {.op = ReduceOp::AVG}).wait();
    result.losses.push_back(loss.item<double>());
  }
  for (const auto& [name, tensor] : full_state(*pipeline.module())) result.weights[name] = tensor;
  return result;
}

void expect_as_alone(World& world, int pp, int dp, int tp, const std::string& schedule) {
  SCOPED_TRACE("pp " + std::to_string(pp) + " dp " + std::to_string(dp) + " tp " + std::to_string(tp) + " " +
               schedule);
  static std::mutex mutex;  // ranks may be threads
  static std::optional<Trained> alone;
  {
    std::lock_guard lock(mutex);
    if (!alone) {
      auto self = world.group().subgroup({world.rank()});
      alone = train({self, self, self, self}, "1f1b");
    }
  }
  const DeviceMesh mesh(world, {{"pp", pp}, {"dp", dp}, {"tp", tp}});
  const auto result = train({mesh["pp"], mesh["dp"], mesh["tp"], mesh.group({"pp", "tp"})}, schedule);
  for (std::size_t i = 0; i < alone->losses.size(); ++i) {
    EXPECT_NEAR(result.losses[i], alone->losses[i], 1e-12);
    EXPECT_NEAR(result.norms[i], alone->norms[i], 1e-12);
    EXPECT_GT(alone->norms[i], 0.5) << "nothing was clipped";
  }
  EXPECT_FALSE(result.weights.empty());
  for (const auto& [name, tensor] : result.weights)
    EXPECT_TRUE(torch::allclose(tensor, alone->weights.at(name), 1e-10, 1e-12)) << name;
}

TEST(Mesh, every_layout_trains_as_one_rank) {
  on_every_rank([](World& world) {
    const int n = world.size();
    for (int pp = 1; pp <= n; ++pp)
      for (int dp = 1; dp <= n / pp; ++dp) {
        const int tp = n / (pp * dp);
        if (pp * dp * tp != n || kBatch % (dp * kMicrobatches) != 0 || 16 % tp != 0 || pp == 3) continue;
        for (const char* schedule : {"1f1b", "zbh1"}) expect_as_alone(world, pp, dp, tp, schedule);
        if (2 * pp <= kMicrobatches)
          for (const char* schedule : {"interleaved1f1b", "zbv", "dualpipev"})
            expect_as_alone(world, pp, dp, tp, schedule);
      }
  });
}

TEST(Mesh, units_that_cannot_be_pieces_are_named) {
  Stack model;
  EXPECT_THAT(error_of<ConfigError>([&] {
                stages_at(*model, {"mixer0", "mixer1"});
              }),
              HasSubstr("mixer2.norm.weight"));
  EXPECT_THAT(error_of<ConfigError>([&] {
                stages_at(*model, {"mixer*", "tail"});
              }),
              HasSubstr("'tail' matches no module"));
  EXPECT_THAT(error_of<ConfigError>([&] {
                stages_at(*model, {"mixer*", "mixer3"});
              }),
              HasSubstr("cannot both be pieces"));
  EXPECT_THAT(error_of<ConfigError>([&] {
                stages_at(*model, {"mixer*", "mixer3.up"});
              }),
              HasSubstr("cannot both be pieces"));
  Wide plain;
  EXPECT_THAT(error_of<ConfigError>([&] { stages_at(*plain, {"first"}); }), HasSubstr("is no Unit"));
}

}  // namespace
}  // namespace lockstep::testing
