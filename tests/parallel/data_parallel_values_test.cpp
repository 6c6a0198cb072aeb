// DataParallel with many kinds of modules and values: buffers, random numbers, tied weights, nested arguments
// and results.
#include <array>
#include <map>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "parallel/data_parallel_modules.h"

namespace lockstep::testing {
namespace {

namespace nn = torch::nn;
using at::Tensor;

// ---- buffers ----------------------------------------------------------------------------------------------

TEST(DataParallelBuffers, the_first_replicas_are_kept_and_others_are_given_them) {
  torch::manual_seed(1);
  nn::BatchNorm1d model(4), expected(4);
  DataParallel dp(model, cpus(2), {.threads_per_replica = at::get_num_threads()});  // For the same bits.
  for (int step = 0; step < 3; ++step) {
    const auto x = torch::randn({6, 4});
    dp(x);
    expected(x.slice(0, 0, 3));  // The first replica's piece.
  }
  EXPECT_TRUE(at::equal(model->running_mean, expected->running_mean));
  EXPECT_TRUE(at::equal(model->running_var, expected->running_var));
  EXPECT_EQ(model->num_batches_tracked.item<int>(), 3);
  // In eval mode every replica uses them.
  model->eval();
  expected->eval();
  const auto x = torch::randn({6, 4});
  EXPECT_TRUE(torch::allclose(dp(x), expected(x)));
  model->running_mean.fill_(5);
  expected->running_mean.fill_(5);
  EXPECT_TRUE(torch::allclose(dp(x), expected(x)));
  model->to(torch::kDouble);
  expected->to(torch::kDouble);
  EXPECT_TRUE(torch::allclose(dp(x.to(torch::kDouble)), expected(x.to(torch::kDouble))));
}

TEST(DataParallelBuffers, gradients_go_through_batch_norm_piece_by_piece) {
  torch::manual_seed(2);
  nn::Sequential model(nn::Linear(6, 4), nn::BatchNorm1d(4), nn::Linear(4, 2));
  DataParallel dp(model, cpus(2));
  const auto x = torch::randn({8, 6});
  const auto pieces = x.chunk(2);
  const auto wanted = gradients_of(
      model, model->forward(pieces[0]).square().sum() + model->forward(pieces[1]).square().sum());
  expect_close(gradients_of(model, dp(x).square().sum()), wanted, 1e-5);
}

struct GradBufferImpl : nn::Cloneable<GradBufferImpl> {
  GradBufferImpl() { reset(); }
  void reset() override { buffer = register_buffer("shift", torch::zeros({1})); }
  Tensor forward(Tensor x) { return x + buffer; }
  Tensor buffer;
};
TORCH_MODULE(GradBuffer);

TEST(DataParallelBuffers, one_that_requires_a_gradient_is_refused) {
  GradBuffer model;
  DataParallel dp(model, cpus(2));
  model->buffer.set_requires_grad(true);
  const auto text = "buffer 'shift' requires a gradient; register it as a parameter";
  EXPECT_THAT(error_of<ConfigError>([&] { dp(torch::ones(2)); }), HasSubstr(text));
  EXPECT_THAT(error_of<ConfigError>([&] { DataParallel(model, cpus(2)); }), HasSubstr(text));
}

// ---- random numbers ---------------------------------------------------------------------------------------

TEST(DataParallelRandom, dropout_differs_between_replicas_and_not_between_runs_of_one_seed) {
  nn::Dropout model(0.5);
  DataParallel dp(model, cpus(3));
  const auto ones = torch::ones({3, 256});
  const auto draw = [&](int seed) {
    torch::manual_seed(seed);
    return std::make_pair(dp(ones), dp(ones));
  };
  const auto [first, second] = draw(5);
  EXPECT_FALSE(at::equal(first[0], first[1]));
  EXPECT_FALSE(at::equal(first[1], first[2]));
  EXPECT_FALSE(at::equal(first, second));
  EXPECT_NEAR(first.mean().item<float>(), 1, 0.2);
  for (int run = 0; run < 10; ++run) {
    const auto again = draw(5);
    EXPECT_TRUE(at::equal(again.first, first) && at::equal(again.second, second));
  }
  EXPECT_FALSE(at::equal(draw(6).first, first));
}

TEST(DataParallelRandom, nothing_is_drawn_for_replicas_or_for_calls_without_random_operations) {
  torch::manual_seed(7);
  const auto expected = torch::rand(3);
  torch::manual_seed(7);
  Mlp* model = nullptr;
  {
    torch::manual_seed(1);
    model = new Mlp();
  }
  torch::manual_seed(7);
  DataParallel dp(*model, cpus(2));  // Its replicas initialise themselves.
  dp(torch::ones({4, 6})).sum().backward();
  dp.replicate();
  EXPECT_TRUE(at::equal(torch::rand(3), expected));
  delete model;
}

// Every kind of random operation, with and without its own generator.
struct DiceImpl : nn::Cloneable<DiceImpl> {
  void reset() override {}
  std::vector<Tensor> forward(const Tensor& x) {
    at::Generator own = at::make_generator<at::CPUGeneratorImpl>(3);
    const auto rows = x.size(0);
    return {torch::rand({rows, 40}),
            torch::randn({rows, 40}),
            torch::randint(0, 1000, {rows, 40}),
            torch::randperm(40).repeat({rows, 1}),
            torch::multinomial(torch::ones({rows, 40}), 5),
            torch::empty({rows, 40}).uniform_(0, 1),
            torch::empty({rows, 40}).normal_(0, 1, own)};
  }
};
TORCH_MODULE(Dice);

TEST(DataParallelRandom, every_random_operation_takes_the_replicas_own_numbers) {
  Dice model;
  DataParallel dp(model, cpus(2));
  const auto draw = [&] {
    torch::manual_seed(8);
    return dp(torch::ones({2, 1}));
  };
  const auto first = draw();
  for (std::size_t i = 0; i < first.size(); ++i) {
    const bool own_generator = i + 1 == first.size();
    EXPECT_EQ(at::equal(first[i][0], first[i][1]), own_generator) << i;
  }
  for (int run = 0; run < 10; ++run) {
    const auto again = draw();
    for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(again[i], first[i])) << i;
  }
  // The caller's thread draws as usual.
  torch::manual_seed(9);
  const auto mine = torch::rand(4);
  torch::manual_seed(9);
  EXPECT_TRUE(at::equal(torch::rand(4), mine));
}

// A DataParallel with dropout inside every replica.
struct NestedDropoutImpl : nn::Cloneable<NestedDropoutImpl> {
  NestedDropoutImpl() { reset(); }
  void reset() override {
    inner = register_module("inner", nn::Dropout(0.5));
    parallel.reset();
  }
  Tensor forward(const Tensor& x) {
    if (!parallel) parallel.emplace(inner, cpus(2));
    return (*parallel)(x);
  }
  nn::Dropout inner{nullptr};
  std::optional<DataParallel<nn::DropoutImpl>> parallel;
};
TORCH_MODULE(NestedDropout);

TEST(DataParallelRandom, one_inside_another_takes_its_numbers_from_the_replica_around_it) {
  NestedDropout model;
  DataParallel dp(model, cpus(2));
  const auto draw = [&] {
    torch::manual_seed(4);
    return dp(torch::ones({4, 64}));
  };
  const auto first = draw();
  for (int a = 0; a < 4; ++a)
    for (int b = 0; b < a; ++b) EXPECT_FALSE(at::equal(first[a], first[b])) << a << " and " << b;
  for (int run = 0; run < 10; ++run) EXPECT_TRUE(at::equal(draw(), first));
}

TEST(DataParallelRandom, dropout_in_rnns_repeats_too) {
  nn::LSTM model(nn::LSTMOptions(4, 5).num_layers(2).dropout(0.5).batch_first(true));
  DataParallel dp(model, cpus(2));
  const auto x = torch::ones({4, 3, 4});
  const auto draw = [&] {
    torch::manual_seed(3);
    return std::get<0>(dp(x));
  };
  const auto first = draw();
  EXPECT_FALSE(at::equal(first[0], first[2]));
  for (int run = 0; run < 5; ++run) EXPECT_TRUE(at::equal(draw(), first));
}

// ---- arguments and results --------------------------------------------------------------------------------

TEST(DataParallelValues, an_lstm_with_its_state_is_split_along_another_dim) {
  torch::manual_seed(4);
  nn::LSTM model(nn::LSTMOptions(4, 5).num_layers(2));
  DataParallel dp(model, cpus(3), {.dim = 1});
  const auto x = torch::randn({6, 7, 4}), h = torch::randn({2, 7, 5}), c = torch::randn({2, 7, 5});
  const auto [out, state] = dp(x, std::make_tuple(h, c));
  const auto [expected, expected_state] = model(x, std::make_tuple(h, c));
  expect_close({out, std::get<0>(state), std::get<1>(state)},
               {expected, std::get<0>(expected_state), std::get<1>(expected_state)}, 1e-6);
  const auto wanted = gradients_of(model, expected.square().sum() + std::get<1>(expected_state).sum());
  expect_close(gradients_of(model, out.square().sum() + std::get<1>(state).sum()), wanted, 1e-5);
  EXPECT_EQ(std::get<0>(dp(x)).sizes(), out.sizes());  // Uses forward's default argument.
}

struct MixImpl : nn::Cloneable<MixImpl> {
  using Tree = std::tuple<std::vector<std::vector<Tensor>>, std::pair<Tensor, std::optional<Tensor>>,
                          std::map<std::string, Tensor>, std::array<Tensor, 2>>;
  MixImpl() { reset(); }
  void reset() override { scale = register_parameter("scale", torch::ones({1})); }
  Tree forward(Tree tree, int times, const std::string& word, std::vector<int>& seen, Tensor nothing,
               at::TensorList list) {
    if (nothing.defined() || word != "word") throw std::runtime_error("wrong arguments");
    seen.at(std::get<3>(tree)[0][0].item<int>() > 0 ? 1 : 0) = times;
    for (auto& each : std::get<0>(tree))
      for (auto& tensor : each) tensor = tensor * scale * times;
    std::get<2>(tree)["list"] = list[0] + list[1];
    return tree;
  }
  Tensor scale;
};
TORCH_MODULE(Mix);

TEST(DataParallelValues, tensors_are_found_in_what_holds_them_and_the_rest_goes_to_every_replica) {
  Mix model;
  DataParallel dp(model, cpus(2));
  const auto x = torch::arange(4, torch::kFloat);
  std::vector<int> seen(2);
  const std::vector<Tensor> list = {x, x};
  const auto [nested, pair, map, array] =
      dp(MixImpl::Tree({{x, x + 1}, {}, {x + 2}}, {x, std::nullopt}, {{"a", x}, {"b", -x}}, {x, x}), 3,
         std::string("word"), seen, Tensor(), at::TensorList(list));
  EXPECT_EQ(seen, (std::vector<int>{3, 3}));
  ASSERT_EQ(nested.size(), 3u);
  ASSERT_EQ(nested[0].size(), 2u);
  EXPECT_TRUE(nested[1].empty());
  EXPECT_TRUE(at::equal(nested[0][1], (x + 1) * 3) && at::equal(nested[2][0], (x + 2) * 3));
  EXPECT_TRUE(at::equal(pair.first, x) && !pair.second);
  EXPECT_TRUE(at::equal(map.at("a"), x) && at::equal(map.at("b"), -x) && at::equal(map.at("list"), x + x));
  EXPECT_TRUE(at::equal(array[1], x));
  nested[0][0].sum().backward();  // One of several results.
  EXPECT_EQ(model->scale.grad().item<float>(), 18);
}

struct ScalarImpl : nn::Cloneable<ScalarImpl> {
  ScalarImpl() { reset(); }
  void reset() override { scale = register_parameter("scale", torch::ones({1})); }
  Tensor forward(const Tensor& x) { return (x * scale).sum(); }
  Tensor scale;
};
TORCH_MODULE(Scalar);

TEST(DataParallelValues, scalars_are_joined_to_a_vector_and_that_is_told_once) {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  Scalar model;
  DataParallel dp(model, cpus(2));
  dp(torch::ones(4));
  const auto out = dp(torch::tensor({1.f, 2.f, 3.f}));
  set_log_sink(nullptr);
  EXPECT_TRUE(at::equal(out, torch::tensor({3.f, 3.f})));
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], HasSubstr("is a scalar; the replicas' scalars are joined into a vector"));
  (out * torch::tensor({1.f, 10.f})).sum().backward();
  EXPECT_EQ(model->scale.grad().item<float>(), 33);
}

