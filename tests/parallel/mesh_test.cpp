// Pipelines, replicas and split layers combined: every layout trains like one rank.
#include <unistd.h>

#include <filesystem>

#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

constexpr int kFeatures = 8, kBatch = 24, kMicrobatches = 4, kPieces = 8;

struct MixerImpl : torch::nn::Module {
  MixerImpl()
      : norm(torch::nn::LayerNormOptions({kFeatures})),
        up(kFeatures, 16),
        down(16, kFeatures),
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
  Unit<nn::Dropout> inner;  // Applied to slices.
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
  return numbers(static_cast<std::uint64_t>(4000 + 100 * what + step), {kBatch, 5, kFeatures})
      .to(at::kDouble);
}

struct Trained {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> weights;  // Whole weights of this rank's stages.
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
  static std::mutex mutex;  // Ranks may be threads.
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
  EXPECT_THAT(error_of<ConfigError>([&] { stages_at(*model, {"mixer0", "mixer1"}); }),
              HasSubstr("mixer2.norm.weight"));
  EXPECT_THAT(error_of<ConfigError>([&] { stages_at(*model, {"mixer*", "tail"}); }),
              HasSubstr("'tail' matches no module"));
  EXPECT_THAT(error_of<ConfigError>([&] { stages_at(*model, {"mixer*", "mixer3"}); }),
              HasSubstr("cannot both be pipeline pieces"));
  EXPECT_THAT(error_of<ConfigError>([&] { stages_at(*model, {"mixer*", "mixer3.up"}); }),
              HasSubstr("cannot both be pipeline pieces"));
  Wide plain;
  EXPECT_THAT(error_of<ConfigError>([&] { stages_at(*plain, {"first"}); }), HasSubstr("is not a Unit"));
}

// Statistics cover all replicas of a stage.
TEST(Mesh, batch_norm_in_a_pipeline_is_synchronised_over_replicas) {
  on_every_rank([](World& world) {
    if (world.size() != 4) return;
    struct NormedImpl : torch::nn::Module {
      NormedImpl() : linear(kFeatures, kFeatures), norm(kFeatures) {
        register_module("linear", linear);
        register_module("norm", norm);
        to(at::kDouble);
        fill_parameters(*this, 70);
      }
      at::Tensor forward(const at::Tensor& x) { return norm(linear(x)).tanh(); }
      torch::nn::Linear linear;
      Unit<torch::nn::BatchNorm1d> norm;
    };
    using Normed = torch::nn::ModuleHolder<NormedImpl>;
    const auto train = [](Group pp, Group dp) {
      Normed first, second;
      convert_sync_batchnorm(*first, dp);
      convert_sync_batchnorm(*second, dp);
      Pipeline pipeline({first, second}, pp, ScheduleGPipe{});
      DistributedDataParallel ddp(pipeline.module(), dp,
                                  {.broadcast_buffers = false, .reduce_in_backward = false});
      SGD optimizer(pipeline.parameters(), {.lr = 0.1});
      double loss = 0;
      for (int step = 0; step < 3; ++step) {
        const auto x = numbers(static_cast<std::uint64_t>(6000 + step), {16, kFeatures}).to(at::kDouble);
        optimizer.zero_grad();
        const auto part = 16 / dp.size();
        pipeline.step(x.narrow(0, dp.rank() * part, part), x.narrow(0, dp.rank() * part, part),
                      torch::nn::MSELoss());
        ddp.reduce();
        optimizer.step();
        auto mean = pipeline.loss();
        dp.all_reduce(mean, {.op = ReduceOp::AVG}).wait();
        loss = mean.item<double>();
      }
      return loss;
    };
    auto self = world.group().subgroup({world.rank()});
    const DeviceMesh mesh(world, {{"dp", 2}, {"pp", 2}});
    EXPECT_NEAR(train(mesh["pp"], mesh["dp"]), train(self, self), 1e-12);
  });
}

