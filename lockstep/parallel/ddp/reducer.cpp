#include <lockstep/base/text.h>
#include <lockstep/parallel/ddp/reducer.h>

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/cpu_memory.h>
#include <lockstep/modules/detail/unready_gradient.h>
#include <lockstep/modules/replicas.h>
#include <lockstep/parallel/ddp/shards.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace lockstep::detail {
namespace {

// Number of harmless references to a gradient's memory inside its hook: the gradient itself; the tensor that
// autograd received and adopted, which autograd still holds; and that tensor's base, if it is a view. Any
// other holder of the base has yet to read it.
std::size_t holders_of(const at::Tensor& gradient, const at::Tensor& given) {
  if (!gradient.defined() || !given.defined() || !given.is_alias_of(gradient)) return 1;
  return given.is_view() && given._base().use_count() == 1 ? 3 : 2;
}

}  // namespace

std::shared_ptr<DdpReducer> make_reducer(std::shared_ptr<torch::nn::Module> module, Group group,
                                         DdpOptions options) {
  if (!module)
    throw ConfigError("DistributedDataParallel: the module holder is empty (constructed from nullptr)");
  auto reducer = std::make_shared<DdpReducer>(std::move(module), std::move(group), std::move(options));
  reducer->start();
  return reducer;
}

void DdpReducer::before_forward(const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return;
  if (torch::autograd::get_current_graph_task_id() == -1) check_passes(in_round_);
  if (no_sync_ > 0 && options_.micro_batches > 1)
    throw ConfigError(
        "no_sync() cannot be combined with micro_batches above 1: both delay communication, use one of them");
  sync_ = no_sync_ == 0;
  if (sync_ && !in_round_) follow_model();
  note_samples(inputs);
  note_inputs(inputs);
  if (shards_) shards_->note_versions();
  if (!options_.reduce_in_backward || !sync_) return;
  try {
    before_step();
  } catch (const CommError& error) {
    learn_of_broken_pass(error);
    refuse_updates();
    throw;
  }
}

void DdpReducer::before_step() {
  if (alone_ || joining_) return;
  const ModelScope scope(model_, /*begins=*/true);
  if (options_.check_replicas_every > 0 && rounds_ > checked_at_ &&
      rounds_ % options_.check_replicas_every == 0) {
    checked_at_ = rounds_;
    check_replicas(*module_, group_, {.ignore = options_.ignore});
  }
  if (options_.broadcast_buffers) sync_buffers(0);
}

void DdpReducer::after_forward(const std::vector<at::Tensor>& outputs) {
  if (!at::GradMode::is_enabled()) return;
  if (shards_) shards_->check_versions();
  if (!graph_checked_) check_graph(outputs);
  for (const auto& output : outputs) {
    // A leaf would keep the hook forever; its gradient arrives without one.
    if (!output.defined() || !output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([self = weak_from_this(), sync = sync_](const at::Tensor& gradient) {
      if (auto reducer = self.lock()) reducer->on_output(sync);
      return gradient;
    });
  }
}

// A backward pass has reached an output of forward.
void DdpReducer::on_output(bool sync) {
  std::lock_guard lock(mutex_);
  check_passes(in_round_ && round_.expired());
  // Also in a pass that does not communicate, because its gradients are added to and reduced later.
  if (shared_sizes_ != nullptr) share_tensors_of_this_pass(shared_sizes_);
  if (!sync) {
    unsynced_task_ = torch::autograd::get_current_graph_task_id();
    return;
  }
  if (in_round_ || !options_.reduce_in_backward) return;
  // autograd::grad, and backward with given inputs, may bypass every parameter, and so does any pass while
  // all are frozen. If a parameter's gradient does arrive, it begins the round.
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  const bool all = wanted == nullptr || wanted->empty();
  if (all && std::any_of(params_.begin(), params_.end(),
                         [](const auto& param) { return param.tensor.requires_grad(); }))
    begin_round();
}

void DdpReducer::samples(std::int64_t count) {
  if (count < 0) throw ConfigError(fmt::format("ddp.samples(): expected at least 0, got {}", count));
  told_samples_ = count;
}

void DdpReducer::set_hook(CommHook hook) {
  if (buckets_made_ || rounds_ > 0)
    throw ConfigError(
        "register_comm_hook: call it before the first backward pass and before constructing a "
        "DistributedOptimizer");
  if (hook_) throw ConfigError("register_comm_hook: a hook is already registered; call it once per model");
  hook_ = std::move(hook);
}

void DdpReducer::sync_buffers(int root) {
  if (alone_ || buffers_.empty()) return;
  const ModelScope scope(model_, /*begins=*/true);
  std::vector<at::Tensor> tensors;
  for (const auto& [name, buffer] : buffers_) tensors.push_back(buffer);
  broadcast_tensors(group_, tensors, root);
}

std::vector<std::int64_t> DdpReducer::bucket_sizes() const {
  std::vector<std::int64_t> sizes;
  for (const auto& bucket : buckets_) sizes.push_back(bucket.bytes);
  return sizes;
}

void DdpReducer::begin_round() {
  prepare_gradients();
  in_round_ = true;
  if (shared_sizes_ != nullptr) share_tensors_of_this_pass(shared_sizes_);
  if (shards_ && micro_batch_ == 0) shards_->keep_gradients();
  auto running = std::make_shared<int>();  // Released with the pass, even if that ends early.
  round_ = running;
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this(), running] {
    if (auto reducer = self.lock()) reducer->end_round();
  });
  const auto samples = std::exchange(samples_, 0);
  if (joining_ && !alone_) {
    try {
      announce(told_samples_.value_or(samples), true);
    } catch (const ConfigError&) {  // On every rank, so no rank waits for the rest of this pass.
      reset_round();
      throw;
    }
  }
  told_samples_.reset();
}

