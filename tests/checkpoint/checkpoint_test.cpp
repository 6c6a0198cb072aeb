// Saving and resuming: bit-exact, all or nothing, on all ranks or on none.
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include <lockstep/checkpoint/format/safetensors.h>
#include <lockstep/lockstep.h>
#include <lockstep/os/file.h>
#include <torch/torch.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using torch::Tensor;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(6, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    drop = register_module("drop", torch::nn::Dropout(0.3));
    last = register_module("last", torch::nn::Linear(torch::nn::LinearOptions(16, 1).bias(false)));
  }
  Tensor forward(Tensor x) { return last(drop(torch::relu(norm(first(x))))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Net);

// A part with integer state, like a sampler.
struct Counter {
  std::int64_t next = 0;
  bool refuses = false;
  std::map<std::string, std::int64_t> state() const { return {{"next", next}}; }
  void load_state(const std::map<std::string, std::int64_t>& state) {
    if (refuses) throw ConfigError("the counter refuses");
    next = state.at("next");
  }
};

class Checkpoint : public ::testing::Test {
 protected:
  Checkpoint() {
    std::string pattern = (fs::temp_directory_path() / "lockstep-checkpoint-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~Checkpoint() override { fs::remove_all(folder_); }
  std::string path(const std::string& name = "run.safetensors") const { return (folder_ / name).string(); }
  std::string contents(const std::string& name = "run.safetensors") const {
    std::ifstream in(path(name), std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }
  void put(const std::string& bytes, const std::string& name = "run.safetensors") const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }
  fs::path folder_;
};

std::map<std::string, Tensor> snapshot(torch::nn::Module& module) {
  std::map<std::string, Tensor> copy;
  for (const auto& item : module.named_parameters()) copy[item.key()] = item.value().detach().clone();
  for (const auto& item : module.named_buffers()) copy[item.key()] = item.value().detach().clone();
  return copy;
}

void expect_same(const std::map<std::string, Tensor>& a, const std::map<std::string, Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) EXPECT_TRUE(torch::equal(tensor, b.at(name))) << name;
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>)>;

// A run with everything that a checkpoint keeps.
struct Training {
  Net net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<SequentialLR> scheduler;
  GradScaler scaler{{.init_scale = 8, .growth_interval = 3}};
  Counter sampler;

  explicit Training(const MakeOptimizer& make) {
    optimizer = make(net->parameters());
    scheduler = std::make_unique<SequentialLR>(
        *optimizer,
        std::vector<LRSchedule>{LinearLROptions{.total_iters = 4}, CosineAnnealingLROptions{.T_max = 20}},
        std::vector<std::int64_t>{5});
  }
  void step() {
    optimizer->zero_grad();
    const auto x = torch::randn({8, 6}), y = torch::randn({8, 1});
    scaler.scale(torch::mse_loss(net(x), y)).backward();
    scaler.step(*optimizer);
    scaler.update();
    scheduler->step();
    ++sampler.next;
  }
  void save(const std::string& path) {
    lockstep::save(path, {.model = net,
                          .optimizer = *optimizer,
                          .scheduler = *scheduler,
                          .scaler = scaler,
                          .sampler = sampler,
                          .rng = true,
                          .values = {{"steps", sampler.next}}});
  }
  Loaded load(const std::string& path) {
    return lockstep::load(path, {.model = net,
                                 .optimizer = *optimizer,
                                 .scheduler = *scheduler,
                                 .scaler = scaler,
                                 .sampler = sampler,
                                 .rng = true});
  }
};

template <typename Optimizer, typename Options>
MakeOptimizer maker(Options options) {
  return
      [options](std::vector<Tensor> parameters) { return std::make_unique<Optimizer>(parameters, options); };
}

const std::vector<std::pair<const char*, MakeOptimizer>>& optimizers() {
  static const std::vector<std::pair<const char*, MakeOptimizer>> all = {
      {"Adam", maker<Adam>(AdamOptions{.lr = 0.01, .amsgrad = true})},
      {"AdamW", maker<AdamW>(AdamWOptions{.lr = 0.01, .betas = {0.8, 0.9}})},
      {"AdamW fused", maker<AdamW>(AdamWOptions{.lr = 0.01, .implementation = Implementation::fused})},
      {"SGD", maker<SGD>(SGDOptions{.lr = 0.01, .momentum = 0.9, .maximize = true})},
      {"SGD without momentum", maker<SGD>(SGDOptions{.lr = 0.01})},
      {"torch Adam", maker<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true))},
      {"torch AdamW", maker<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01))},
      {"torch SGD", maker<torch::optim::SGD>(torch::optim::SGDOptions(0.01).momentum(0.9).nesterov(true))},
      {"torch RMSprop",
       maker<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true))},
      {"torch Adagrad", maker<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.01).lr_decay(0.1))},
  };
  return all;
}

