// Data parallelism over processes: every rank has the whole model and a part of the data, and backward()
// leaves on each the average of all ranks' gradients.
//
//   Net model;
//   lockstep::DistributedDataParallel ddp(model, world.group());
//   auto loss = torch::mse_loss(ddp(inputs), labels);   // as model(inputs)
//   loss.backward();                                    // p.grad() is the average over the ranks
//   optimizer.step();                                   // any optimizer, unchanged
//
// Every rank makes it with the same model and options, and then does the same synchronised backward passes.
// The model is a module holder, a shared_ptr to a module, an AnyModule or a torch::jit::Module. A module object
// (`Net` derived from torch::nn::Module) is not copied: it must outlive this, and a temporary does not compile.
// The model keeps its parameters: an optimizer may be made before or after. Gradients lie in buckets that
// the transport reaches; communication overlaps the rest of backward, and is complete when it returns. Do not
// keep a handle to p.grad() across steps: its memory is used again. One thread at a time.
//
// Throws ConfigError, naming parameters: what differs between ranks at the start; one that got no gradient;
// one that was reduced twice in a backward pass; create_graph. CommError as Group does; its call site is the line
// that made the DistributedDataParallel.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/comm/group.h>
#include <lockstep/modules/detail/module_call.h>
#include <lockstep/modules/detail/tensors_in.h>
#include <lockstep/parallel/ddp/bucket.h>
#include <torch/nn/module.h>

namespace lockstep {

struct DdpOptions {
  std::int64_t bucket_bytes = 25 << 20;
  std::int64_t first_bucket_bytes = 1 << 20;  // small, so that communication starts early
  bool init_sync = true;                      // rank 0's parameters and buffers to all, at the start
  bool broadcast_buffers = true;              // rank 0's buffers to all, before each forward that trains
  // Parameters may get no gradient in a step; those that got none on any rank keep what they had.
  bool find_unused_parameters = false;
  // The same parameters get gradients in every step, equally often: learned in the first.
  bool static_graph = false;
  // Of the step's gradient this rank computes so many parts, one backward pass each, added by the tree that
  // adds ranks: one rank with 4 gives the bits of 4 ranks with 1. The pass that ends a step leaves gradients;
  // before it they cannot be read, so that step() in the middle of a sum is an error.
  int micro_batches = 1;
  // Gradients of 256 KiB and more are reduced where they lie, without a copy: on shared memory, where CPU
  // tensors have their memory from Lockstep (cpu_memory.h). Smaller ones, and all of them elsewhere, go to
  // buckets.
  bool zero_copy = true;
  // Otherwise gradients are averaged when reduce() is called: for steps that have several backward passes, or
  // passes in parts, as a Pipeline's have.
  bool reduce_in_backward = true;
  int check_replicas_every = 0;          // steps between checks that replicas are still equal; 0: never
  std::vector<std::string> ignore = {};  // names of parameters and buffers that are left alone
};

// How gradients were reduced, so far: where they lay, in shared memory; by way of staging, since they lay
// elsewhere (a function of the user's own returned foreign memory); after a copy to shared memory, since
// something else had theirs too, or there was none; in buckets.
struct DdpCounts {
  std::int64_t in_place = 0, staged = 0, copied = 0, in_buckets = 0;
};

struct JoinOptions {
  // What a step does after backward, for ranks that ran out of data while others go on: they get the same
  // gradients, so that their replica and optimizer stay equal. Without it parameters are
  // sent to them at the end, and the optimizer's state is not.
  std::function<void()> step = {};
  bool throw_on_early_termination = false;  // a ConfigError on every rank when the first one runs out
  // The dimension of forward's first tensor that counts samples. Unset: 0, with a ConfigError on every rank where
  // that looks wrong: recurrent and attention layers that take sequences first, inputs of different sizes in dim 0,
  // first inputs that differ between ranks in another dimension.
  std::optional<std::int64_t> batch_dim = {};
};

namespace detail {

class DdpReducer;
class ParameterShards;
std::shared_ptr<DdpReducer> make_reducer(std::shared_ptr<torch::nn::Module> module, Group group,
                                         DdpOptions options);

// What DistributedDataParallel has that does not depend on the type of the module.
class DdpBase {
 public:
  // Backward passes whose forward ran while the guard lives add to gradients without communication.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(std::shared_ptr<DdpReducer> reducer);  // null: a guard of nothing
    NoSync(NoSync&&) noexcept = default;
    NoSync& operator=(NoSync&& other) noexcept;
    ~NoSync();

   private:
    std::shared_ptr<DdpReducer> reducer_;
  };
  NoSync no_sync(bool enabled = true) { return NoSync(enabled ? reducer_ : nullptr); }

  // The model's own, so that code written for a module or a module holder takes this too.
  void train(bool on = true) { model_->train(on); }
  void eval() { model_->eval(); }
  bool is_training() const { return model_->is_training(); }
  std::vector<at::Tensor> parameters(bool recurse = true) const { return model_->parameters(recurse); }
  torch::OrderedDict<std::string, at::Tensor> named_parameters(bool recurse = true) const {
    return model_->named_parameters(recurse);
  }
  std::vector<at::Tensor> buffers(bool recurse = true) const { return model_->buffers(recurse); }
  torch::OrderedDict<std::string, at::Tensor> named_buffers(bool recurse = true) const {
    return model_->named_buffers(recurse);
  }
  void to(at::Device device, at::ScalarType dtype, bool non_blocking = false) {
    model_->to(device, dtype, non_blocking);
  }
  void to(at::ScalarType dtype, bool non_blocking = false) { model_->to(dtype, non_blocking); }
  void to(at::Device device, bool non_blocking = false) { model_->to(device, non_blocking); }
  void zero_grad(bool set_to_none = true) { model_->zero_grad(set_to_none); }
  // The model as LibTorch's base class; of a torch::jit::Module, a module with its parameters and buffers.
  const std::shared_ptr<torch::nn::Module>& ptr() const { return model_; }

