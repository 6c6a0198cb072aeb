// An optimizer whose work and state the ranks share: each sums its part of the gradients, updates that part
// of the weights, with state for it alone, and all get all weights (ZeRO, stage 1). The bits of the plain
// optimizer after DistributedDataParallel, where the transport sums in one order (shm, threads, shm+gloo).
//
//   lockstep::DistributedDataParallel ddp(model, world.group());
//   lockstep::DistributedOptimizer<lockstep::AdamW> optimizer(ddp, {.lr = 3e-4});
//   loss.backward();                 // each rank has the average of its part; p.grad() cannot be read
//   optimizer.clip_grad_norm(1.0);   // not lockstep::clip_grad_norm(model->parameters(), ...): see p.grad()
//   optimizer.step();                // and the gradients are gone
//
// It is an AdamW, Adam or SGD, of ours or of torch::optim, or a torch::optim::RMSprop or Adagrad, or an
// element-wise optimizer of your own (elementwise.h): param_groups, schedulers, GradScaler, lockstep::save and load, torch::save as
// with those. What its groups hold are this rank's parts, and state and masters are of those:
// optimizer.master(optimizer.param_groups()[0].params()[0]). It is saved whole, and loaded with any number of
// ranks. After a step that a GradScaler leaves out the gradients are gone, too. A second backward before
// step() adds to them; optimizer.zero_grad() drops them, model->zero_grad() does not. Every rank makes it,
// after its DistributedDataParallel, and makes the same steps. When it is gone, gradients are averaged as
// before.
//
// Throws ConfigError for a parameter that the DistributedDataParallel does not reduce, sparse gradients,
// static_graph, capturable, a second one for the same DistributedDataParallel, parameters that were moved
// since (torch::load of the model does that, lockstep::load does not), step() with gradients that were not
// averaged. CommError as Group does.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <lockstep/base/span.h>
#include <lockstep/optim/adam.h>
#include <lockstep/optim/clip_grad.h>
#include <lockstep/optim/elementwise.h>
#include <lockstep/optim/sgd.h>
#include <lockstep/parallel/ddp.h>

namespace lockstep {

struct DistributedOptimizerOptions {
  // One copy of the weights for all ranks, where all are on one host ("shm"); ConfigError elsewhere. A module
  // that writes to its parameters in a forward that trains is refused by name. Whoever writes to them
  // otherwise does so on one rank, between barriers. Buffers stay each rank's own.
  bool share_weights = false;
};

namespace detail {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

// What does not depend on the kind of optimizer.
class ShardedOptimizer {
 public:
  ShardedOptimizer(DdpBase& ddp, DistributedOptimizerOptions options);
  ShardedOptimizer(const ShardedOptimizer&) = delete;  // nor moved: its slices are one object's
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;
  virtual ~ShardedOptimizer();

  // As lockstep::clip_grad_norm, of all gradients, on the CPU: powers of blocks of 4096 elements, each summed
  // in double, are added by a tree, so that the norm has the same bits with any number of ranks.
  at::Tensor clip_grad_norm(double max_norm, ClipGradNormOptions options = {});

  Group& group() const;
  // Over the model's parameters, with this one's options and without state.
  virtual std::unique_ptr<torch::optim::Optimizer> make_whole() = 0;
  // With all of the state. Every rank.
  std::unique_ptr<torch::optim::Optimizer> whole();
  // Its options and this rank's part of its state.
  void take(torch::optim::Optimizer& whole);
  void drop_gradients();  // of a step that is left out
  // Throws ConfigError in the middle of a sum of micro-batches.
  void require_complete() const;

 protected:
  ParamGroups slices_of(
      const ParamGroups& groups) const;  // of the model's parameters, the parts of this rank
  ParamGroups all_parameters() const;
  ParamGroups whole_groups(const torch::optim::Optimizer& self) const;
  // Every option of each group: LibTorch's constructors take one that has its default value for one not given.
  void copy_group_options(const torch::optim::Optimizer& self, torch::optim::Optimizer& whole) const;
  void require_same_options(const torch::optim::Optimizer& self) const;
  void begin_step(const torch::optim::Optimizer& self);
  void end_step();
  void drop_unreduced_gradients();

 private:
  virtual torch::optim::Optimizer& self() = 0;
  // The number of the parameter that this is a part of; ConfigError where it is of none.
  std::size_t find(const at::Tensor& slice) const;
  const bool share_weights_;
  std::vector<std::int64_t> versions_;  // of the parameters, after the last step
  const std::shared_ptr<ParameterShards> shards_;
};

}  // namespace detail

// Inner: an ElementwiseOptimizer. This is what the others get.
template <typename Inner>
class DistributedOptimizer : public Inner {
  static_assert(
      ElementwiseOptimizer<Inner>::value,
      "DistributedOptimizer: each rank updates a part of every parameter, which is right only for an "
      "optimizer that updates each element by itself, as Adam, AdamW, SGD, RMSprop and Adagrad do: if "
      "yours does, specialize lockstep::ElementwiseOptimizer for it, else use it without "
      "DistributedOptimizer");

 public:
  template <typename... Args>
  explicit DistributedOptimizer(detail::DdpBase& ddp, Args&&... args);
};

template <typename Inner>
  requires(ElementwiseOptimizer<Inner>::value)
class DistributedOptimizer<Inner> final : public detail::ShardedOptimizer, public Inner {
 public:
  using Options = typename ElementwiseOptimizer<Inner>::Options;

  // Of all parameters that ddp reduces.
  explicit DistributedOptimizer(detail::DdpBase& ddp, Options options = {},
                                DistributedOptimizerOptions sharding = {})
      : ShardedOptimizer(ddp, sharding), Inner(slices_of(all_parameters()), options) {
    require_same_options(*this);
  }
  // groups: a vector of what Inner::group makes, of the model's parameters.
  template <std::same_as<detail::ParamGroups> Groups>  // or {.lr = 1} might be one to the compiler
  DistributedOptimizer(detail::DdpBase& ddp, const Groups& groups, Options options = {},
                       DistributedOptimizerOptions sharding = {})
      : ShardedOptimizer(ddp, sharding), Inner(slices_of(groups), options) {
    require_same_options(*this);
  }

  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      at::AutoGradMode enable_grad(true);
      loss = closure();
    }
    const detail::Span span(detail::SpanKind::optimizer, "optimizer");
    begin_step(*this);
    Inner::step();
    end_step();
    return loss;
  }

  // Also what passes inside no_sync() have left in p.grad(); through an Optimizer& it is not this one.
  void zero_grad(bool set_to_none = true) {
    Inner::zero_grad(set_to_none);
    if (set_to_none) drop_gradients();  // also of parameters in no group
    drop_unreduced_gradients();
  }

  // Every rank: the whole state is gathered, and can be loaded by any number of ranks, and by Inner.
  void save(torch::serialize::OutputArchive& archive) const override {
    const_cast<DistributedOptimizer&>(*this).whole()->save(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    auto all = make_whole();
    all->load(archive);
    take(*all);
  }

  std::unique_ptr<torch::optim::Optimizer> make_whole() override {
    auto whole = std::make_unique<Inner>(whole_groups(*this), first_options());
    copy_group_options(*this, *whole);
    return whole;
  }

 private:
  torch::optim::Optimizer& self() override { return *this; }
  Options first_options() const {
    if constexpr (requires(const Inner& inner) {
                    { inner.options(0) } -> std::same_as<Options>;
                  })
      return this->options(0);
    else
      return static_cast<const Options&>(this->defaults());
  }
};

}  // namespace lockstep