// restore: set p.grad() back to its value before the first of them; otherwise leave it undefined.
void DdpReducer::forget_micro_batches(bool restore) {
  micro_batch_ = 0;
  for (auto& param : params_) {
    param.levels.clear();
    param.sum.reset();
    if (options_.micro_batches > 1) param.used = false;
    auto before = std::exchange(param.before, {});
    if (std::exchange(param.aside, false)) param.tensor.mutable_grad() = restore ? before : at::Tensor();
  }
}

void DdpReducer::discard_micro_batches() {
  std::lock_guard lock(mutex_);
  if (in_round_)
    throw ConfigError("discard_micro_batches() was called inside a backward pass: call it between passes");
  clear_unready_gradients();
  forget_micro_batches(/*restore=*/true);
}

void DdpReducer::make_gradients_unready(const std::string& text) {
  std::map<std::string, c10::Storage> storages;
  for (auto& param : params_) {
    const auto device = param.tensor.device();
    auto [storage, is_new] = storages.try_emplace(device.str());
    if (is_new) storage->second = unready_storage(device, text);
    param.tensor.mutable_grad() = unready_gradient(param.tensor, storage->second);
  }
  unready_ = true;
}

void DdpReducer::clear_unready_gradients() {
  if (!std::exchange(unready_, false)) return;
  for (auto& param : params_)
    if (unready_text(param.tensor.grad())) param.tensor.mutable_grad().reset();
}

// In the middle of a sum, zero_grad() restarts the sum: it has removed the unready gradients.
void DdpReducer::prepare_gradients() {
  if (!unready_) return;
  std::vector<std::string> gone;
  for (const auto& param : params_)
    if (!unready_text(param.tensor.grad())) gone.push_back(param.name);
  clear_unready_gradients();
  if (micro_batch_ == 0 || gone.empty()) return;
  for (auto& param : params_) param.aside = false;  // Keep what p.grad() holds now.
  const auto summed = std::exchange(micro_batch_, 0);
  forget_micro_batches(/*restore=*/false);
  if (gone.size() < params_.size())
    throw ConfigError(fmt::format(
        "the gradients of {} were cleared or replaced after {} of {} micro-batches were summed, but those "
        "of other parameters were not. The sum was discarded. Call zero_grad() of the model, which clears "
        "all gradients",
        quoted_list(gone), summed, options_.micro_batches));
}

// Called before autograd adds a gradient to p.grad().
void DdpReducer::before_gradient(std::size_t index) {
  std::lock_guard lock(mutex_);
  check_passes(in_round_ && round_.expired());
  prepare_gradients();
  if (options_.micro_batches > 1 && sync_) set_aside(params_[index]);
}

void DdpReducer::reset_round() {
  in_round_ = false;
  launched_ = 0;
  order_.clear();
  weight_.reset();
  for (auto& param : params_) {
    param.fired = 0;
    param.kept.reset();
  }
  for (auto& bucket : buckets_) {
    bucket.work.reset();
    bucket.complete = nullptr;
    if (params_[bucket.params[0]].in_place) {  // Only this holds the gradient's memory.
      params_[bucket.params[0]].view.reset();
      bucket.shown.buffer_.reset();
      bucket.shown.gradients_.clear();
    }
    bucket.moving.clear();
    bucket.missing = static_cast<std::size_t>(std::count_if(bucket.params.begin(), bucket.params.end(),
                                                            [&](auto i) { return params_[i].expected > 0; }));
  }
}