// Slices are not replicas, and part of a model is not the whole model.
TEST(Mesh, what_is_split_is_not_taken_for_whole) {
  on_every_rank([](World& world) {
    if (world.size() == 1 || 16 % world.size() != 0) return;
    auto group = world.group();
    Stack model;
    parallelize_module(*model, group, {{"mixer*.up", Colwise{}}, {"mixer*.down", Rowwise{}}});
    EXPECT_THAT(error_of<ConfigError>([&] { DistributedDataParallel(model, group); }),
                HasSubstr("'mixer0.up' is split over ranks 0, 1"));
    EXPECT_THAT(error_of<ConfigError>([&] { save("nowhere.safetensors", {.model = model}); }),
                HasSubstr("full_state"));
    const auto file =
        std::filesystem::temp_directory_path() /
        ("split-" + std::to_string(::getpid()) + "-" + std::to_string(world.rank()) + ".safetensors");
    Stack whole;
    save(file, {.model = whole});
    EXPECT_THAT(error_of<ConfigError>([&] { load(file, {.model = model}); }), HasSubstr("full_state"));
    std::filesystem::remove(file);
    auto state = full_state(*model);
    state[0].second = state[0].second.to(at::kFloat);
    EXPECT_THAT(error_of<ConfigError>([&] { load_full_state(*model, state); }), HasSubstr("got Float"));
    // Ranks that started with different values.
    Stack other;
    fill_parameters(*other, 300 + static_cast<std::uint64_t>(world.rank()));
    EXPECT_THROW(parallelize_module(*other, group, {{"mixer*.up", Colwise{}}}), DriftError);
  });
}

struct ScaledImpl : torch::nn::LinearImpl {
  using LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& x) { return LinearImpl::forward(x) * 100; }
};
TORCH_MODULE(Scaled);
struct RenamedImpl : torch::nn::LinearImpl {
  using LinearImpl::LinearImpl;
};
TORCH_MODULE(Renamed);

TEST(Mesh, a_layer_with_a_forward_of_its_own_is_not_split) {
  on_every_rank([](World& world) {
    if (8 % world.size() != 0) return;
    struct Net : torch::nn::Module {
      Net() : scaled(8, 8), renamed(8, 8), sequence(Scaled(8, 8)) {
        register_module("scaled", scaled);
        register_module("renamed", renamed);
        register_module("sequence", sequence);
        fill_parameters(*this, 40);
      }
      Unit<Scaled> scaled;
      Unit<Renamed> renamed;
      torch::nn::Sequential sequence;
    } net;
    auto group = world.group();
    for (const char* name : {"scaled", "sequence.0"})
      EXPECT_THAT(error_of<ConfigError>([&] { parallelize_module(net, group, {{name, Colwise{}}}); }),
                  HasSubstr("forward would be bypassed"));
    EXPECT_EQ(parallelize_module(net, group, {{"renamed", Colwise{.gather_output = true}}}), 1);
    const auto y = net.renamed(torch::ones({1, 8}));
    EXPECT_EQ(y.size(1), 8);
    y.relu_();  // On one rank it can be changed in place too.
    scatter_to_group(torch::ones({8, 8}).requires_grad_() * 2, group, 0).relu_();
    EXPECT_FALSE(detail::name_matches("*", ""));
  });
}

TEST(Mesh, a_weight_that_two_units_share_may_get_its_gradient_through_one) {
  on_every_rank([](World& world) {
    if (8 % world.size() != 0) return;
    struct Net : torch::nn::Module {
      Net() : a(8, 8), b(8, 8) {
        register_module("a", a);
        register_module("b", b);
        fill_parameters(*this, 50);
        b->replace_weight(a->weight);
      }
      struct TiedImpl : torch::nn::LinearImpl {
        using LinearImpl::LinearImpl;
        void replace_weight(const at::Tensor& other) { weight = parameters_["weight"] = other; }
      };
      Unit<torch::nn::Linear> a;
      Unit<torch::nn::ModuleHolder<TiedImpl>> b;
    } net;
    parallelize_module(net, world.group(), {{"a", Colwise{}}, {"b", Colwise{}}});
    net.a(torch::ones({2, 8})).sum().backward();
    net.b(torch::ones({2, 8})).sum().backward();
    EXPECT_THROW(net.a->forward(torch::ones({2, 8})).sum().backward(), ConfigError);
  });
}

}  // namespace
}  // namespace lockstep::testing