TEST_F(Checkpoint, a_run_goes_on_with_the_bits_of_the_undisturbed_one) {
  for (const auto& [name, make] : optimizers())
    for (int cut : {0, 1, 7, 12}) {
      torch::manual_seed(7);
      Training undisturbed(make);
      for (int i = 0; i < 20; ++i) {
        if (i == cut) undisturbed.save(path());
        undisturbed.step();
      }
      torch::manual_seed(99);
      Training resumed(make);
      for (int i = 0; i < 3; ++i) resumed.step();  // arbitrary earlier steps
      EXPECT_EQ(resumed.load(path()).integer("steps"), cut);
      for (int i = cut; i < 20; ++i) resumed.step();
      SCOPED_TRACE(fmt::format("{}, cut at {}", name, cut));
      expect_same(snapshot(*undisturbed.net), snapshot(*resumed.net));
      EXPECT_EQ(undisturbed.sampler.next, resumed.sampler.next);
      EXPECT_EQ(undisturbed.scaler.state(), resumed.scaler.state());
      EXPECT_EQ(undisturbed.scheduler->last_lr(), resumed.scheduler->last_lr());
      EXPECT_EQ(files(), 1);
    }
}

TEST_F(Checkpoint, the_same_state_makes_the_same_bytes) {
  torch::manual_seed(1);
  Training run(optimizers()[0].second);
  for (int i = 0; i < 3; ++i) run.step();
  run.save(path("a"));
  run.save(path("b"));
  EXPECT_EQ(contents("a"), contents("b"));
}

TEST_F(Checkpoint, ours_and_libtorchs_optimizers_load_each_others_state) {
  torch::manual_seed(3);
  Net net, other;
  AdamW ours(net->parameters(), {.lr = 0.125, .maximize = true});
  torch::mse_loss(net(torch::randn({4, 6})), torch::randn({4, 1})).backward();
  ours.step();
  save(path(), {.model = net, .optimizer = ours});
  torch::optim::AdamW theirs(other->parameters(), torch::optim::AdamWOptions());
  load(path(), {.model = other, .optimizer = theirs});
  EXPECT_EQ(static_cast<torch::optim::AdamWOptions&>(theirs.param_groups()[0].options()).lr(), 0.125);
  save(path(), {.model = other, .optimizer = theirs});
  AdamW again(net->parameters(), {.maximize = true});
  load(path(), {.model = net, .optimizer = again});
  EXPECT_EQ(again.options().lr, 0.125);
  EXPECT_TRUE(again.options().maximize);  // LibTorch's optimizer lacks it
  EXPECT_EQ(again.state().size(), net->parameters().size());
}

TEST_F(Checkpoint, state_is_found_by_the_parameters_names) {
  torch::manual_seed(4);
  Net net;
  auto stray = torch::randn({3}).requires_grad_();
  auto with_stray = [&](bool reversed) {
    auto parameters = net->parameters();
    if (reversed) std::reverse(parameters.begin(), parameters.end());
    return std::vector{Adam::group(parameters, {.lr = 1}), Adam::group({stray}, {.lr = 2})};
  };
  Adam optimizer(with_stray(false));
  torch::mse_loss(net(torch::randn({4, 6})), torch::randn({4, 1})).backward();
  stray.mutable_grad() = torch::ones({3});
  optimizer.step();
  save(path(), {.model = net, .optimizer = optimizer});
  Adam reversed(with_stray(true));
  load(path(), {.model = net, .optimizer = reversed});
  for (const auto& parameter : net->parameters()) {
    auto state = [&](Adam& each) {
      return static_cast<torch::optim::AdamParamState&>(*each.state().at(parameter.unsafeGetTensorImpl()));
    };
    EXPECT_TRUE(torch::equal(state(optimizer).exp_avg(), state(reversed).exp_avg()));
  }
  EXPECT_EQ(reversed.options(1).lr, 2);
}

