// A sharded optimizer (ZeRO, stage 1): each rank reduces its part of the gradients, updates that part of the
// weights, keeps optimizer state only for it, and all ranks then gather all weights. The results are
// bit-identical to the plain optimizer after DistributedDataParallel on transports that sum in a fixed order
// (shm, threads, shm+gloo).
//
//   lockstep::DistributedDataParallel ddp(model, world.group());
//   lockstep::DistributedOptimizer<lockstep::AdamW> optimizer(ddp, {.lr = 3e-4});
//   loss.backward();                 // each rank has the average of its part; do not read p.grad()
//   optimizer.clip_grad_norm(1.0);   // not lockstep::clip_grad_norm(model->parameters(), ...): see p.grad()
//   optimizer.step();                // releases the gradients
//
// The inner optimizer is an AdamW, Adam or SGD of Lockstep or torch::optim, a torch::optim::RMSprop or
// Adagrad, or an element-wise optimizer of yours (elementwise.h). param_groups, schedulers, GradScaler,
// lockstep::save and load, and torch::save work as usual. The groups contain this rank's slices, and state
// and masters belong to those: optimizer.master(optimizer.param_groups()[0].params()[0]). Checkpoints hold
// the whole state and load on any number of ranks. A step skipped by a GradScaler releases the gradients,
// too. A second backward before step() accumulates. optimizer.zero_grad() drops the gradients;
// model->zero_grad() does not. Every rank must create it, after its DistributedDataParallel, and take the
// same steps. After it is destroyed, gradients are averaged as before.
//
// Throws ConfigError for a parameter that the DistributedDataParallel does not reduce, sparse gradients,
// static_graph, capturable, a second one for the same DistributedDataParallel, parameters that have been
// moved since (torch::load of the model moves them, lockstep::load does not), and step() with gradients that
// were not averaged. Throws CommError as Group does.
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
  // Keep one copy of the weights for all ranks, which must be on one host ("shm"); ConfigError otherwise. A
  // module that writes to its parameters in a training forward is rejected by name. Any other write must
  // happen on one rank, between barriers. Each rank keeps its own buffers.
  bool share_weights = false;
};

namespace detail {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

// The part that does not depend on the inner optimizer.
class ShardedOptimizer {
 public:
  ShardedOptimizer(DdpBase& ddp, DistributedOptimizerOptions options);
  ShardedOptimizer(const ShardedOptimizer&) = delete;  // not movable either: others refer to its slices
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;
  virtual ~ShardedOptimizer();

  // Like lockstep::clip_grad_norm, over all gradients, with the result on the CPU. Sums powers of blocks of
  // 4096 elements in double and adds the blocks in a tree, so the norm has the same bits on any number of
  // ranks.
  at::Tensor clip_grad_norm(double max_norm, ClipGradNormOptions options = {});

  Group& group() const;
  // Creates an optimizer over the model's parameters, with this one's options and without state.
  virtual std::unique_ptr<torch::optim::Optimizer> make_whole() = 0;
  // The same with the whole state. Every rank must call it.
  std::unique_ptr<torch::optim::Optimizer> whole();
  // Takes over the options of `whole` and this rank's part of its state.
  void take(torch::optim::Optimizer& whole);
  void drop_gradients();  // of a skipped step
  // Throws ConfigError between micro-batches whose gradients are still being accumulated.
  void require_complete() const;

 protected:
  ParamGroups slices_of(const ParamGroups& groups) const;  // this rank's slices of the model's parameters
  ParamGroups all_parameters() const;
  ParamGroups whole_groups(const torch::optim::Optimizer& self) const;
  // Copies every option of each group: LibTorch's constructors treat an option equal to its default as unset.
  void copy_group_options(const torch::optim::Optimizer& self, torch::optim::Optimizer& whole) const;
  void require_same_options(const torch::optim::Optimizer& self) const;
  void begin_step(const torch::optim::Optimizer& self);
  void end_step();
  void drop_unreduced_gradients();

 private:
  virtual torch::optim::Optimizer& self() = 0;
  // Index of the parameter that the slice belongs to. Throws ConfigError if there is none.
  std::size_t find(const at::Tensor& slice) const;
  const bool share_weights_;
  std::vector<std::int64_t> versions_;  // versions of the parameters after the last step
  const std::shared_ptr<ParameterShards> shards_;
};

}  // namespace detail

// Inner: an ElementwiseOptimizer. The primary template rejects all others.
template <typename Inner>
class DistributedOptimizer : public Inner {
  static_assert(
      ElementwiseOptimizer<Inner>::value,
      "DistributedOptimizer: each rank updates a part of every parameter, which is correct only for an "
      "optimizer that updates each element independently, such as Adam, AdamW, SGD, RMSprop and Adagrad. If "
      "yours does, specialize lockstep::ElementwiseOptimizer for it; otherwise use it without "
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

  // Optimizes all parameters that ddp reduces.
  explicit DistributedOptimizer(detail::DdpBase& ddp, Options options = {},
                                DistributedOptimizerOptions sharding = {})
      : ShardedOptimizer(ddp, sharding), Inner(slices_of(all_parameters()), options) {
    require_same_options(*this);
  }
  // groups: a vector of results of Inner::group, over the model's parameters.
  template <std::same_as<detail::ParamGroups> Groups>  // or {.lr = 1} would be ambiguous
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

  // Also clears what passes inside no_sync() left in p.grad(). Not virtual: not called through an Optimizer&.
  void zero_grad(bool set_to_none = true) {
    Inner::zero_grad(set_to_none);
    if (set_to_none) drop_gradients();  // also for parameters in no group
    drop_unreduced_gradients();
  }

  // Every rank must call it: the whole state is gathered. Any number of ranks, or Inner, can load it.
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