TEST(DataParallelValues, arguments_that_cannot_be_split_alike_are_refused) {
  struct TwoImpl : nn::Cloneable<TwoImpl> {
    void reset() override {}
    Tensor forward(const Tensor& a, const Tensor& b) { return a + b.sum(); }
  };
  DataParallel dp(std::make_shared<TwoImpl>(), cpus(4));
  EXPECT_THAT(
      error_of<ConfigError>([&] { dp(torch::ones({8, 3}), torch::ones({2})); }),
      HasSubstr(
          "tensor 1 of the arguments has shape [2] and gives 2 pieces along dim 0, but tensor 0 of shape "
          "[8, 3] gives 4"));
  EXPECT_THAT(error_of<ConfigError>([&] { dp(torch::ones({8}), torch::tensor(1.f)); }),
              HasSubstr("tensor 1 of the arguments has shape [], which cannot be split along dim 0"));
  EXPECT_EQ(dp(torch::ones({4, 2}), torch::ones({4})).sizes(), (at::IntArrayRef{4, 2}));
}

TEST(DataParallelValues, arguments_are_passed_as_variables_are) {
  struct ByReferenceImpl : nn::Cloneable<ByReferenceImpl> {
    void reset() override {}
    Tensor forward(Tensor& x, const std::vector<Tensor>& list, double& factor, std::vector<bool> flags,
                   const char* word) {
      x = x + 1;  // The replica's own variable.
      return x + list[0] * factor + (flags.at(1) && word[0] == 'w');
    }
  };
  DataParallel dp(std::make_shared<ByReferenceImpl>(), cpus(2));
  auto x = torch::zeros(4);
  double factor = 3;
  const auto out = dp(x, std::vector<Tensor>{torch::ones(4)}, factor, std::vector<bool>{false, true}, "word");
  EXPECT_TRUE(at::equal(out, torch::full({4}, 5.f)));
  EXPECT_TRUE(at::equal(x, torch::zeros(4)));
}