TEST_F(Checkpoint, parameters_that_had_no_state_have_none_after_loading) {
  auto p = torch::ones({2}).requires_grad_(), q = torch::ones({2}).requires_grad_();
  Adam saved({p, q});
  p.mutable_grad() = torch::ones({2});
  saved.step();
  save(path(), {.optimizer = saved});
  Adam other({p, q});
  q.mutable_grad() = torch::ones({2});
  other.step();
  EXPECT_EQ(other.state().size(), 2);
  load(path(), {.optimizer = other});
  EXPECT_EQ(other.state().size(), 1);
}

TEST_F(Checkpoint, every_dtype_and_layout_comes_back) {
  struct Zoo : torch::nn::Module {
    Zoo() {
      int n = 0;
      for (auto dtype :
           {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kShort, at::kChar,
            at::kByte, at::kBool, at::kComplexFloat, at::kFloat8_e5m2, at::kFloat8_e4m3fn, at::kUInt16})
        for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{}, {5}, {0, 3}, {2, 3, 4}})
          register_buffer(fmt::format("b{}", n++), (torch::rand(sizes) * 100).to(dtype));
      register_buffer("transposed", torch::randn({4, 6}).t());
      register_buffer("holes", torch::randn({10, 4}).slice(0, 0, 10, 3));
      register_buffer("channels_last", torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast));
      register_buffer("conjugate", torch::conj(torch::randn({3}, at::kComplexFloat)));
      register_parameter("none", Tensor(), /*requires_grad=*/false);
    }
  };
  torch::manual_seed(1);
  Zoo saved, other;
  save(path(), {.model = saved});
  load(path(), {.model = other});
  const auto a = snapshot(saved), b = snapshot(other);
  for (const auto& [name, tensor] : a) {
    auto bytes = [](const Tensor& t) { return t.resolve_conj().contiguous().view({-1}).view(at::kByte); };
    EXPECT_TRUE(torch::equal(bytes(tensor), bytes(b.at(name)))) << name;
  }
  EXPECT_EQ(other.named_buffers()["transposed"].stride(0), 1);  // keeps the module's own memory
}

TEST_F(Checkpoint, models_are_given_as_modules_holders_or_pointers) {
  Net net;
  auto shared = net.ptr();
  torch::nn::Sequential sequential(torch::nn::Linear(2, 2));
  save(path("a"), {.model = net});
  save(path("b"), {.model = *net});
  save(path("c"), {.model = shared});
  save(path("d"), {.model = shared.get()});
  save(path("e"), {.model = sequential});
  for (const char* name : {"b", "c", "d"}) EXPECT_EQ(contents(name), contents("a"));
  load(path("e"), {.model = sequential});
}

