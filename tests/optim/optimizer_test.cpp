// Adam, AdamW and SGD: the operations of Python's optimizers in sequence, and everything that accepts a
// LibTorch optimizer.
#include <functional>
#include <sstream>

#include <ATen/ScalarOps.h>
#include <ATen/Version.h>
#include <c10/core/CPUAllocator.h>
#include <lockstep/lockstep.h>
#include <lockstep/optim/detail/cpu_update.h>
#include <torch/torch.h>

#include "optim/saved.h"
#include "support/errors.h"

namespace lockstep::testing {
namespace {

using torch::Tensor;

// The tensor that a Python number becomes in an operation.
Tensor python(double number) { return at::native::wrapped_scalar_tensor(number); }

// An independent implementation of Python's single-tensor path.
struct PythonAdam {
  AdamWOptions options;
  bool decoupled;
  Tensor m, v, most;
  int step = 0;

  void update(Tensor p, Tensor g) {
    torch::NoGradGuard no_grad;
    if (!m.defined()) m = torch::zeros_like(p), v = torch::zeros_like(p), most = torch::zeros_like(p);
    const auto [b1, b2] = options.betas;
    ++step;
    if (options.maximize) g = -g;
    if (options.weight_decay != 0 && decoupled) p.mul_(python(1 - options.lr * options.weight_decay));
    if (options.weight_decay != 0 && !decoupled) g = g.add(p, options.weight_decay);
    m.lerp_(g, 1 - b1);
    v.mul_(python(b2)).addcmul_(g, g, 1 - b2);
    if (options.amsgrad) torch::maximum_out(most, most, v);
    const double bc1 = 1 - std::pow(b1, step), bc2 = 1 - std::pow(b2, step);
    const auto d = ((options.amsgrad ? most : v).sqrt() / std::pow(bc2, 0.5)).add_(options.eps);
    p.addcdiv_(m, d, -(options.lr / bc1));
  }
};

struct PythonSGD {
  SGDOptions options;
  Tensor buffer;