TEST(DataParallelValues, calls_without_tensors_run_on_every_replica_and_without_arguments_on_one) {
  struct MakerImpl : nn::Cloneable<MakerImpl> {
    void reset() override {}
    Tensor forward(int value = 1) { return torch::full({1}, value); }
  };
  DataParallel dp(std::make_shared<MakerImpl>(), cpus(3));
  EXPECT_TRUE(at::equal(dp(7), torch::full({3}, 7)));
  EXPECT_TRUE(at::equal(dp(), torch::full({1}, 1)));
}

TEST(DataParallelValues, results_that_do_not_fit_together_are_an_error_that_shows_them) {
  struct OddImpl : nn::Cloneable<OddImpl> {
    void reset() override {}
    std::vector<Tensor> forward(const Tensor& x, int what) {
      const bool last = x.size(0) < 2;
      if (what == 0) return {torch::ones({2, last ? 3 : 4})};
      if (what == 1) return std::vector<Tensor>(last ? 1 : 2, x);
      return {last ? Tensor() : x};
    }
  };
  DataParallel dp(std::make_shared<OddImpl>(), cpus(2));
  const auto x = torch::ones(3);
  EXPECT_THAT(
      error_of<Error>([&] { dp(x, 0); }),
      HasSubstr(
          "tensor 0 of the results cannot be joined along dim 0: the replicas returned [2, 4], [2, 3]"));
  EXPECT_THAT(error_of<Error>([&] { dp(x, 1); }),
              HasSubstr("replicas 0 and 1 return vectors, maps or optionals of different"));
  EXPECT_THAT(error_of<Error>([&] { dp(x, 2); }), HasSubstr("the replicas returned [2], undefined"));
  EXPECT_FALSE(dp(torch::ones(1), 2)[0].defined());
}

