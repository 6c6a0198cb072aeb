// The kinds of model that DistributedDataParallel accepts, and code written for each of them.
#include <torch/csrc/jit/api/module.h>

#include "parallel/models.h"
#include "support/ranks.h"

namespace lockstep::testing {
namespace {

// A module without a holder, as in most public programs.
struct PlainNet : torch::nn::Module {
  PlainNet() { register_module("mlp", mlp); }
  PlainNet(const PlainNet&) = delete;
  at::Tensor forward(const at::Tensor& x) { return mlp(x); }
  Mlp mlp;
};

at::Tensor input_of_rank(const World& world, int step = 0) {
  return numbers(40 + 10 * step + world.rank(), {5, 6});
}

// The gradients after a step with the model in a holder.
std::vector<at::Tensor> expected_after_step(World& world) {
  Mlp model;
  DistributedDataParallel ddp(model, world.group());
  ddp(input_of_rank(world)).square().mean().backward();
  return gradients_of(*model);
}

TEST(DdpModelKinds, a_module_object_is_referred_to_and_never_copied) {
  using Ddp = DistributedDataParallel<PlainNet>;
  static_assert(std::is_constructible_v<Ddp, PlainNet&, Group>);
  static_assert(!std::is_constructible_v<Ddp, PlainNet, Group>,
                "a temporary would be gone before the first step");
  static_assert(!std::is_constructible_v<Ddp, const PlainNet&, Group>);
  on_every_rank([](World& world) {
    PlainNet net;
    DistributedDataParallel ddp(net, world.group(), {.check_replicas_every = 1});
    static_assert(std::is_same_v<decltype(ddp), Ddp>);
    EXPECT_EQ(&ddp.module(), &net);
    EXPECT_EQ(&std::as_const(ddp).module(), &net);
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    ddp.join(
        [&] {
          for (int step = 0; step < 2; ++step) {
            optimizer.zero_grad();
            ddp(input_of_rank(world)).square().mean().backward();
            if (step == 0) {
              EXPECT_TRUE(same_bits(gradients_of(net), expected_after_step(world)));
            }
            optimizer.step();
          }
        },
        {.step = [&] { optimizer.step(); }});
    check_replicas(net, world.group());
  });
}

// A training step written for a module holder.
template <typename Model>
std::vector<at::Tensor> step_of(Model& model, const at::Tensor& x) {
  model->train();
  model->to(at::kCPU);
  model->to(at::kFloat);
  model->zero_grad();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  model->forward(x).square().mean().backward();
  optimizer.step();
  model->eval();
  EXPECT_FALSE(model->is_training());
  EXPECT_EQ(model->named_parameters().size(), model->parameters().size());
  EXPECT_EQ(model->named_buffers().size(), model->buffers().size());
  return model->parameters();
}

TEST(DdpModelKinds, code_for_a_holder_takes_it_and_averages) {
  on_every_rank([](World& world) {
    Mlp whole, model;
    const auto gradients = expected_after_step(world);
    DistributedDataParallel ddp(model, world.group());
    auto expected = whole->parameters();
    for (std::size_t i = 0; i < expected.size(); ++i)
      expected[i].set_data(expected[i].data() - 0.1 * gradients[i]);
    EXPECT_TRUE(all_close(step_of(ddp, input_of_rank(world)), expected));
    EXPECT_FALSE(model->is_training());
    EXPECT_EQ(ddp->module()->named_parameters().keys(), ddp->named_parameters().keys());
    EXPECT_EQ(ddp->ptr(), model.ptr());
    PlainNet net;  // Code for a module object.
    DistributedDataParallel other(net, world.group());
    other.train();
    EXPECT_TRUE(net.is_training());
    EXPECT_EQ(other.forward(input_of_rank(world)).size(1), 3);
  });
}

struct TwoResultsImpl : torch::nn::Module {
  TwoResultsImpl() { register_module("mlp", mlp); }
  std::vector<at::Tensor> forward(const at::Tensor& x) { return {mlp(x), x}; }
  Mlp mlp;
};
TORCH_MODULE(TwoResults);

TEST(DdpModelKinds, an_any_module_works_whatever_its_forward_returns) {
  on_every_rank([](World& world) {
    Mlp model;
    torch::nn::AnyModule any(model);
    DistributedDataParallel ddp(any, world.group());
    ddp(input_of_rank(world)).square().mean().backward();
    EXPECT_TRUE(same_bits(gradients_of(*model), expected_after_step(world)));
    TwoResults two;
    DistributedDataParallel other(torch::nn::AnyModule(two), world.group());
    other->forward<std::vector<at::Tensor>>(input_of_rank(world))[0].square().mean().backward();
    EXPECT_TRUE(same_bits(gradients_of(*two), expected_after_step(world)));
    EXPECT_THAT(
        error_of<ConfigError>([&] { DistributedDataParallel(torch::nn::AnyModule(), world.group()); }),
        HasSubstr("module holder is empty"));
  });
}

// The Mlp of models.h as TorchScript.
torch::jit::Module scripted_mlp() {
  Mlp model;
  torch::jit::Module script("Scripted");
  for (const auto& layer : model->named_children()) {
    torch::jit::Module child("Layer");
    for (const auto& item : layer.value()->named_parameters())
      child.register_parameter(item.key(), item.value().detach().clone().requires_grad_(), false);
    script.register_module(layer.key(), child);
  }
  script.register_buffer("calls", at::zeros({1}));
  script.register_attribute("training", c10::BoolType::get(), true);
  script.define(R"(
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.tanh(torch.matmul(x, self.first.weight.t()) + self.first.bias)
        x = torch.tanh(torch.matmul(x, self.second.weight.t()) + self.second.bias)
        return torch.matmul(x, self.third.weight.t()) + self.third.bias
  )");
  return script;
}

TEST(DdpModelKinds, a_torchscript_module_trains_as_the_model_it_was_made_of) {
  on_every_rank([](World& world) {
    auto script = scripted_mlp();
    if (world.rank() > 0) {  // Overwritten by rank 0's values.
      torch::NoGradGuard no_grad;
      for (const auto& parameter : script.parameters()) parameter.zero_();
    }
    DistributedDataParallel ddp(script, world.group(), {.check_replicas_every = 1});
    EXPECT_THAT(ddp->named_parameters().keys(),
                ::testing::UnorderedElementsAre("first.weight", "first.bias", "second.weight", "second.bias",
                                                "third.weight", "third.bias"));
    EXPECT_EQ(ddp->named_buffers().keys(), std::vector<std::string>{"calls"});
    const auto expected = expected_after_step(world);
    for (int step = 0; step < 3; ++step) {
      ddp->zero_grad();
      const auto x = input_of_rank(world);
      const auto loss = step == 0   ? ddp(x).toTensor()
                        : step == 1 ? ddp.forward({x}).toTensor()
                                    : ddp->forward(x).toTensor();
      loss.square().mean().backward();
      EXPECT_TRUE(all_close(gradients_of(*ddp.ptr()), expected)) << step;
    }
    EXPECT_EQ(script.attr("calls").toTensor().item<float>(), 3);
    ddp->eval();
    EXPECT_FALSE(script.is_training());
    EXPECT_THAT(error_of<ConfigError>([&] { DistributedDataParallel(torch::jit::Module(), world.group()); }),
                HasSubstr("module holder is empty"));
  });
}

TEST(DdpModelKinds, a_no_sync_guard_can_be_moved_and_made_for_nothing) {
  on_every_rank([](World& world) {
    Mlp model, plain;
    DistributedDataParallel ddp(model, world.group());
    for (int step = 0; step < 4; ++step) {
      std::optional guard(ddp.no_sync(step < 2));
      if (step == 1) {
        auto moved = std::move(*guard);  // Still one guard.
        guard.reset();
        guard = std::move(moved);
      }
      if (step == 3) guard = ddp.no_sync(), guard = ddp.no_sync(false);  // The first guard has ended.
      model->zero_grad();
      plain->zero_grad();
      const auto x = input_of_rank(world);
      ddp(x).square().mean().backward();
      plain(x).square().mean().backward();
      const bool local = same_bits(gradients_of(*model), gradients_of(*plain));
      EXPECT_EQ(local, step < 2 || world.size() == 1) << step;
      guard.reset();
    }
  });
}

}  // namespace
}  // namespace lockstep::testing
