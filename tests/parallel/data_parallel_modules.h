// Modules for the tests of DataParallel, and comparisons.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "support/errors.h"

namespace lockstep::testing {

inline std::vector<at::Device> cpus(int count) {
  return std::vector<at::Device>(static_cast<std::size_t>(count), at::kCPU);
}

inline std::vector<at::Tensor> grads(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const auto& each : module.parameters())
    result.push_back(each.grad().defined() ? each.grad().clone() : at::Tensor());
  return result;
}

// Gradients of the loss only.
template <typename Holder>
std::vector<at::Tensor> gradients_of(Holder& module, const at::Tensor& loss) {
  module->zero_grad();
  loss.backward();
  auto result = grads(*module);
  module->zero_grad();
  return result;
}

inline void expect_close(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected,
                         double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].defined(), expected[i].defined()) << i;
    if (!found[i].defined()) continue;
    EXPECT_TRUE(torch::allclose(found[i], expected[i], tolerance, tolerance)) << "tensor " << i << ": got\n"
                                                                              << found[i] << "\nexpected\n"
                                                                              << expected[i];
  }
}

struct MlpImpl : torch::nn::Cloneable<MlpImpl> {
  MlpImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(6, 8));
    second = register_module("second", torch::nn::Linear(8, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Mlp);

// Without clone(), like most programs' modules.
struct PlainImpl : torch::nn::Module {
  explicit PlainImpl(int width = 8)
      : first(register_module("first", torch::nn::Linear(6, width))),
        second(register_module("second", torch::nn::Linear(width, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first, second;
};
TORCH_MODULE(Plain);

// Records each replica's state; row 0 of its piece identifies the replica.
struct WideImpl : torch::nn::Cloneable<WideImpl> {
  WideImpl() { reset(); }
  void reset() override { layer = register_module("layer", torch::nn::Linear(64, 600)); }
  at::Tensor forward(const at::Tensor& x) {
    if (look) look(*this, x[0][0].item<int>());
    return torch::tanh(layer(x));
  }
  torch::nn::Linear layer{nullptr};
  std::function<void(WideImpl&, int)> look;
};
TORCH_MODULE(Wide);

// Returns its input and the input's length.
struct WatchImpl : torch::nn::Cloneable<WatchImpl> {
  void reset() override {}
  std::tuple<at::Tensor, at::Tensor> forward(at::Tensor x) { return {x, torch::tensor({x.size(0)})}; }
};
TORCH_MODULE(Watch);

// A parameter and an input that only some replicas use.
struct BranchImpl : torch::nn::Cloneable<BranchImpl> {
  BranchImpl() { reset(); }
  void reset() override {
    scale = register_parameter("scale", torch::ones({1}));
    other = register_parameter("other", torch::ones({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x.sum().item<float>() > 0 ? x * scale : x.detach() * other;
  }
  at::Tensor scale, other;
};
TORCH_MODULE(Branch);

// Replicas that wait for each other, with a deadline: succeeds only if they run in parallel.
struct Meetings {
  int size = 0;
  std::atomic<int> met_in_forward = 0, met_in_backward = 0;
  std::mutex mutex;
  std::condition_variable changed;
  int waiting = 0;
  void store(int count) { size = count; }
  bool meet() {
    std::unique_lock lock(mutex);
    ++waiting;
    changed.notify_all();
    const int goal = (waiting + size - 1) / size * size;
    return changed.wait_for(lock, std::chrono::seconds(60), [&] { return waiting >= goal; });
  }
};
struct MeetInBackward : torch::autograd::Function<MeetInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t meetings) {
    context->saved_data["meetings"] = meetings;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto* meetings = reinterpret_cast<Meetings*>(context->saved_data["meetings"].toInt());
    meetings->met_in_backward += meetings->meet();
    return {gradients[0], at::Tensor()};
  }
};
struct MeetingImpl : torch::nn::Cloneable<MeetingImpl> {
  MeetingImpl() { reset(); }
  void reset() override { scale = register_parameter("scale", torch::ones({1})); }
  at::Tensor forward(const at::Tensor& x) {
    number->met_in_forward += number->meet();
    return MeetInBackward::apply(x * scale, reinterpret_cast<std::int64_t>(number.get()));
  }
  std::shared_ptr<Meetings> number = std::make_shared<Meetings>();
  at::Tensor scale;
};
TORCH_MODULE(Meeting);

struct Pain : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct HurtInBackward : torch::autograd::Function<HurtInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw Pain("backward hurts");
  }
};
// Fails in different ways, selected by the input.
struct TouchyImpl : torch::nn::Cloneable<TouchyImpl> {
  TouchyImpl() { reset(); }
  void reset() override { scale = register_parameter("scale", torch::ones({1})); }
  at::Tensor forward(const at::Tensor& x) {
    switch (x[0].item<int>()) {
      case 1: throw Pain("the input hurts");
      case 2: return torch::matmul(x, torch::ones({7, 7}));
      case 3: throw 3;
      case 4: return HurtInBackward::apply(x * scale);
      default: return x * scale;
    }
  }
  at::Tensor scale;
};
TORCH_MODULE(Touchy);

// A DataParallel inside every replica.
struct NestedImpl : torch::nn::Cloneable<NestedImpl> {
  NestedImpl() { reset(); }
  void reset() override {
    inner = register_module("inner", Mlp());
    parallel.reset();
  }
  at::Tensor forward(const at::Tensor& x) {
    if (!parallel) parallel.emplace(inner, cpus(2));
    return (*parallel)(x);
  }
  Mlp inner{nullptr};
  std::optional<DataParallel<MlpImpl>> parallel;
};
TORCH_MODULE(Nested);

}  // namespace lockstep::testing
