// Placed: the devices of modules and of their arguments. LibTorch's meta device serves as a second device on
// any machine.
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "parallel/models.h"
#include "support/errors.h"

namespace lockstep::testing {
namespace {

const at::Device kMeta(at::kMeta);

// Records the device of each argument and keeps the handle of one tensor for inspection.
struct LookImpl : torch::nn::Module {
  using Pair = std::pair<at::Tensor, int>;
  std::vector<at::Device> forward(const at::Tensor& one, const std::vector<at::Tensor>& many,
                                  const std::tuple<at::Tensor, std::string>& tuple,
                                  const std::optional<at::Tensor>& maybe,
                                  const std::map<std::string, Pair>& named, at::TensorList list,
                                  const std::string& text, const int& number) {
    seen = one;
    seen_number = &number;
    EXPECT_EQ(text + std::get<1>(tuple), "ab");
    std::vector<at::Device> devices = {one.device(), std::get<0>(tuple).device()};
    for (const auto& each : many) devices.push_back(each.device());
    for (const auto& each : list) devices.push_back(each.device());
    if (maybe) devices.push_back(maybe->device());
    for (const auto& [name, value] : named) devices.push_back(value.first.device());
    return devices;
  }
  at::Tensor seen;
  const int* seen_number = nullptr;
};
TORCH_MODULE(Look);

template <typename P>
auto look(P& placed, const at::Tensor& t, const int& number) {
  const std::vector<at::Tensor> many = {t, t};
  return placed(t, many, std::tuple(t, std::string("b")), std::optional(t),
                std::map<std::string, LookImpl::Pair>{{"x", {t, 1}}}, at::TensorList(many), "a", number);
}

TEST(Placed, moves_every_tensor_in_the_arguments) {
  Placed<Look> placed(Look(), kMeta);
  EXPECT_EQ(look(placed, torch::ones({2}), 1), std::vector<at::Device>(8, kMeta));
}

TEST(Placed, a_tensor_that_is_there_is_passed_on_as_it_is) {
  for (const char* device : {"cpu", "cpu:0"}) {
    Look module;
    Placed placed(module, at::Device(device));
    EXPECT_EQ(placed.device(), at::Device(at::kCPU));
    const auto t = torch::ones({2});
    const int number = 3;
    EXPECT_EQ(look(placed, t, number), std::vector<at::Device>(8, at::kCPU));
    EXPECT_TRUE(module->seen.is_same(t));
    EXPECT_EQ(module->seen_number, &number);
  }
}

TEST(Placed, moves_the_module_that_it_is_given) {
  // LibTorch cannot move parameters between the CPU and meta.
  const at::Device device(torch::cuda::is_available() ? "cuda:0" : "cpu");
  Mlp model;
  const auto weight = model->first->weight;
  Placed placed(model, at::Device(device.type()));
  EXPECT_EQ(placed.device(), device);
  EXPECT_EQ(placed.get(), model.get());
  EXPECT_TRUE(placed->first->weight.is_same(weight));
  for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.device(), device);
  EXPECT_EQ(placed(torch::ones({4, 6})).device(), device);
}

TEST(Placed, registers_as_the_module_that_it_is) {
  struct Whole : torch::nn::Module {
    Whole() { register_module("a", a), register_module("b", b); }
    Placed<Mlp> a{Mlp(), at::kCPU};
    Placed<Unit<torch::nn::Linear>> b{Unit<torch::nn::Linear>(3, 2), at::kCPU};
  };
  Whole net;
  EXPECT_EQ(net.named_parameters().keys().front(), "a.first.weight");
  EXPECT_EQ(net.named_parameters().keys().back(), "b.bias");
  EXPECT_EQ(net.b(net.a(torch::ones({4, 6}))).sizes(), (at::IntArrayRef{4, 2}));
}

TEST(Placed, takes_a_sequential_and_a_forward_with_defaults) {
  Placed placed(torch::nn::Sequential(torch::nn::Linear(2, 3), torch::nn::ReLU()), at::kCPU);
  EXPECT_EQ(placed(torch::ones({5, 2})).sizes(), (at::IntArrayRef{5, 3}));
  Placed attention(torch::nn::MultiheadAttention(4, 2), at::kCPU);
  const auto x = torch::ones({5, 1, 4});
  EXPECT_EQ(std::get<0>(attention(x, x, x)).sizes(), x.sizes());
}

TEST(Placed, an_undefined_tensor_stays_undefined) { EXPECT_FALSE(detail::on_device({}, kMeta).defined()); }

// A range of itself, and types without tensors.
static_assert(!detail::holds_tensors<std::filesystem::path>());
static_assert(!detail::holds_tensors<std::string>());
static_assert(!detail::holds_tensors<std::vector<bool>>());
static_assert(!detail::holds_tensors<std::tuple<>>());
static_assert(detail::holds_tensors<std::map<int, std::vector<std::optional<at::Tensor>>>>());

TEST(Placed, refuses_a_device_that_does_not_exist) {
  const auto count = static_cast<int>(torch::cuda::device_count());
  Mlp model;
  const auto beyond = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(count));
  const auto text = error_of<ConfigError>([&] { Placed(model, beyond); });
  EXPECT_THAT(text, HasSubstr("no device cuda:" + std::to_string(count) + " for"));
  EXPECT_THAT(text, HasSubstr("available devices: cpu"));
  if (count > 0) {
    EXPECT_THAT(text, HasSubstr("cuda:" + std::to_string(count - 1)));
  }
  EXPECT_THAT(error_of<ConfigError>([&] { Placed(model, at::Device("cpu:1")); }),
              HasSubstr("no device cpu:1 for"));
  if (count == 0) {
    EXPECT_THAT(error_of<ConfigError>([&] { Placed(model, at::kCUDA); }), HasSubstr("no device cuda for"));
  }
  EXPECT_EQ(model->first->weight.device(), at::Device(at::kCPU));
  EXPECT_THAT(error_of<ConfigError>([&] { Placed<Mlp>(Mlp(nullptr), at::kCPU); }), HasSubstr("empty"));
}

TEST(Placed, trains_over_two_devices_as_on_one) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const auto last = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(torch::cuda::device_count() - 1));
  Mlp one, first, second(3, 9, 3), after(3, 9, 3);
  for (auto module : {one, first, second, after}) module->to(torch::kDouble);
  const auto x = numbers(1, {5, 6}).to(torch::kDouble).requires_grad_();
  after(one(x)).square().sum().backward();
  const auto wanted = x.grad().clone();
  x.mutable_grad().reset();

  Placed a(first, at::Device("cuda:0")), b(second, last);
  const auto out = b(a(x));
  EXPECT_EQ(out.device(), last);
  out.square().sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), wanted, 1e-10, 1e-10));
  for (std::size_t i = 0; i < one->parameters().size(); ++i)
    EXPECT_TRUE(at::allclose(first->parameters()[i].grad().cpu(), one->parameters()[i].grad(), 1e-10, 1e-10));
  // A copy from CUDA to the CPU is synchronous.
  Placed back(Mlp(3, 9, 3), at::kCPU);
  EXPECT_TRUE(back(out.to(torch::kFloat).detach()).device().is_cpu());
}

}  // namespace
}  // namespace lockstep::testing