TEST(DataParallelValues, results_may_be_integers_inputs_or_parameters_themselves) {
  struct AnyImpl : nn::Cloneable<AnyImpl> {
    AnyImpl() { reset(); }
    void reset() override { weight = register_parameter("weight", torch::ones({1, 2})); }
    std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x) { return {x.argmax(1), x, weight}; }
    Tensor weight;
  };
  auto model = std::make_shared<AnyImpl>();
  DataParallel dp(model, cpus(2));
  const auto x = torch::eye(2).requires_grad_();
  const auto [index, same, weight] = dp(x);
  EXPECT_FALSE(index.requires_grad());
  EXPECT_TRUE(at::equal(index, torch::arange(2)));
  (same.sum() * 2 + weight.sum()).backward();
  EXPECT_TRUE(at::equal(x.grad(), torch::full({2, 2}, 2.f)));
  EXPECT_TRUE(at::equal(model->weight.grad(), torch::full({1, 2}, 2.f)));
}

TEST(DataParallelValues, sparse_gradients_and_other_dtypes_are_summed) {
  nn::Embedding sparse(nn::EmbeddingOptions(10, 3).sparse(true)), dense(nn::EmbeddingOptions(10, 3));
  dense->weight.set_data(sparse->weight.detach());
  DataParallel dp(sparse, cpus(2));
  const auto index = torch::tensor({1, 2, 2, 5});
  dp(index).sum().backward();
  dense(index).sum().backward();
  EXPECT_TRUE(sparse->weight.grad().is_sparse());
  EXPECT_TRUE(at::equal(sparse->weight.grad().to_dense(), dense->weight.grad()));
  for (const auto type : {at::kBFloat16, at::kHalf, at::kDouble}) {
    Mlp model;
    model->to(type);
    DataParallel low(model, cpus(2));
    const auto x = torch::randn({4, 6}).to(type);
    const auto wanted = gradients_of(model, model(x).sum());
    expect_close(gradients_of(model, low(x).sum()), wanted, type == at::kDouble ? 1e-12 : 0.05);
  }
}