// A DistributedDataParallel is saved like the model it wraps.
TEST_F(Checkpoint, wrapped_module_objects_and_torchscript_models_are_saved_and_loaded) {
  struct Plain : torch::nn::Module {
    Plain() { register_module("net", net); }
    Plain(const Plain&) = delete;
    Tensor forward(const Tensor& x) { return net(x); }
    Net net;
  };
  run_threads(1, [&](World& world) {
    Plain plain, other;
    DistributedDataParallel ddp(plain, world.group()), others(other, world.group());
    AdamW optimizer(ddp->parameters());
    ddp(torch::randn({4, 6})).sum().backward();
    optimizer.step();
    save(path("module"), {.model = plain, .optimizer = optimizer});
    save(path("ddp"), {.model = ddp, .optimizer = optimizer});
    EXPECT_EQ(contents("ddp"), contents("module"));
    load(path("module"), {.model = others});
    expect_same(snapshot(plain), snapshot(other));
    DistributedDataParallel holder(Net(), world.group());
    const auto before = snapshot(*holder.module());
    save(path("holder"), {.model = holder});
    holder.module()->first->weight.data().zero_();
    load(path("holder"), {.model = holder.module()});
    expect_same(snapshot(*holder.module()), before);

    torch::jit::Module script("Scripted");
    script.register_parameter("weight", torch::ones({3}).requires_grad_(), false);
    script.register_buffer("offset", torch::ones({2}));
    script.define("def forward(self, x: Tensor) -> Tensor:\n  return x * self.weight\n");
    save(path("script"), {.model = script});
    DistributedDataParallel scripted(script, world.group());
    script.attr("weight").toTensor().data().zero_();
    script.attr("offset").toTensor().zero_();
    load(path("script"), {.model = scripted});
    EXPECT_EQ(script.attr("weight").toTensor().sum().item<float>(), 3);
    EXPECT_EQ(script.attr("offset").toTensor().sum().item<float>(), 2);
  });
}

TEST_F(Checkpoint, files_name_pytorch_as_their_format_and_older_ones_that_do_not_still_load) {
  Net net, other;
  save(path(), {.model = net, .values = {{"epoch", 3}}});
  const auto bytes = contents();
  const auto length = detail::header_length(bytes, bytes.size());
  const auto begin = detail::kLengthBytes + length;
  auto header = detail::parse_header(bytes.substr(detail::kLengthBytes, length), bytes.size() - begin);
  EXPECT_EQ(header.metadata.at("format"), "pt");
  header.metadata.erase("format");
  const std::string key = "lockstep.checksum", zeros(detail::Checksum::kDigits, '0');
  header.metadata[key] = zeros;
  auto older = detail::encode(header) + bytes.substr(begin);
  detail::Checksum checksum;
  checksum.add(std::as_bytes(std::span(older)));
  older.replace(older.find(key + "\":\"" + zeros) + key.size() + 3, zeros.size(), checksum.digits());
  put(older, "older");
  EXPECT_EQ(load(path("older"), {.model = other}).integer("epoch"), 3);
  expect_same(snapshot(*net), snapshot(*other));
}

TEST_F(Checkpoint, ranks_that_all_save_without_a_group_are_told_what_to_do) {
  Net net;
  detail::PartialFile held(path());  // as if another rank were writing
  EXPECT_THAT(error_of<ConfigError>([&] { save(path(), {.model = net}); }),
              AllOf(HasSubstr("another process is writing it now"),
                    HasSubstr("set {.group} or save on rank 0 only")));
}

TEST_F(Checkpoint, a_module_that_is_registered_twice_is_saved_and_loaded) {
  struct TwiceImpl : torch::nn::Module {
    TwiceImpl() {
      a = register_module("a", torch::nn::Linear(3, 3));
      register_module("again", a.ptr());
    }
    torch::nn::Linear a{nullptr};
  };
  TwiceImpl saved, other;
  Adam optimizer({saved.a->weight, saved.a->bias}), others({other.a->weight, other.a->bias});
  saved.a(torch::ones({1, 3})).sum().backward();
  optimizer.step();
  save(path(), {.model = saved, .optimizer = optimizer});
  load(path(), {.model = other, .optimizer = others});
  EXPECT_TRUE(torch::equal(saved.a->weight, other.a->weight));
  EXPECT_EQ(others.state().size(), 2);
}