  void update(Tensor p, Tensor g) {
    torch::NoGradGuard no_grad;
    if (options.maximize) g = -g;
    if (options.weight_decay != 0) g = g.add(p, options.weight_decay);
    if (options.momentum != 0) {
      if (!buffer.defined())
        buffer = g.clone();
      else
        buffer.mul_(python(options.momentum)).add_(g, 1 - options.dampening);
      g = options.nesterov ? g.add(buffer, options.momentum) : buffer;
    }
    p.add_(g, -options.lr);
  }
};

// Compares bit by bit, but treats all NaNs as equal.
bool same(const Tensor& a, const Tensor& b) {
  auto x = a.detach().contiguous(), y = b.detach().contiguous();
  if (x.is_complex() && y.is_complex()) x = torch::view_as_real(x), y = torch::view_as_real(y);
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         torch::allclose(x.to(torch::kDouble), y.to(torch::kDouble), 0, 0, /*equal_nan=*/true);
}

Tensor gradient_like(const Tensor& p, int kind) {
  auto g = torch::randn_like(p.detach());
  if (kind == 1) g = g * 1e-22;  // squares are denormals
  if (kind == 2) g = g * 1e18;
  if (kind < 3 || g.numel() < 3) return g;
  auto odd = g.contiguous().clone();
  odd.view({-1})[kind - 3] =
      kind == 3 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  return g.copy_(odd);
}

// Parameters of many shapes, layouts and dtypes; all are leaves.
std::vector<Tensor> parameters() {
  std::vector<Tensor> all;
  for (std::int64_t n : {0, 1, 2, 7, 8, 15, 16, 17, 33, 100, 1001}) all.push_back(torch::randn({n}));
  all.push_back(torch::randn({}));
  all.push_back(torch::randn({64, 257}));
  all.push_back(torch::randn({8, 4, 3, 3}).contiguous(torch::MemoryFormat::ChannelsLast));
  all.push_back(torch::randn({6, 10}).t());
  all.push_back(torch::randn({20, 20}).slice(1, 0, 20, 2));  // not dense
  all.push_back(torch::randn({33}, torch::kDouble));
  all.push_back(torch::randn({33}).to(torch::kBFloat16));
  all.push_back(torch::randn({33}).to(torch::kHalf));
  all.push_back(torch::randn({5}, torch::kComplexFloat));
  for (auto& p : all) p = p.detach().requires_grad_();
  return all;
}

std::vector<Tensor> copies(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> result;
  for (const auto& t : tensors) {
    auto copy = torch::empty_strided(t.sizes(), t.strides(), t.options()).detach();
    copy.copy_(t.detach());
    result.push_back(copy.requires_grad_());
  }
  return result;
}

template <typename Optimizer, typename Reference, typename Options>
void expect_the_references_bits(Options options, std::function<Reference()> make) {
  torch::manual_seed(11);
  auto ours = parameters();
  const auto theirs = copies(ours);
  std::vector<Reference> references;
  for (std::size_t i = 0; i < ours.size(); ++i) references.push_back(make());
  Optimizer optimizer(ours, options);
  for (int step = 0; step < 12; ++step) {
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if ((step + static_cast<int>(i)) % 5 == 4) {  // sometimes there is no gradient
        ours[i].mutable_grad() = Tensor();
        continue;
      }
      const int kind = step < 8 ? 0 : step - 7;
      const bool half = ours[i].scalar_type() == torch::kHalf || ours[i].is_complex();
      const auto g = gradient_like(ours[i], half ? 0 : kind);
      ours[i].mutable_grad() = g;
      references[i].update(theirs[i].detach(), g);
    }
    optimizer.step();
    for (std::size_t i = 0; i < ours.size(); ++i)
      ASSERT_TRUE(same(ours[i], theirs[i]))
          << "step " << step << ", parameter " << i << " " << ours[i].sizes();
  }
}

// Python handles complex numbers as views of their real parts, which PythonAdam's formula does not cover.
template <typename Optimizer, typename Options>
void expect_adams_bits(Options options, bool decoupled) {
  const AdamWOptions as{options.lr,           options.betas,   options.eps,
                        options.weight_decay, options.amsgrad, options.maximize};
  struct Reference : PythonAdam {
    void update(Tensor p, Tensor g) {
      if (!p.is_complex()) return PythonAdam::update(p, g);
      if (this->options.weight_decay != 0 && !this->decoupled) {
        // weight decay is applied before taking the views
        auto decay = this->options.weight_decay;
        auto with = (this->options.maximize ? -g : g).add(p, decay);
        auto other = this->options;
        this->options.weight_decay = 0, this->options.maximize = false;
        PythonAdam::update(torch::view_as_real(p), torch::view_as_real(with));
        this->options = other;
        return;
      }
      PythonAdam::update(torch::view_as_real(p), torch::view_as_real(g));
    }
  };
  expect_the_references_bits<Optimizer, Reference>(options,
                                                   [&] { return Reference{{as, decoupled, {}, {}, {}}}; });
}

// Without fused multiply-add, LibTorch's kernels round differently, and LibTorch's operations are used
// instead.
TEST(Optimizers, the_sweep_is_used_where_it_has_libtorchs_bits) {
  const bool fma = at::get_cpu_capability() == "AVX2" || at::get_cpu_capability() == "AVX512";
  if (at::get_cpu_capability() != "DEFAULT" && !fma) GTEST_SKIP() << "a CPU of another kind";
  EXPECT_EQ(detail::adam_sweep_is_exact(), fma);
  EXPECT_EQ(detail::sgd_sweep_is_exact(), fma);
}

TEST(Optimizers, adam_does_pythons_operations_to_the_bit) {
  expect_adams_bits<Adam>(AdamOptions{}, false);
  expect_adams_bits<Adam>(AdamOptions{.lr = 0.1, .weight_decay = 0.3}, false);
  expect_adams_bits<Adam>(AdamOptions{.betas = {0.2, 0.9}, .amsgrad = true}, false);
  expect_adams_bits<Adam>(AdamOptions{.eps = 1e-3, .weight_decay = 0.1, .amsgrad = true, .maximize = true},
                          false);
}

TEST(Optimizers, adamw_does_pythons_operations_to_the_bit) {
  expect_adams_bits<AdamW>(AdamWOptions{}, true);
  expect_adams_bits<AdamW>(AdamWOptions{.lr = 0.1, .weight_decay = 0, .maximize = true}, true);
  expect_adams_bits<AdamW>(AdamWOptions{.betas = {0.5, 0.95}, .amsgrad = true}, true);
}

TEST(Optimizers, sgd_does_pythons_operations_to_the_bit) {
  for (const auto& options : {SGDOptions{.lr = 0.1}, SGDOptions{.lr = 0.1, .momentum = 0.9},
                              SGDOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1},
                              SGDOptions{.momentum = 0.9, .weight_decay = 0.1, .nesterov = true},
                              SGDOptions{.weight_decay = 1, .maximize = true}})
    expect_the_references_bits<SGD, PythonSGD>(options, [&] { return PythonSGD{options, {}}; });
}