TEST(DataParallelValues, a_parameter_that_no_replica_uses_gets_no_gradient) {
  Branch model;
  DataParallel dp(model, cpus(2));
  dp(torch::tensor({{1.f}, {2.f}})).sum().backward();
  EXPECT_EQ(model->scale.grad().item<float>(), 3);
  EXPECT_FALSE(model->other.grad().defined());
}

// ---- how replicas are made --------------------------------------------------------------------------------

TEST(DataParallelReplicas, a_module_without_clone_is_refused_by_name_with_the_change_it_needs) {
  Plain model;
  const auto text = error_of<ConfigError>([&] { DataParallel(model, cpus(2)); });
  EXPECT_THAT(text, AllOf(HasSubstr("cannot replicate lockstep::testing::PlainImpl"),
                          HasSubstr("torch::nn::Cloneable<lockstep::testing::PlainImpl>"),
                          HasSubstr("void reset()"), HasSubstr("make_replica")));
  nn::Sequential around(nn::Linear(6, 6), Plain());
  EXPECT_THAT(error_of<ConfigError>([&] { DataParallel(around, cpus(2)); }), HasSubstr("PlainImpl"));
}

TEST(DataParallelReplicas, make_replica_stands_in_for_clone) {
  torch::manual_seed(5);
  Plain model;
  DataParallel dp(model, cpus(2), {.make_replica = [] { return std::make_shared<PlainImpl>(); }});
  const auto x = torch::randn({5, 6});
  expect_close({dp(x)}, {model(x)}, 1e-6);
  expect_close(gradients_of(model, dp(x).square().sum()), gradients_of(model, model(x).square().sum()), 1e-5);
  const auto refused = [&](std::function<std::shared_ptr<nn::Module>()> make) {
    return error_of<ConfigError>([&] { DataParallel(model, cpus(2), {.make_replica = make}); });
  };
  EXPECT_THAT(refused([] { return std::make_shared<PlainImpl>(9); }),
              HasSubstr("'first.weight' is [8, 6], but its replica's is [9, 6]"));
  EXPECT_THAT(refused([] { return std::make_shared<MlpImpl>(); }),
              HasSubstr("its replica is a lockstep::testing::MlpImpl"));
  EXPECT_THAT(refused([] { return nullptr; }), HasSubstr("returned no module"));
  EXPECT_THAT(refused([&] { return model.ptr(); }), HasSubstr("its replicas share a"));
  EXPECT_THAT(refused([one = std::make_shared<PlainImpl>()] { return one; }),
              HasSubstr("its replicas share a"));
}