TEST_F(Checkpoint, what_does_not_fit_is_listed_and_nothing_changes) {
  torch::manual_seed(1);
  torch::nn::Sequential saved(torch::nn::Linear(2, 3), torch::nn::Linear(3, 4));
  Adam saved_optimizer(saved->parameters(), {.lr = 0.5});
  save(path(), {.model = saved, .optimizer = saved_optimizer});

  torch::nn::Sequential other(torch::nn::Linear(2, 5), torch::nn::ReLU(),
                              torch::nn::Linear(torch::nn::LinearOptions(5, 1).bias(false)));
  other->to(torch::kDouble);
  const auto before = snapshot(*other);
  const auto text = error_of<ConfigError>([&] { load(path(), {.model = other}); });
  EXPECT_THAT(text, AllOf(HasSubstr(fmt::format("cannot load '{}': the checkpoint does not match", path())),
                          HasSubstr("missing: 2.weight"), HasSubstr("unexpected: 1.weight, 1.bias"),
                          HasSubstr("'0.weight' is F32 [3, 2] in the file and F64 [5, 2] here")));
  EXPECT_THAT(error_of<ConfigError>([&] { load(path(), {.model = other, .strict = false}); }),
              AllOf(HasSubstr("different"), Not(HasSubstr("missing"))));
  expect_same(before, snapshot(*other));

  torch::nn::Sequential longer(torch::nn::Linear(2, 3), torch::nn::Linear(3, 4), torch::nn::Linear(4, 1));
  Adam optimizer(longer->parameters(), {.lr = 0.25});
  EXPECT_THAT(error_of<ConfigError>([&] { load(path(), {.model = longer}); }),
              HasSubstr("missing: 2.weight, 2.bias"));
  EXPECT_THAT(
      error_of<ConfigError>(
          [&] { load(path(), {.model = longer, .optimizer = optimizer, .strict = false}); }),
      HasSubstr(
          "parameter group 0 has different parameters: only here: [2.bias, 2.weight], only in the file: []"));
  EXPECT_EQ(optimizer.options().lr, 0.25);
  const auto loaded = load(path(), {.model = longer, .strict = false});
  EXPECT_EQ(loaded.missing, (std::vector<std::string>{"2.weight", "2.bias"}));
  EXPECT_TRUE(torch::equal(longer->parameters()[0], saved->parameters()[0]));

  SGD sgd(saved->parameters());
  EXPECT_THAT(error_of<ConfigError>([&] { load(path(), {.model = saved, .optimizer = sgd}); }),
              HasSubstr("the file has the state of Adam, but the optimizer is SGD"));
  Adam grouped({Adam::group({saved->parameters()[0]}, {}), Adam::group({saved->parameters()[1]}, {})});
  EXPECT_THAT(error_of<ConfigError>([&] { load(path(), {.model = saved, .optimizer = grouped}); }),
              HasSubstr("the file has 1 parameter groups, but the optimizer has 2"));
}

TEST_F(Checkpoint, parts_that_the_file_lacks_are_an_error_unless_not_strict) {
  Net net;
  Adam optimizer(net->parameters());
  Counter sampler{5};
  save(path(), {.model = net});
  EXPECT_THAT(error_of<ConfigError>([&] { load(path(), {.model = net, .optimizer = optimizer}); }),
              HasSubstr("the file has no optimizer"));
  EXPECT_THAT(error_of<ConfigError>([&] { load(path(), {.model = net, .sampler = sampler}); }),
              HasSubstr("the file has no sampler"));
  EXPECT_THAT(error_of<ConfigError>([&] { load(path(), {.model = net, .rng = true}); }),
              HasSubstr("the file has no states of random number generators"));
  const auto loaded =
      load(path(), {.model = net, .optimizer = optimizer, .sampler = sampler, .rng = true, .strict = false});
  EXPECT_EQ(loaded.missing.size(), 3);
  EXPECT_FALSE(loaded.rng);
  EXPECT_EQ(sampler.next, 5);
}

TEST_F(Checkpoint, values_come_back_as_they_were) {
  save(path(),
       {.values = {{"epoch", 3}, {"size", std::size_t{7}}, {"loss", 0.1f}, {"best", 1e-300}, {"note", "x"}}});
  const auto loaded = load(path(), {});
  EXPECT_EQ(loaded.integer("epoch"), 3);
  EXPECT_EQ(loaded.integer("size"), 7);
  EXPECT_EQ(loaded.number("loss"), 0.1f);
  EXPECT_EQ(loaded.number("best"), 1e-300);
  EXPECT_EQ(loaded.number("epoch"), 3);
  EXPECT_EQ(loaded.text("note"), "x");
  EXPECT_EQ(loaded.ranks, 1);
  EXPECT_THAT(error_of<ConfigError>([&] { loaded.integer("best"); }),
              HasSubstr("'best': expected an integer"));
  EXPECT_THAT(error_of<ConfigError>([&] { loaded.text("epoch"); }), HasSubstr("'epoch': expected a string"));
  EXPECT_THAT(error_of<ConfigError>([&] { loaded.number("none"); }), HasSubstr("no value named 'none'"));
}