void DdpReducer::on_gradient(std::size_t index, const at::Tensor& given) {
  std::lock_guard lock(mutex_);
  auto& param = params_[index];
  if (at::GradMode::is_enabled())
    throw ConfigError(fmt::format(
        "backward() with create_graph reached parameter '{}': gradients of averaged gradients "
        "are not supported. Compute the inner gradient with torch::autograd::grad(outputs, inputs, {{}}, true, "
        "/*create_graph=*/true), which does not touch p.grad(), and call backward() on the result",
        param.name));
  if (!options_.reduce_in_backward) {
    if (shared_sizes_ != nullptr) share_tensors_of_this_pass(shared_sizes_);
    param.used = true;
    return;
  }
  check_passes(in_round_ && round_.expired());
  if (!in_round_ && (!sync_ || unsynced_task_ == torch::autograd::get_current_graph_task_id())) {
    param.used = true;
    return;
  }
  if (!in_round_) begin_round();
  ++param.fired;
  if (param.fired > param.expected) {
    if (options_.static_graph && !buckets_made_) {
      // The first round counts how often.
    } else if (param.expected == 0) {
      throw ConfigError(fmt::format(
          "parameter '{}' got a gradient, but got none in the first step: remove static_graph if steps "
          "differ",
          param.name));
    } else {
      throw ConfigError(fmt::format(
          "parameter '{}' got {} gradients in one backward pass, so it would be reduced twice. {}",
          param.name, param.fired,
          options_.static_graph ? "It got fewer in the first step: remove static_graph if steps differ"
                                : "If backward runs inside backward, set {.static_graph = true}"));
    }
  }
  if (param.fired < param.expected) return;
  if (param.fired == 1 || param.expected > 1) order_.push_back(index);
  if (options_.micro_batches > 1) {
    fold(param);
    if (micro_batch_ + 1 < options_.micro_batches) return;
  }
  if (!buckets_made_ || !param.bucket) return;
  fill(param, holders_of(param.tensor.grad(), given));
  if (--buckets_[*param.bucket].missing == 0) launch_ready();
}

// Acts like a backward pass that delivers all gradients at once.
void DdpReducer::reduce_now() {
  if (options_.reduce_in_backward)
    throw ConfigError(
        "reduce() requires {.reduce_in_backward = false}: backward() has already averaged the gradients");
  if (joining_) throw ConfigError("reduce() cannot be called inside join()");
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  check_passes(false);
  if (!model_change().empty()) {
    follow_model();
    for (auto& param : params_) param.used = param.used || param.tensor.grad().defined();
  }
  prepare_gradients();
  in_round_ = true;
  if (shards_) shards_->keep_gradients();
  try {
    before_step();  // Uses the model as it is now, because forward bypassed DDP.
    for (auto i = params_.size(); i-- > 0;) {
      auto& param = params_[i];
      if (!param.used) continue;
      param.fired = 1;
      order_.push_back(i);
      if (!buckets_made_ || !param.bucket) continue;
      fill(param);
      if (--buckets_[*param.bucket].missing == 0) launch_ready();
    }
    settle(/*last=*/true);
    ++rounds_;
  } catch (const CommError& error) {
    learn_of_broken_pass(error);
    reset_round();
    refuse_updates();
    throw;
  } catch (...) {
    note_broken_pass();
    reset_round();
    throw;
  }
  reset_round();
}

void DdpReducer::end_round() {
  std::lock_guard lock(mutex_);
  if (!in_round_) return;
  at::NoGradGuard no_grad;
  try {
    const bool last = micro_batch_ + 1 == options_.micro_batches;
    settle(last);
    micro_batch_ = last ? 0 : micro_batch_ + 1;
    if (last) ++rounds_;
    if (last && joining_ && options_.broadcast_buffers) sync_buffers(last_active_);
  } catch (const CommError& error) {
    learn_of_broken_pass(error);
    reset_round();
    forget_micro_batches(/*restore=*/true);
    refuse_updates();
    throw;
  } catch (...) {
    note_broken_pass();
    reset_round();
    forget_micro_batches(/*restore=*/true);
    throw;
  }
  reset_round();
}

}  // namespace lockstep::detail
