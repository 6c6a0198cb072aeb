// Data parallelism over processes. Every rank holds the whole model and processes its own share of the data;
// backward() leaves the average of all ranks' gradients on every rank.
//
//   Net model;
//   lockstep::DistributedDataParallel ddp(model, world.group());
//   auto loss = torch::mse_loss(ddp(inputs), labels);   // called like model(inputs)
//   loss.backward();                                    // p.grad() is the average over the ranks
//   optimizer.step();                                   // any optimizer, unchanged
//
// Construct it on every rank, with the same model and options; afterwards every rank must run the same
// synchronised backward passes. The model is a module holder, a shared_ptr to a module, an AnyModule or a
// torch::jit::Module. A module object (`Net` derived from torch::nn::Module) is not copied: it must outlive
// the DDP object, and a temporary does not compile. The model keeps its parameter tensors, so an optimizer
// may be constructed before or after DDP. Gradients live in buckets that the transport can reach directly.
// Communication overlaps the rest of backward and is complete when backward() returns. Do not keep a handle
// to p.grad() across steps, because its memory is reused. Not thread-safe: use it from one thread at a time.
//
// Throws ConfigError, with the names of the parameters, if the ranks differ at construction, if a parameter
// gets no gradient, if one is reduced twice in a backward pass, or if backward() uses create_graph. Throws
// CommError as Group does.
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

// docs/guides/ddp.md repeats the defaults.
struct DdpOptions {
  // A bucket is closed when its gradients have at least this size together; the first one, when they have
  // first_bucket_bytes.
  std::int64_t bucket_bytes = 25 << 20;
  std::int64_t first_bucket_bytes = 1 << 20;  // Small, so that communication starts early.
  bool init_sync = true;                      // Broadcast rank 0's parameters and buffers at construction.
  bool broadcast_buffers = true;              // Broadcast rank 0's buffers before each forward in training.
  // Allow parameters without a gradient in a step. A parameter unused on every rank keeps its previous
  // gradient.
  bool find_unused_parameters = false;
  // Promise that every step produces gradients for the same parameters, equally often. The first step records
  // them.
  bool static_graph = false;
  // Number of backward passes that make up one step on this rank. Their gradients are summed by the same tree
  // that sums over ranks, so one rank with 4 gives the same bits as 4 ranks with 1. Gradients become readable
  // only after the last pass of a step; until then, reading them, as optimizer.step() does, is an error.
  int micro_batches = 1;
  // Reduce gradients of 256 KiB and more in place, without a copy. Takes effect on shared memory, if CPU
  // tensors are allocated by Lockstep (cpu_memory.h). Smaller gradients, and all gradients on other
  // transports, go through buckets.
  bool zero_copy = true;
  // If false, gradients are averaged by reduce() instead: for steps that run several backward passes, or
  // passes in pieces, as a Pipeline does.
  bool reduce_in_backward = true;
  int check_replicas_every = 0;          // Steps between checks that the replicas are still equal; 0: never.
  std::vector<std::string> ignore = {};  // Names of parameters and buffers to leave alone.
};

// Number of gradients reduced so far, by method. in_place: where autograd allocated them, in shared memory.
// staged: through a staging buffer, because a user function returned memory from another allocator. copied:
// after a copy into shared memory, because the gradient's memory was also held elsewhere, or there was no
// gradient. in_buckets: through a bucket.
struct DdpCounts {
  std::int64_t in_place = 0, staged = 0, copied = 0, in_buckets = 0;
};

struct JoinOptions {
  // Runs after backward on ranks that have run out of data, once per step of the remaining ranks. They get
  // the same gradients, so their replica and optimizer stay equal. Without it, parameters are sent to these
  // ranks at the end, but the optimizer's state is not.
  std::function<void()> step = {};
  bool throw_on_early_termination = false;  // Throw ConfigError on every rank when the first rank runs out.
  // Dimension of forward's first tensor that counts samples. If unset, 0; join() then throws ConfigError on
  // every rank if that looks wrong: for recurrent and attention layers that expect the sequence first, for
  // inputs with different sizes in dim 0, and for first inputs that differ between ranks in another
  // dimension.
  std::optional<std::int64_t> batch_dim = {};
};