  // With {.reduce_in_backward = false}: averages what backward passes have left in p.grad() since the last
  // time. Every rank.
  void reduce();

  // Drops the incomplete sum of micro-batches: the next backward pass is the first of a step. p.grad() holds what it
  // held before the sum. Every rank calls it; nothing is sent.
  void discard_micro_batches();

  // After a backward pass that ended with an exception on some ranks and not on others: drops what it has left, on
  // every rank, so that the next step begins clean. p.grad() is undefined then. Every rank calls it. Until then each
  // step is an error. Throws DriftError if a rank has updated its parameters with what was left. It needs a group that lives: on transports other than shared memory such a pass fails the group.
  void discard();

  // Runs the body, in which this rank may make fewer steps than others, then takes part in what they still
  // do. Gradients are weighted by samples: those of batch_dim of the first tensor that went into forward, or
  // samples(). Inside, every rank that still has data makes the same kind of steps.
  void join(const std::function<void()>& body, const JoinOptions& options = {});
  void samples(std::int64_t count);  // of the next backward pass; before it

  // In place of the average: see ddp_hooks.h. Every rank, before the first backward pass and before a
  // DistributedOptimizer is made.
  void register_comm_hook(CommHook hook);
  // Rank 0's buffers to all: before an evaluation, say. Every rank.
  void sync_buffers();
  // Sizes of the buckets in bytes, in the order of their reduction; empty before the first step, or a
  // DistributedOptimizer.
  std::vector<std::int64_t> bucket_sizes() const;
  DdpCounts counts() const;
  // For an optimizer that updates a part of the parameters on each rank (distributed_optimizer.h).
  std::shared_ptr<ParameterShards> shard(bool share_weights);

 protected:
  DdpBase(std::shared_ptr<torch::nn::Module> model, Group group, DdpOptions options)
      : model_(std::move(model)), reducer_(make_reducer(model_, std::move(group), std::move(options))) {}
  void before_forward(const std::vector<at::Tensor>& inputs);
  void after_forward(const std::vector<at::Tensor>& outputs);

 private:
  std::shared_ptr<torch::nn::Module> model_;
  std::shared_ptr<DdpReducer> reducer_;
};

}  // namespace detail

// M: a module holder (torch::nn::Sequential, one made by TORCH_MODULE, a Unit), a shared_ptr to a module, a
// module's class, torch::nn::AnyModule or torch::jit::Module.
template <typename M>
class DistributedDataParallel : public detail::DdpBase {
  static constexpr bool kRefers = detail::module_object<M>;

 public:
  DistributedDataParallel(M module, Group group, DdpOptions options = {}, Site site = Site::current())
    requires(!detail::module_object<M>)
      : DdpBase(detail::module_pointer(module), group.called_at(site), std::move(options)),
        module_(std::move(module)) {}
  DistributedDataParallel(M& module, Group group, DdpOptions options = {}, Site site = Site::current())
    requires detail::module_object<M>
      : DdpBase(detail::module_pointer(module), group.called_at(site), std::move(options)),
        module_(&module) {}
  // The model would be gone before the first step.
  DistributedDataParallel(M&& temporary, Group group, DdpOptions options = {})
    requires detail::module_object<M>
  = delete;

  // Forward, with the model's own arguments. With gradients enabled it begins a step.
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    constexpr bool has_forward = detail::names_forward<detail::Callee<M>>;
    constexpr bool fits = detail::forward_takes<M, Args...>;
    static_assert(has_forward,
                  "DistributedDataParallel: the model has no forward(), as ModuleList, ModuleDict and "
                  "ParameterList have none: make it a member of a module that has one");
    static_assert(!has_forward || fits,
                  "DistributedDataParallel: the model's forward() does not take these arguments: pass what a "
                  "call of the model itself takes");
    if constexpr (has_forward && fits) {
      before_forward(tensors_in(args...));
      return watched<decltype(detail::call_forward(module(), std::forward<Args>(args)...))>(
          detail::call_forward(module(), std::forward<Args>(args)...));
    } else {
      return at::Tensor();  // so that the compiler has no more to say
    }
  }
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    return (*this)(std::forward<Args>(args)...);
  }
  // As an AnyModule is called whose forward does not return a tensor: forward<std::vector<at::Tensor>>(x).
  template <typename Result, typename... Args>
    requires detail::any_module<M>
  Result forward(Args&&... args) {
    before_forward(tensors_in(args...));
    return watched<Result>(module().template forward<Result>(std::forward<Args>(args)...));
  }
  // As a torch::jit::Module is called: forward({x, y}).
  c10::IValue forward(std::vector<c10::IValue> inputs)
    requires detail::script_module<M>
  {
    return (*this)(std::move(inputs));
  }

  // For code written for module holders. The model's own methods: module()->method().
  DistributedDataParallel* operator->() { return this; }
  const DistributedDataParallel* operator->() const { return this; }

  M& module() {
    if constexpr (kRefers)
      return *module_;
    else
      return module_;
  }
  const M& module() const { return const_cast<DistributedDataParallel&>(*this).module(); }

 private:
  template <typename... Values>
  static std::vector<at::Tensor> tensors_in(const Values&... values) {
    std::vector<at::Tensor> tensors;
    (detail::collect_tensors(values, tensors), ...);
    return tensors;
  }
  template <typename Output>
  Output watched(Output&& output) {
    after_forward(tensors_in(output));
    return std::forward<Output>(output);
  }

  std::conditional_t<kRefers, M*, M> module_;
};

}  // namespace lockstep