TEST(Optimizers, the_number_of_threads_does_not_change_a_bit) {
  const int before = torch::get_num_threads();
  std::vector<Tensor> results[2];
  for (int threads : {1, 2}) {
    torch::set_num_threads(threads);
    torch::manual_seed(5);
    std::vector<Tensor> ps;
    for (std::int64_t n : {300'001, 7, 0, 90'000, 65'536}) ps.push_back(torch::randn({n}).requires_grad_());
    Adam adam(ps, {.lr = 0.01, .amsgrad = true});
    SGD sgd(ps, {.lr = 0.01, .momentum = 0.9});
    for (int step = 0; step < 3; ++step) {
      for (auto& p : ps) p.mutable_grad() = torch::randn_like(p);
      adam.step();
      sgd.step();
    }
    results[threads - 1] = ps;
  }
  torch::set_num_threads(before);
  for (std::size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(same(results[0][i], results[1][i])) << i;
}

template <typename Optimizer, typename Options>
void expect_fused_close(Options options) {
  torch::manual_seed(3);
  std::vector<Tensor> single;
  for (const auto& p : parameters())
    if (p.is_floating_point() && p.element_size() > 2) single.push_back(p);
  const auto fused = copies(single);
  Optimizer a(single, options);
  options.implementation = Implementation::fused;
  Optimizer b(fused, options);
  for (int step = 0; step < 20; ++step) {
    for (std::size_t i = 0; i < single.size(); ++i) {
      if (step == 3 && i % 2) continue;  // step counts differ
      const auto g = torch::randn_like(single[i].detach());
      single[i].mutable_grad() = g;
      fused[i].mutable_grad() = g.clone();
    }
    a.step();
    b.step();
  }
  for (std::size_t i = 0; i < single.size(); ++i)
    EXPECT_TRUE(torch::allclose(single[i], fused[i], 1e-4, 1e-6)) << i << "\n" << single[i] - fused[i];
}

TEST(Optimizers, fused_is_the_same_within_rounding) {
  expect_fused_close<Adam>(AdamOptions{.lr = 0.01, .weight_decay = 0.1});
  expect_fused_close<Adam>(AdamOptions{.lr = 0.01, .amsgrad = true, .maximize = true});
  expect_fused_close<AdamW>(AdamWOptions{.lr = 0.01, .weight_decay = 0.1});
  expect_fused_close<SGD>(SGDOptions{.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
  expect_fused_close<SGD>(SGDOptions{.lr = 0.01, .momentum = 0.9, .dampening = 0.5});
  expect_fused_close<SGD>(SGDOptions{.lr = 0.01});
}

TEST(Optimizers, fused_kinds_of_parameters_may_be_at_different_steps) {
  torch::manual_seed(6);
  std::vector<Tensor> single;
  for (auto dtype : {at::kFloat, at::kDouble, at::kFloat, at::kDouble})
    single.push_back(torch::randn({9}, dtype).requires_grad_());
  const auto fused = copies(single);
  Adam a(single, {.lr = 0.1}), b(fused, {.lr = 0.1, .implementation = Implementation::fused});
  for (int step = 0; step < 6; ++step) {
    for (std::size_t i = 0; i < single.size(); ++i) {
      single[i].mutable_grad() = step < 3 && i < 2 ? Tensor() : torch::randn_like(single[i].detach());
      fused[i].mutable_grad() = single[i].grad();
    }
    a.step();
    b.step();
  }
  for (std::size_t i = 0; i < single.size(); ++i)
    EXPECT_TRUE(torch::allclose(single[i], fused[i], 1e-5, 1e-6)) << i;
}

TEST(Optimizers, groups_have_options_of_their_own) {
  auto a = torch::ones({3}).requires_grad_(), b = torch::ones({3}).requires_grad_(),
       c = torch::ones({3}).requires_grad_(), d = torch::ones({3}).requires_grad_();
  // 1e-3 is also the default: LibTorch would treat it as unset and use 0.5.
  SGD optimizer({SGD::group({a}, {.lr = 1e-3}), SGD::group({b}, {.lr = 0.25, .maximize = true}),
                 torch::optim::OptimizerParamGroup({c})},
                {.lr = 0.5});
  optimizer.add_param_group(
      torch::optim::OptimizerParamGroup({d}, std::make_unique<torch::optim::SGDOptions>(0.125)));
  for (auto& p : {a, b, c, d}) p.mutable_grad() = torch::ones({3});
  optimizer.step();
  EXPECT_FLOAT_EQ(a[0].item<float>(), 1 - 1e-3f);
  EXPECT_FLOAT_EQ(b[0].item<float>(), 1.25);
  EXPECT_FLOAT_EQ(c[0].item<float>(), 0.5);
  EXPECT_FLOAT_EQ(d[0].item<float>(), 0.875);
  EXPECT_EQ(optimizer.options(1).lr, 0.25);
  EXPECT_TRUE(optimizer.options(1).maximize);
  EXPECT_THAT(error_of<ConfigError>([&] { optimizer.options(4); }), HasSubstr("the optimizer has 4 groups"));
}

TEST(Optimizers, code_written_for_libtorchs_optimizers_works) {
  auto p = torch::ones({2}).requires_grad_();
  Adam adam({p}, {.lr = 0.5});
  torch::optim::Optimizer& optimizer = adam;
  auto& options = static_cast<torch::optim::AdamOptions&>(optimizer.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.5);
  options.lr(0.25).betas({0.5, 0.9});
  EXPECT_EQ(adam.options().lr, 0.25);
  EXPECT_EQ(adam.options().betas.first, 0.5);
  optimizer.param_groups()[0].options().set_lr(0.125);
  EXPECT_EQ(adam.options().lr, 0.125);

  torch::optim::StepLR schedule(optimizer, 1, 0.5);
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    const auto loss = optimizer.step([&] {
      auto value = p.square().sum();
      value.backward();
      return value;
    });
    EXPECT_TRUE(loss.defined());
    schedule.step();
  }
  EXPECT_EQ(adam.options().lr, 0.125 / 4);
  EXPECT_EQ(static_cast<torch::optim::AdamParamState&>(*optimizer.state().at(p.unsafeGetTensorImpl())).step(),
            3);
  EXPECT_EQ(AdamW({p}).options().weight_decay, 1e-2);
}

template <typename From, typename To, typename FromOptions, typename ToOptions>
void expect_saved_state_to_carry_over(FromOptions from_options, ToOptions to_options) {
  torch::manual_seed(2);
  auto p = torch::randn({40}).requires_grad_(), q = torch::randn({3, 3}).requires_grad_();
  From from(std::vector<Tensor>{p, q}, from_options);
  auto gradients = [](auto& ps, int seed) {
    torch::manual_seed(seed);
    for (auto& each : ps) each.mutable_grad() = torch::randn_like(each);
  };
  std::vector<Tensor> ps = {p, q};
  for (int i = 0; i < 5; ++i) gradients(ps, i), from.step();
  auto qs = copies(ps);
  To to(qs, to_options);
  std::istringstream in(saved(from));
  torch::load(to, in);
  for (int i = 5; i < 9; ++i) {
    gradients(ps, i), from.step();
    gradients(qs, i), to.step();
  }
  EXPECT_TRUE(same(p, qs[0]) && same(q, qs[1]));
}

TEST(Optimizers, torch_save_carries_state_and_options_over) {
  expect_saved_state_to_carry_over<Adam, Adam>(AdamOptions{.lr = 0.1, .amsgrad = true, .maximize = true},
                                               AdamOptions{});
  expect_saved_state_to_carry_over<AdamW, AdamW>(AdamWOptions{.lr = 0.1, .betas = {0.8, 0.9}},
                                                 AdamWOptions{});
  expect_saved_state_to_carry_over<SGD, SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9}, SGDOptions{});
}

TEST(Optimizers, libtorchs_saved_optimizers_load_into_ours_and_ours_into_libtorchs) {
  auto p = torch::ones({4}).requires_grad_();
  p.mutable_grad() = torch::ones({4});
  torch::optim::AdamW theirs({p}, torch::optim::AdamWOptions(0.3).weight_decay(0.2));
  theirs.step();
  AdamW ours({p}, {.implementation = Implementation::fused});
  std::istringstream in(saved(theirs));
  torch::load(ours, in);
  EXPECT_EQ(ours.options().lr, 0.3);
  EXPECT_EQ(ours.options().weight_decay, 0.2);
  EXPECT_EQ(ours.options().implementation, Implementation::fused);  // not taken from the checkpoint
  ours.step();
  torch::optim::AdamW back({p}, torch::optim::AdamWOptions());
  std::istringstream again(saved(ours));
  torch::load(back, again);
  EXPECT_EQ(static_cast<torch::optim::AdamWParamState&>(*back.state().at(p.unsafeGetTensorImpl())).step(), 2);
}

TEST(Optimizers, what_cannot_be_meant_is_an_error) {
  auto p = torch::ones({2}).requires_grad_();
  EXPECT_THAT(error_of<ConfigError>([&] { Adam({p}, {.lr = -1}); }),
              HasSubstr("lr: expected 0 or more, got -1"));
  EXPECT_THAT(error_of<ConfigError>([&] { Adam({p}, {.lr = NAN}); }), HasSubstr("got nan"));
  EXPECT_THAT(error_of<ConfigError>([&] { Adam({p}, {.betas = {0.9, 1}}); }), HasSubstr("got 0.9 and 1"));
  EXPECT_THAT(error_of<ConfigError>([&] { AdamW({p}, {.eps = -1}); }), HasSubstr("eps"));
  EXPECT_THAT(error_of<ConfigError>([&] { SGD({p}, {.nesterov = true}); }),
              HasSubstr("nesterov needs momentum"));
  EXPECT_THAT(error_of<ConfigError>([&] { SGD({p, p}); }), HasSubstr("passed to the optimizer twice"));
  EXPECT_THAT(error_of<ConfigError>([&] { SGD(std::vector<Tensor>{}); }), HasSubstr("no parameters"));
  EXPECT_THAT(error_of<ConfigError>([&] {
                SGD optimizer(
                    {torch::optim::OptimizerParamGroup({p}, std::make_unique<torch::optim::AdamOptions>())});
              }),
              HasSubstr("a different optimizer"));
}

TEST(Optimizers, sgd_takes_sparse_gradients_and_adam_refuses_them) {
  auto weight = torch::ones({5, 2}).requires_grad_();
  auto loss = [&] {
    return torch::embedding(weight, torch::tensor({1, 3, 1}), -1, false, /*sparse=*/true).sum();
  };
  loss().backward();
  ASSERT_TRUE(weight.grad().is_sparse());
  auto other = torch::ones({2}).requires_grad_();
  other.mutable_grad() = torch::ones({2});
  EXPECT_THAT(error_of<ConfigError>([&] { Adam({other, weight}).step(); }), HasSubstr("sparse gradients"));
  EXPECT_TRUE(torch::equal(other, torch::ones({2})));
  for (auto implementation : {Implementation::single, Implementation::fused})
    SGD({weight}, {.lr = 0.25, .implementation = implementation}).step();
  EXPECT_TRUE(torch::equal(weight.detach().select(1, 0), torch::tensor({1.f, 0.f, 1.f, 0.5f, 1.f})));
}

TEST(Optimizers, parameters_without_gradient_stay_and_get_no_state) {
  auto p = torch::ones({2}).requires_grad_(), q = torch::ones({2}).requires_grad_();
  Adam optimizer({p, q});
  p.mutable_grad() = torch::ones({2});
  optimizer.step();
  EXPECT_EQ(optimizer.state().size(), 1);
  EXPECT_TRUE(torch::equal(q, torch::ones({2})));
  EXPECT_FALSE(torch::equal(p, torch::ones({2})));
}

// An allocator that runs out of memory after a number of allocations.
class ScarceMemory final : public c10::Allocator {
 public:
  explicit ScarceMemory(int left) : left_(left), before_(c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this, /*priority=*/100);
  }
  ~ScarceMemory() override { c10::SetCPUAllocator(before_, 100); }
  c10::DataPtr allocate(std::size_t bytes) override {
    if (left_-- == 0) TORCH_CHECK_WITH(OutOfMemoryError, false, "no more memory");
    return before_->allocate(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    before_->copy_data(to, from, bytes);
  }
  bool was_enough() const { return left_ >= 0; }

 private:
  int left_;
  c10::Allocator* before_;
};

std::int64_t count_of(const torch::optim::OptimizerParamState& state) {
  if (const auto* adam = dynamic_cast<const torch::optim::AdamParamState*>(&state)) return adam->step();
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWParamState*>(&state)) return adamw->step();
  return 0;
}

// Fails the step at each allocation in turn and repeats it: the result must not change.
template <typename Optimizer, typename Options>
void expect_failed_steps_to_leave_no_trace(const Options& options, at::ScalarType dtype) {
  constexpr bool counts = !std::is_same_v<Optimizer, SGD>;
  auto parameters = [&] {
    std::vector<Tensor> all;
    torch::manual_seed(5);
    for (std::int64_t n : {3, 40, 1000}) all.push_back(torch::randn({n}).to(dtype).requires_grad_());
    return all;
  };
  auto set_gradients = [&](const std::vector<Tensor>& all, int seed) {
    torch::manual_seed(seed);
    for (auto p : all) p.mutable_grad() = torch::randn_like(p.detach());
  };
  for (int failing_step = 0; failing_step < 2; ++failing_step) {
    int allocations = 0;
    for (bool enough = false; !enough; ++allocations) {
      auto expected = parameters(), actual = parameters();
      Optimizer undisturbed(expected, options), optimizer(actual, options);
      for (int step = 0; step < 3; ++step) {
        set_gradients(expected, step);
        set_gradients(actual, step);
        undisturbed.step();
        if (step == failing_step) {
          ScarceMemory memory(allocations);
          try {
            optimizer.step();
          } catch (const c10::OutOfMemoryError&) {
          }
          enough = memory.was_enough();
        }
        if (step == failing_step && enough) continue;
        for (const auto& [parameter, state] : optimizer.state())
          ASSERT_EQ(count_of(*state), counts ? step : 0) << "allocation " << allocations;
        optimizer.step();
      }
      for (std::size_t i = 0; i < actual.size(); ++i)
        ASSERT_TRUE(torch::equal(actual[i], expected[i]))
            << "parameter " << i << ", step " << failing_step << ", allocation " << allocations;
      for (const auto& [parameter, state] : optimizer.state()) ASSERT_EQ(count_of(*state), counts ? 3 : 0);
    }
    EXPECT_TRUE(allocations > 1 || failing_step > 0);  // the first step creates the state
  }
}

TEST(Optimizers, a_step_that_fails_for_lack_of_memory_can_be_made_again) {
  const AdamWOptions adamw{.weight_decay = 0.1, .amsgrad = true};
  const SGDOptions sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0.5};
  if (detail::adam_sweep_is_exact() && detail::sgd_sweep_is_exact()) {  // otherwise operations run at once
    expect_failed_steps_to_leave_no_trace<AdamW>(adamw, torch::kFloat);
    expect_failed_steps_to_leave_no_trace<SGD>(sgd, torch::kFloat);
    auto adamw_masters = adamw;
    auto sgd_masters = sgd;
    adamw_masters.master_weights = sgd_masters.master_weights = true;
    expect_failed_steps_to_leave_no_trace<AdamW>(adamw_masters, torch::kBFloat16);
    expect_failed_steps_to_leave_no_trace<SGD>(sgd_masters, torch::kBFloat16);
  }
  auto adamw_fused = adamw;
  auto sgd_fused = sgd;
  adamw_fused.implementation = sgd_fused.implementation = Implementation::fused;
  expect_failed_steps_to_leave_no_trace<AdamW>(adamw_fused, torch::kFloat);
  expect_failed_steps_to_leave_no_trace<SGD>(sgd_fused, torch::kFloat);
}

// Operations run at once: what they wrote remains, but nothing is counted.
TEST(Optimizers, a_step_that_fails_is_not_counted) {
  auto good = torch::ones({3}, torch::kDouble).requires_grad_();
  auto bad = torch::ones({3}, torch::kDouble).requires_grad_();
  Adam optimizer({good, bad});
  good.mutable_grad() = torch::ones({3}, torch::kDouble);
  bad.mutable_grad() = torch::ones({2}, torch::kDouble);
  EXPECT_THROW(optimizer.step(), c10::Error);
  auto count = [&](const Tensor& p) { return count_of(*optimizer.state().at(p.unsafeGetTensorImpl())); };
  EXPECT_EQ(count(good), 0);
  EXPECT_EQ(count(bad), 0);
  bad.mutable_grad() = torch::ones({3}, torch::kDouble);
  optimizer.step();
  EXPECT_EQ(count(good), 1);
  EXPECT_EQ(count(bad), 1);
}

}  // namespace
}  // namespace lockstep::testing