TEST(DataParallelReplicas, a_reset_that_makes_nothing_anew_is_refused) {
  struct SameTensorImpl : nn::Cloneable<SameTensorImpl> {
    SameTensorImpl() { reset(); }
    void reset() override { register_parameter("weight", weight); }
    Tensor forward(Tensor x) { return x * weight; }
    Tensor weight = torch::ones(1);
  };
  struct SameChildImpl : nn::Cloneable<SameChildImpl> {
    SameChildImpl() { reset(); }
    void reset() override { register_module("child", child); }
    Tensor forward(Tensor x) { return child(x); }
    nn::Linear child{1, 1};
  };
  struct NoResetImpl : nn::Cloneable<NoResetImpl> {
    NoResetImpl() { weight = register_parameter("weight", torch::ones(1)); }
    void reset() override {}
    Tensor forward(Tensor x) { return x * weight; }
    Tensor weight;
  };
  EXPECT_THAT(error_of<ConfigError>([] { DataParallel(std::make_shared<SameTensorImpl>(), cpus(2)); }),
              HasSubstr("its replica shares 'weight'; reset() must register a new tensor"));
  EXPECT_THAT(error_of<ConfigError>([] { DataParallel(std::make_shared<SameChildImpl>(), cpus(2)); }),
              HasSubstr("its replicas share a"));
  EXPECT_THAT(error_of<ConfigError>([] { DataParallel(std::make_shared<NoResetImpl>(), cpus(2)); }),
              HasSubstr("register_parameter() inside reset()"));
}

// Two ways of tying weights, and one module in two places.
enum class Tie { member, registered, module };
template <Tie tie>
struct TiedImpl : nn::Cloneable<TiedImpl<tie>> {
  TiedImpl() { reset(); }
  void reset() override {
    encoder = this->register_module("encoder", nn::Embedding(12, 4));
    if (tie == Tie::registered) weight = this->register_parameter("weight", encoder->weight);
    if (tie == Tie::module) this->register_module("again", encoder);
    if (tie != Tie::member) return;
    decoder = this->register_module("decoder", nn::Linear(nn::LinearOptions(4, 12).bias(false)));
    decoder->weight = encoder->weight;
  }
  Tensor forward(const Tensor& index) {
    if (tie == Tie::member) return decoder(encoder(index));
    return torch::matmul(encoder(index), (tie == Tie::registered ? weight : encoder->weight).t());
  }
  nn::Embedding encoder{nullptr};
  nn::Linear decoder{nullptr};
  Tensor weight;
};

template <Tie tie>
void expect_tied() {
  torch::manual_seed(6);
  auto model = std::make_shared<TiedImpl<tie>>();
  DataParallel dp(model, cpus(2));
  const auto index = torch::tensor({1, 5, 5, 7});
  for (int step = 0; step < 2; ++step) {
    expect_close({dp(index)}, {model->forward(index)}, 1e-6);
    const auto wanted = gradients_of(model, model->forward(index).square().sum());
    expect_close(gradients_of(model, dp(index).square().sum()), wanted, 1e-5);
    torch::NoGradGuard no_grad;
    model->encoder->weight.add_(0.5);
  }
}
TEST(DataParallelReplicas, tied_weights_stay_tied) {
  expect_tied<Tie::member>();
  expect_tied<Tie::registered>();
  expect_tied<Tie::module>();
}

