// Base of the tests of layers and losses: each with every device and type that has kernels, against doubles.
#pragma once

#include <lockstep/kernels/kernels.h>
#include <torch/torch.h>

#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::testing {

using at::Tensor;
using Tensors = std::vector<Tensor>;

struct Place {
  at::DeviceType device;
  at::ScalarType type;
};

class Fused : public ::testing::TestWithParam<Place> {
 protected:
  void SetUp() override {
    if (cuda() && !torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
    if (cuda() && !kernels::available())
      GTEST_SKIP() << "this build has no CUDA kernels, or none for this device";
    torch::manual_seed(3);
  }
  bool cuda() const { return GetParam().device == at::kCUDA; }
  at::TensorOptions options() const { return at::TensorOptions(GetParam().device).dtype(GetParam().type); }
  Tensor numbers(at::IntArrayRef sizes) const { return at::randn(sizes).to(options()).requires_grad_(); }
  // Permitted relative difference of sums and products of numbers near 1, in this type.
  double tolerance() const {
    return GetParam().type == at::kFloat ? 2e-5 : GetParam().type == at::kHalf ? 4e-3 : 3e-2;
  }

  void expect_close(const Tensor& got, const Tensor& wanted, const char* what) const {
    ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
    const auto a = got.detach().cpu().to(at::kDouble), b = wanted.detach().cpu().to(at::kDouble);
    const double scale = std::max(b.abs().max().item<double>(), 1e-6);
    const double off = (a - b).abs().max().item<double>();
    EXPECT_LE(off, tolerance() * scale)
        << what << ": differs by " << off << " where " << scale << " is the largest";
  }

  // Compares results and gradients of both on the same inputs; `plain` gets them in double.
  void compare(const Tensors& inputs, const std::function<Tensors(const Tensors&)>& ours,
               const std::function<Tensors(const Tensors&)>& plain) const {
    Tensors doubles;
    for (const auto& each : inputs)
      doubles.push_back(each.detach().cpu().to(at::kDouble).requires_grad_(each.requires_grad()));
    const auto got = ours(inputs), wanted = plain(doubles);
    ASSERT_EQ(got.size(), wanted.size());
    Tensor got_sum, wanted_sum;
    for (std::size_t i = 0; i < got.size(); ++i) {
      expect_close(got[i], wanted[i], ("result " + std::to_string(i)).c_str());
      const auto weights = at::randn(got[i].sizes()).to(options());
      const auto a = (got[i] * weights).sum(), b = (wanted[i] * weights.cpu().to(at::kDouble)).sum();
      got_sum = got_sum.defined() ? got_sum + a : a;
      wanted_sum = wanted_sum.defined() ? wanted_sum + b : b;
    }
    got_sum.backward(), wanted_sum.backward();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      ASSERT_EQ(inputs[i].grad().defined(), doubles[i].grad().defined()) << "input " << i;
      if (!inputs[i].grad().defined()) continue;
      EXPECT_EQ(inputs[i].grad().scalar_type(), inputs[i].scalar_type());
      expect_close(inputs[i].grad(), doubles[i].grad(), ("gradient " + std::to_string(i)).c_str());
    }
  }
};

inline Tensor optional_at(const Tensors& tensors, std::size_t i) {
  return i < tensors.size() ? tensors[i] : Tensor();
}

inline Tensor targets_of(const Tensor& rows, std::int64_t classes) {
  return at::randint(classes, rows.sizes().slice(0, rows.dim() - 1)).to(rows.device());
}

inline auto places() {
  return ::testing::Values(Place{at::kCPU, at::kFloat}, Place{at::kCUDA, at::kFloat},
                           Place{at::kCUDA, at::kBFloat16}, Place{at::kCUDA, at::kHalf});
}
inline std::string name_of_place(const ::testing::TestParamInfo<Place>& info) {
  return std::string(info.param.device == at::kCUDA ? "Cuda" : "Cpu") + c10::toString(info.param.type);
}

}  // namespace lockstep::testing