TEST_F(Checkpoint, every_damage_is_found_and_changes_nothing) {
  torch::manual_seed(1);
  Training run(optimizers()[0].second);
  run.step();
  run.save(path("good"));
  const auto good = contents("good");
  for (int i = 0; i < 3; ++i) run.step();
  const auto before = snapshot(*run.net);
  const auto lr = run.scheduler->last_lr();
  std::mt19937 draw(1);
  auto expect_refused = [&](const std::string& bytes, const std::string& what) {
    put(bytes);
    const auto text = error_of<ConfigError>([&] { run.load(path()); });
    EXPECT_THAT(text, HasSubstr(fmt::format("'{}'", path()))) << what;
  };
  for (int i = 0; i < 400; ++i) {
    auto damaged = good;
    const auto at = i < 300 ? draw() % good.size() : draw() % 600;  // includes the header
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << draw() % 8));
    expect_refused(damaged, fmt::format("a bit of byte {}", at));
  }
  for (std::size_t length :
       {std::size_t{0}, std::size_t{5}, std::size_t{8}, std::size_t{100}, good.size() / 2, good.size() - 1})
    expect_refused(good.substr(0, length), fmt::format("{} bytes", length));
  expect_refused(good + "x", "a byte more");
  expect_refused("PK\3\4 a pickle in a zip file", "foreign");
  EXPECT_THAT(error_of<ConfigError>([&] { run.load(path("none")); }), HasSubstr("No such file"));
  expect_same(before, snapshot(*run.net));
  EXPECT_EQ(run.scheduler->last_lr(), lr);
  EXPECT_EQ(run.sampler.next, 4);
}

TEST_F(Checkpoint, a_part_that_refuses_undoes_the_others) {
  torch::manual_seed(1);
  Training run(optimizers()[0].second);
  run.save(path());
  run.step();
  const auto before = snapshot(*run.net);
  const auto scheduler = run.scheduler->state(), scaler = run.scaler.state();
  run.sampler.refuses = true;
  EXPECT_THAT(error_of<ConfigError>([&] { run.load(path()); }),
              AllOf(HasSubstr(path()), HasSubstr("the counter refuses")));
  expect_same(before, snapshot(*run.net));
  EXPECT_EQ(run.scheduler->state(), scheduler);
  EXPECT_EQ(run.scaler.state(), scaler);
}

TEST_F(Checkpoint, a_save_that_fails_leaves_the_earlier_file) {
  Net net;
  save(path(), {.model = net, .values = {{"n", 1}}});
  const auto earlier = contents();
  torch::optim::LBFGS lbfgs(net->parameters());
  EXPECT_THAT(error_of<ConfigError>([&] { save(path(), {.model = net, .optimizer = lbfgs}); }),
              AllOf(HasSubstr(path()), HasSubstr("unsupported optimizer: expected Adam, AdamW")));
  EXPECT_THAT(error_of<ConfigError>([&] { save(path(), {.model = net, .values = {{"bad", "\xff"}}}); }),
              HasSubstr("not valid UTF-8"));
  net->register_buffer("double_complex", torch::zeros({1}, at::kComplexDouble));
  EXPECT_THAT(error_of<ConfigError>([&] { save(path(), {.model = net}); }),
              HasSubstr("'double_complex': the safetensors format does not support dtype ComplexDouble"));
  torch::nn::Sequential sparse(torch::nn::Linear(1, 1));
  sparse->register_buffer("s", torch::zeros({2, 2}).to_sparse());
  EXPECT_THAT(error_of<ConfigError>([&] { save(path(), {.model = sparse}); }),
              HasSubstr("'s': it is sparse"));
  torch::nn::Sequential taken(torch::nn::Linear(1, 1));
  taken->register_buffer("optimizer/x", torch::zeros({1}));
  EXPECT_THAT(error_of<ConfigError>([&] { save(path(), {.model = taken}); }),
              HasSubstr("'optimizer/x' is reserved"));
  EXPECT_EQ(contents(), earlier);
  EXPECT_EQ(files(), 1);
}

