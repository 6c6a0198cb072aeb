// Several models with equal shapes in one group.
#include "support/ranks.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

// Runs both models' backward passes; rank `odd` runs the second one's first.
void in_another_order(World& world, int odd, int steps_in_order) {
  auto group = world.group().split(0, 0, {.name = "two models"});
  torch::nn::Linear first_net(4, 3), second_net(4, 3);
  DistributedDataParallel first(first_net, group), second(second_net, group);
  const auto input = torch::ones({2, 4});
  for (int step = 0; step < steps_in_order; ++step) {
    first_net->zero_grad();
    second_net->zero_grad();
    (first(input).sum() * (1 + world.rank())).backward();
    (second(input).sum() * 100).backward();
    EXPECT_SAME(first_net->bias.grad(), torch::full({3}, 1.0 + world.size()));  // Two samples each.
    EXPECT_SAME(second_net->bias.grad(), torch::full({3}, 200.0));
  }
  auto a = first(input).sum(), b = second(input).sum() * 100;
  if (world.rank() == odd) std::swap(a, b);
  const auto text = error_of<CommError>([&] { a.backward(); });
  EXPECT_THAT(text, AllOf(HasSubstr("of model 1 (torch::nn::LinearImpl)"),
                          HasSubstr("of model 2 (torch::nn::LinearImpl)"), HasSubstr("differ in tag")));
  EXPECT_THROW(group.barrier().wait(), CommError);
  world.group().barrier().wait();
}

TEST(DdpModels, in_another_order_on_a_rank_is_an_error_on_every_rank) {
  LOCKSTEP_NEEDS_RANKS(2);
  on_every_rank([](World& world) {
    for (const int steps : {0, 1, 3}) in_another_order(world, 1, steps);
  });
}

// A destroyed model cannot be confused with another, and a single model is not named in errors.
TEST(DdpModels, a_single_model_is_named_as_before) {
  LOCKSTEP_NEEDS_RANKS(2);
  struct Tags : Observer {
    void started(const Call& call) noexcept override { tags += call.tag + ";"; }
    std::string tags;
  };
  on_every_rank([](World& world) {
    auto group = world.group().split(0);
    DistributedDataParallel model(torch::nn::Linear(4, 3), group);
    auto tags = std::make_shared<Tags>();
    world.add_observer(tags);
    for (int step = 0; step < 2; ++step) model(torch::ones({2, 4})).sum().backward();
    world.remove_observer(tags);
    EXPECT_THAT(tags->tags, AllOf(HasSubstr("ddp bucket 0;"), Not(HasSubstr("of model"))));
  });
}

}  // namespace
}  // namespace lockstep::testing