namespace detail {

class DdpReducer;
class ParameterShards;
std::shared_ptr<DdpReducer> make_reducer(std::shared_ptr<torch::nn::Module> module, Group group,
                                         DdpOptions options);

// The part of DistributedDataParallel that does not depend on the type of the module.
class DdpBase {
 public:
  // While the guard exists, backward passes whose forward ran under it accumulate gradients without
  // communication.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(std::shared_ptr<DdpReducer> reducer);  // Null makes a guard that does nothing.
    NoSync(NoSync&&) noexcept = default;
    NoSync& operator=(NoSync&& other) noexcept;
    ~NoSync();

   private:
    std::shared_ptr<DdpReducer> reducer_;
  };
  NoSync no_sync(bool enabled = true) { return NoSync(enabled ? reducer_ : nullptr); }

  // Forwarded to the model, so that code written for a module or a module holder works here too.
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
  // The model as LibTorch's base class; for a torch::jit::Module, a module with its parameters and buffers.
  const std::shared_ptr<torch::nn::Module>& ptr() const { return model_; }

  // With {.reduce_in_backward = false}: averages the gradients that backward passes have accumulated in
  // p.grad() since the previous call. Collective: every rank must call it.
  void reduce();

  // Drops an incomplete sum of micro-batches: the next backward pass is then the first of a step, and
  // p.grad() is restored to its value before the sum. Every rank must call it; it does not communicate.
  void discard_micro_batches();

  // Recovers from a backward pass that threw on some ranks but not on all: drops what it left behind, so that
  // the next step starts clean. p.grad() is undefined afterwards. Every rank must call it; until then every
  // step is an error. The group must still work: on transports other than shared memory such a pass fails the
  // group.
  void discard();

  // Runs the body, in which this rank may make fewer steps than its peers, then takes part in their remaining
  // steps. Gradients are weighted by samples: the size of dimension batch_dim of the first tensor passed to
  // forward, or the count given to samples(). Inside, every rank that still has data must make the same kind
  // of steps.
  void join(const std::function<void()>& body, const JoinOptions& options = {});
  // Sets the number of samples of the next backward pass. Call it before that pass.
  void samples(std::int64_t count);

  // Replaces the average by a communication hook: see ddp_hooks.h. Every rank must call it, before the first
  // backward pass and before a DistributedOptimizer is constructed.
  void register_comm_hook(CommHook hook);
  // Broadcasts rank 0's buffers, for example before an evaluation. Collective: every rank must call it.
  void sync_buffers();
  // Sizes of the buckets in bytes, in the order of their reduction. Empty until the first step has run or a
  // DistributedOptimizer has been constructed.
  std::vector<std::int64_t> bucket_sizes() const;
  DdpCounts counts() const;
  // For an optimizer that updates only part of the parameters on each rank (distributed_optimizer.h).
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

// M: a module holder (torch::nn::Sequential, a TORCH_MODULE, a Unit), a shared_ptr to a module, a module
// class, torch::nn::AnyModule or torch::jit::Module.
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
  // Deleted: a temporary model would be destroyed before the first step.
  DistributedDataParallel(M&& temporary, Group group, DdpOptions options = {})
    requires detail::module_object<M>
  = delete;

  // Runs forward with the model's own arguments. If gradients are enabled, this begins a step.
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    constexpr bool has_forward = detail::names_forward<detail::Callee<M>>;
    constexpr bool fits = detail::forward_takes<M, Args...>;
    static_assert(has_forward,
                  "DistributedDataParallel: the model has no forward() (ModuleList, ModuleDict and "
                  "ParameterList have none): make it a member of a module that has one");
    static_assert(!has_forward || fits,
                  "DistributedDataParallel: the model's forward() does not accept these arguments: pass the "
                  "arguments that a call of the model itself takes");
    if constexpr (has_forward && fits) {
      before_forward(tensors_in(args...));
      return watched<decltype(detail::call_forward(module(), std::forward<Args>(args)...))>(
          detail::call_forward(module(), std::forward<Args>(args)...));
    } else {
      return at::Tensor();  // Avoids follow-up errors after the static_assert.
    }
  }
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    return (*this)(std::forward<Args>(args)...);
  }
  // Calls an AnyModule whose forward does not return a tensor: forward<std::vector<at::Tensor>>(x).
  template <typename Result, typename... Args>
    requires detail::any_module<M>
  Result forward(Args&&... args) {
    before_forward(tensors_in(args...));
    return watched<Result>(module().template forward<Result>(std::forward<Args>(args)...));
  }
  // Calls a torch::jit::Module: forward({x, y}).
  c10::IValue forward(std::vector<c10::IValue> inputs)
    requires detail::script_module<M>
  {
    return (*this)(std::move(inputs));
  }

  // For code written for module holders. Call the model's own methods with module()->method().
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