TEST(DataParallelReplicas, parameters_and_submodules_that_come_later_are_followed) {
  struct GrowingImpl : nn::Cloneable<GrowingImpl> {
    GrowingImpl() { reset(); }
    void reset() override {
      base = register_module("base", nn::Linear(3, 3));
      if (grown) grow();
    }
    void grow() {
      grown = true;
      extra = register_parameter("extra", torch::zeros(3));
    }
    Tensor forward(Tensor x) { return grown ? base(x) + extra : base(x); }
    nn::Linear base{nullptr};
    Tensor extra;
    bool grown = false;
  };
  auto model = std::make_shared<GrowingImpl>();
  DataParallel dp(model, cpus(2));
  const auto x = torch::randn({4, 3});
  const auto before = dp(x).sum();
  model->grow();
  expect_close({dp(x)}, {model->forward(x)}, 1e-6);
  const auto wanted = gradients_of(model, model->forward(x).sum());
  expect_close(gradients_of(model, dp(x).sum()), wanted, 1e-5);
  before.backward();  // Of replicas that no longer exist.
  EXPECT_TRUE(model->base->weight.grad().defined());
  EXPECT_FALSE(model->extra.grad().defined());

  nn::Sequential layers(nn::Linear(3, 3));
  DataParallel stack(layers, cpus(2));
  stack(x);
  layers->push_back(nn::ReLU());  // Without a parameter.
  expect_close({stack(x)}, {layers->forward(x)}, 1e-6);
}

TEST(DataParallelReplicas, replicate_brings_what_is_no_tensor) {
  nn::Dropout model(0.0);
  DataParallel dp(model, cpus(2));
  const auto ones = torch::ones({2, 100});
  model->options.p(1.0);
  EXPECT_TRUE(at::equal(dp(ones), ones));
  dp.replicate();
  EXPECT_TRUE(at::equal(dp(ones), torch::zeros({2, 100})));
}

TEST(DataParallelReplicas, a_tensor_that_requires_grad_and_is_no_parameter_is_refused) {
  struct HiddenImpl : nn::Cloneable<HiddenImpl> {
    void reset() override {}
    Tensor forward(const Tensor& x) { return x * scale; }
    Tensor scale = torch::ones({1, 3}, torch::requires_grad());
  };
  auto model = std::make_shared<HiddenImpl>();
  DataParallel dp(model, cpus(2));
  EXPECT_THAT(
      error_of<ReplicaError>([&] { dp(torch::ones({2, 3})); }),
      HasSubstr("a tensor of shape [1, 3] that requires a gradient and is neither a registered parameter"));
  torch::NoGradGuard no_grad;
  dp(torch::ones({2, 3}));
}

TEST(DataParallelReplicas, a_module_on_another_device_is_refused_by_the_tensors_name) {
  struct ElsewhereImpl : nn::Cloneable<ElsewhereImpl> {
    ElsewhereImpl() { reset(); }
    void reset() override {
      here = register_parameter("here", torch::ones(1));
      there = register_buffer("there", torch::ones(1, torch::kMeta));
    }
    Tensor forward(const Tensor& x) { return x * here; }
    Tensor here, there;
  };
  EXPECT_THAT(
      error_of<ConfigError>([] { DataParallel(std::make_shared<ElsewhereImpl>(), cpus(2)); }),
      HasSubstr("must be on the first device, cpu, but its buffer 'there' is on meta; call module->to(cpu)"));
}

TEST(DataParallelReplicas, modules_made_and_called_in_inference_mode_work) {
  c10::InferenceMode guard;
  Mlp model;
  DataParallel dp(model, cpus(2));
  const auto x = torch::randn({4, 6});
  expect_close({dp(x)}, {model(x)}, 1e-6);
}

}  // namespace
}  // namespace lockstep::testing