TEST_F(Checkpoint, ranks_save_and_load_together) {
  run_threads(3, [&](World& world) {
    torch::nn::Sequential net(torch::nn::Linear(2, 2));
    Counter sampler{10 + world.rank()};
    save(path(),
         {.model = net, .sampler = sampler, .rng = true, .values = {{"n", 1}}, .group = world.group()});
    EXPECT_TRUE(fs::exists(path()));  // on every rank, as soon as save has returned
    sampler.next = 0;
    const auto loaded = load(path(), {.model = net, .sampler = sampler, .rng = true, .group = world.group()});
    EXPECT_EQ(sampler.next, 10 + world.rank());
    EXPECT_EQ(loaded.ranks, 3);
    EXPECT_TRUE(loaded.rng);
  });
  // Load with fewer and with more ranks.
  for (int ranks : {2, 4})
    run_threads(ranks, [&](World& world) {
      Counter sampler;
      const auto group = world.group();
      if (ranks == 4) {
        EXPECT_THAT(error_of<ConfigError>([&] { load(path(), {.sampler = sampler, .group = group}); }),
                    HasSubstr("the file has no sampler of rank 3 (on rank 3)"));
        EXPECT_EQ(sampler.next, 0);
      }
      const auto loaded = load(path(), {.sampler = sampler, .rng = true, .strict = false, .group = group});
      EXPECT_EQ(sampler.next, world.rank() < 3 ? 10 + world.rank() : 0);
      EXPECT_EQ(loaded.rng, world.rank() < 3);
    });
}

TEST_F(Checkpoint, a_state_that_all_ranks_share_fits_any_number_of_ranks) {
  run_threads(2, [&](World& world) {
    Counter sampler{7};
    save(path(), {.sampler = sampler, .group = world.group()});
  });
  run_threads(5, [&](World& world) {
    Counter sampler;
    load(path(), {.sampler = sampler, .group = world.group()});
    EXPECT_EQ(sampler.next, 7);
  });
}

TEST_F(Checkpoint, what_one_rank_cannot_load_no_rank_loads) {
  torch::nn::Sequential first(torch::nn::Linear(2, 2)), second(torch::nn::Linear(2, 2));
  save(path("first"), {.model = first});
  save(path("second"), {.model = second});
  run_threads(3, [&](World& world) {
    auto group = world.group();
    torch::nn::Sequential net(torch::nn::Linear(2, 2));
    const auto before = snapshot(*net);
    auto expect_error = [&](const std::string& file, const std::string& what) {
      EXPECT_THAT(error_of<ConfigError>([&] { load(path(file), {.model = net, .group = group}); }),
                  HasSubstr(what));
      expect_same(before, snapshot(*net));
    };
    expect_error(world.rank() == 2 ? "none" : "first", "No such file or directory (on rank 2)");
    expect_error(world.rank() == 1 ? "second" : "first", "ranks 0 and 1 read different files");
    Counter sampler{1};
    save(path(), {.model = net, .sampler = sampler, .group = group});
    sampler.next = 2;
    sampler.refuses = world.rank() == 1;
    EXPECT_THAT(
        error_of<ConfigError>([&] { load(path(), {.model = net, .sampler = sampler, .group = group}); }),
        HasSubstr("the counter refuses (on rank 1)"));
    EXPECT_EQ(sampler.next, 2);
    // If rank 0 cannot write the file, save fails on every rank.
    EXPECT_THAT(error_of<ConfigError>([&] { save(path("no/folder"), {.model = net, .group = group}); }),
                AllOf(HasSubstr("No such file or directory"), HasSubstr("(on rank 0)")));
  });
}

}  // namespace
}  // namespace lockstep::testing
