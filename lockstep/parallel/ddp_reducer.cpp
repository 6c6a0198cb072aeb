#include <lockstep/parallel/ddp_reducer.h>

#include <algorithm>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/cpu_memory.h>
#include <lockstep/parallel/ddp_shards.h>
#include <lockstep/parallel/replicas.h>
#include <lockstep/parallel/unit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

namespace lockstep::detail {
namespace {

DdpOptions checked(DdpOptions options) {
  if (options.bucket_bytes <= 0 || options.first_bucket_bytes <= 0)
    throw ConfigError(fmt::format("bucket sizes of {} and {} bytes are not allowed: above 0 is",
                                  options.first_bucket_bytes, options.bucket_bytes));
  if (options.micro_batches < 1)
    throw ConfigError(fmt::format("micro_batches = {} is not allowed: 1 or more is", options.micro_batches));
  if (options.micro_batches > 1 && options.static_graph)
    throw ConfigError(
        "static_graph is not allowed with micro_batches above 1: how often a gradient comes would be counted "
        "wrongly");
  if (!options.reduce_in_backward && (options.static_graph || options.micro_batches > 1))
    throw ConfigError(
        "static_graph and micro_batches above 1 are not allowed with reduce_in_backward = false: both are "
        "about what "
        "one backward pass brings");
  if (options.check_replicas_every < 0)
    throw ConfigError(fmt::format("check_replicas_every = {} is not allowed: 0 (never) or more is",
                                  options.check_replicas_every));
  return options;
}

// Before a gradient is added to what is there.
struct BeforeGradient : torch::autograd::FunctionPreHook {
  explicit BeforeGradient(std::function<void()> given) : call(std::move(given)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    call();
    return gradients;
  }
  std::function<void()> call;
};

// How many have the memory of a gradient, inside its hook, where nobody else has: itself; what autograd was
// given and took as it is, which it still holds; and, where that is a view, what it is a view of. If others
// have that one, they have yet to read it.
std::size_t holders_of(const at::Tensor& gradient, const at::Tensor& given) {
  if (!gradient.defined() || !given.defined() || !given.is_alias_of(gradient)) return 1;
  return given.is_view() && given._base().use_count() == 1 ? 3 : 2;
}

}  // namespace

std::shared_ptr<DdpReducer> make_reducer(std::shared_ptr<torch::nn::Module> module, Group group,
                                         DdpOptions options) {
  if (!module) throw ConfigError("DistributedDataParallel was given an empty module: make it first");
  auto reducer = std::make_shared<DdpReducer>(std::move(module), std::move(group), std::move(options));
  reducer->start();
  return reducer;
}

DdpReducer::DdpReducer(std::shared_ptr<torch::nn::Module> module, Group group, DdpOptions options)
    : module_(std::move(module)),
      group_(std::move(group)),
      options_(checked(std::move(options))),
      alone_(group_.size() == 1) {
  std::set<const void*> seen;  // a tensor that two modules share counts once, by its first name
  std::set<std::string> ignored;
  const auto skip = [&](const std::string& name, const at::Tensor& tensor) {
    if (auto entry = listed(options_.ignore, name)) {
      ignored.insert(*entry);
      return true;
    }
    return !tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second;
  };
  for (const auto& item : module_->named_parameters())
    if (!skip(item.key(), item.value()) && item.value().requires_grad())
      params_.push_back({.name = item.key(), .tensor = item.value()});
  for (const auto& item : module_->named_buffers())
    if (!skip(item.key(), item.value())) buffers_.emplace_back(item.key(), item.value());
  for (const auto& entry : options_.ignore)
    if (!ignored.contains(entry))
      throw ConfigError(
          fmt::format("ignore lists '{}', which is no parameter, buffer or submodule of the model", entry));
  if (const auto split = find_split(*module_)) {
    const auto& ranks = split->group.ranks();
    const auto common = std::count_if(ranks.begin(), ranks.end(), [&](int rank) {
      return std::find(group_.ranks().begin(), group_.ranks().end(), rank) != group_.ranks().end();
    });
    if (common > 1)
      throw ConfigError(
          fmt::format("'{}' is split over ranks {}, which DistributedDataParallel would take for replicas of "
                      "one another: "
                      "give it the group of those that have the same slices, such as mesh[\"dp\"]",
                      split->name, fmt::join(ranks, ", ")));
  }
  if (params_.empty())
    throw ConfigError(
        "the model has no parameter that requires a gradient: DistributedDataParallel has nothing to do");
}

// Where every rank can: one may have an allocator of its own.
void DdpReducer::agree_on_zero_copy() {
  const bool here = options_.zero_copy && options_.micro_batches == 1 && group_.backend(at::kCPU) == "shm" &&
                    caching_cpu_allocator_is_used();
  const auto all = group_.all_gather_values(static_cast<char>(here), {.tag = "ddp zero copy"});
  zero_copy_ = std::all_of(all.begin(), all.end(), [](char each) { return each != 0; });
  std::set<std::size_t> sizes;
  for (const auto& param : params_)
    if (may_be_in_place(param)) sizes.insert(param.tensor.nbytes());
  if (!sizes.empty()) shared_sizes_ = shared_sizes(sizes);
}

void DdpReducer::start() {
  if (!alone_) {
    verify();
    agree_on_zero_copy();
    if (options_.init_sync) broadcast_tensors(group_, parameters_and_buffers(), 0);
  }
  for (std::size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    param.accumulator = torch::autograd::impl::grad_accumulator(param.tensor);
    const auto self = weak_from_this();
    param.hook = param.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [self, i](const torch::autograd::variable_list& outputs,
                  const torch::autograd::variable_list& inputs) {
          if (auto reducer = self.lock()) reducer->on_gradient(i, inputs.empty() ? at::Tensor() : inputs[0]);
          return outputs;
        }));
    if (options_.micro_batches == 1) continue;
    auto before = std::make_unique<BeforeGradient>([self, i] {
      auto reducer = self.lock();
      if (!reducer) return;
      std::lock_guard lock(reducer->mutex_);
      if (reducer->in_round_ && reducer->round_.expired()) reducer->abandon_round();
      if (reducer->sync_) reducer->set_aside(reducer->params_[i]);
    });
    param.pre_hook = before.get();
    param.accumulator->add_pre_hook(std::move(before));
  }
}

DdpReducer::~DdpReducer() {
  for (auto& param : params_) {
    if (!param.accumulator) continue;
    param.accumulator->del_post_hook(param.hook);
    std::erase_if(param.accumulator->pre_hooks(),
                  [&](const auto& each) { return param.pre_hook && each.get() == param.pre_hook; });
  }
}

// Frozen parameters too: replicas are to be equal.
std::vector<at::Tensor> DdpReducer::parameters_and_buffers() const {
  std::vector<at::Tensor> tensors;
  for (const auto& item : module_->named_parameters())
    if (item.value().defined() && !listed(options_.ignore, item.key())) tensors.push_back(item.value());
  for (const auto& [name, buffer] : buffers_) tensors.push_back(buffer);
  return tensors;
}

void DdpReducer::verify() const {
  std::vector<std::string> lines = {fmt::format(
      "options: bucket_bytes {}, first_bucket_bytes {}, init_sync {}, broadcast_buffers {}, "
      "find_unused_parameters {}, "
      "static_graph {}, micro_batches {}, zero_copy {}, reduce_in_backward {}, check_replicas_every {}, "
      "ignore [{}]",
      options_.bucket_bytes, options_.first_bucket_bytes, options_.init_sync, options_.broadcast_buffers,
      options_.find_unused_parameters, options_.static_graph, options_.micro_batches, options_.zero_copy,
      options_.reduce_in_backward, options_.check_replicas_every, fmt::join(options_.ignore, ", "))};
  const auto describe = [&](const char* kind, const std::string& name, const at::Tensor& tensor) {
    lines.push_back(fmt::format("{} '{}': {} [{}] on {}", kind, name, c10::toString(tensor.scalar_type()),
                                fmt::join(tensor.sizes(), ", "),
                                c10::DeviceTypeName(tensor.device().type(), true)));
  };
  for (const auto& item : module_->named_parameters())
    if (item.value().defined() && !listed(options_.ignore, item.key()))
      describe(item.value().requires_grad() ? "parameter" : "frozen parameter", item.key(), item.value());
  for (const auto& [name, buffer] : buffers_) describe("buffer", name, buffer);
  require_same_lines(group_, lines, "DistributedDataParallel: models or options differ between ranks");
}

void DdpReducer::before_forward(std::int64_t samples) {
  if (!at::GradMode::is_enabled()) return;
  if (torch::autograd::get_current_graph_task_id() == -1 && in_round_) abandon_round();
  if (no_sync_ > 0 && options_.micro_batches > 1)
    throw ConfigError(
        "no_sync() is not allowed with micro_batches above 1: both put off communication, use one of them");
  sync_ = no_sync_ == 0;
  samples_ += samples;
  if (shards_) shards_->note_versions();
  if (options_.reduce_in_backward && sync_) before_step();
}

void DdpReducer::before_step() {
  if (alone_ || joining_) return;
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
  for (const auto& output : outputs) {
    // A leaf would keep the hook for good; its gradient comes by itself.
    if (!output.defined() || !output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([self = weak_from_this(), sync = sync_](const at::Tensor& gradient) {
      if (auto reducer = self.lock()) reducer->on_output(sync);
      return gradient;
    });
  }
}

// A backward pass has come to what forward returned.
void DdpReducer::on_output(bool sync) {
  std::lock_guard lock(mutex_);
  if (in_round_ && round_.expired()) abandon_round();
  // Also of a pass that does not communicate: what it leaves is added to, and reduced later.
  if (shared_sizes_ != nullptr) share_tensors_of_this_pass(shared_sizes_);
  if (!sync) {
    unsynced_task_ = torch::autograd::get_current_graph_task_id();
    return;
  }
  if (in_round_ || !options_.reduce_in_backward) return;
  // autograd::grad, and backward of given tensors, may pass all parameters by; so does everything while they
  // are frozen. If one's gradient comes, it begins the round.
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  const bool all = wanted == nullptr || wanted->empty();
  if (all && std::any_of(params_.begin(), params_.end(),
                         [](const auto& param) { return param.tensor.requires_grad(); }))
    begin_round();
}

void DdpReducer::samples(std::int64_t count) {
  if (count < 0) throw ConfigError(fmt::format("{} samples are not allowed: 0 or more are", count));
  told_samples_ = count;
}

void DdpReducer::set_hook(CommHook hook) {
  if (buckets_made_ || rounds_ > 0)
    throw ConfigError(
        "a communication hook must be registered before the first backward pass, and before a "
        "DistributedOptimizer is made");
  if (hook_) throw ConfigError("a communication hook is registered already: one is allowed");
  hook_ = std::move(hook);
}

void DdpReducer::sync_buffers(int root) {
  if (alone_ || buffers_.empty()) return;
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
  in_round_ = true;
  if (shared_sizes_ != nullptr) share_tensors_of_this_pass(shared_sizes_);
  if (shards_ && micro_batch_ == 0) shards_->keep_gradients();
  auto running = std::make_shared<int>();  // gone with the pass, also where that ends early
  round_ = running;
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this(), running] {
    if (auto reducer = self.lock()) reducer->end_round();
  });
  const auto samples = std::exchange(samples_, 0);
  const auto told = std::exchange(told_samples_, std::nullopt);
  if (joining_ && !alone_) announce(told.value_or(samples), true);
}

// The pass before this one was left by an exception.
void DdpReducer::abandon_round() {
  const auto reduced = launched_;
  reset_round();
  forget_micro_batches(/*restore=*/false);  // gradients may have been zeroed meanwhile
  if (reduced > 0)
    throw Error(
        fmt::format("the backward pass before this one ended early, when {} of {} buckets had been given to "
                    "all_reduce: the ranks are "
                    "no longer in step. Make a new DistributedDataParallel on every rank (and a new "
                    "DistributedOptimizer, where there is one), or end the job",
                    reduced, buckets_.size()));
}

// restore: gradients are what they were before the first of them; else there are none.
void DdpReducer::forget_micro_batches(bool restore) {
  micro_batch_ = 0;
  for (auto& param : params_) {
    param.levels.clear();
    param.sum.reset();
    auto before = std::exchange(param.before, {});
    if (std::exchange(param.aside, false)) param.tensor.mutable_grad() = restore ? before : at::Tensor();
  }
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
    if (params_[bucket.params[0]].in_place) {  // the gradient has its memory alone
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
    throw ConfigError(
        fmt::format("backward() with create_graph reached parameter '{}': gradients of averaged gradients "
                    "are not supported. Call "
                    "the model itself, without DistributedDataParallel, for those",
                    param.name));
  if (!options_.reduce_in_backward) {
    if (shared_sizes_ != nullptr) share_tensors_of_this_pass(shared_sizes_);
    param.used = true;
    return;
  }
  if (in_round_ && round_.expired()) abandon_round();
  if (!in_round_ && (!sync_ || unsynced_task_ == torch::autograd::get_current_graph_task_id())) {
    param.used = true;
    return;
  }
  if (!in_round_) begin_round();
  ++param.fired;
  if (param.fired > param.expected) {
    if (options_.static_graph && !buckets_made_) {
      // How often is being learned.
    } else if (param.expected == 0) {
      throw ConfigError(fmt::format(
          "parameter '{}' got a gradient and got none in the first step: static_graph does not allow that",
          param.name));
    } else {
      throw ConfigError(fmt::format(
          "parameter '{}' was to be reduced twice in one backward pass: its gradient came {} times. {}",
          param.name, param.fired,
          options_.static_graph ? "In the first step it came less often, and static_graph does not allow that"
                                : "A backward inside backward does that: {.static_graph = true} allows it"));
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

// As a backward pass would that brings all at once.
void DdpReducer::reduce_now() {
  if (options_.reduce_in_backward)
    throw ConfigError(
        "reduce() is for {.reduce_in_backward = false}: here backward() has averaged the gradients");
  if (joining_) throw ConfigError("reduce() is not allowed inside join()");
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  in_round_ = true;
  if (shards_) shards_->keep_gradients();
  try {
    before_step();  // of the model as it is now: forward did not go through us
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
  } catch (...) {
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
  } catch (...) {
    reset_round();
    forget_micro_batches(/*restore=*/true);
    throw;
  }
  reset_round();
}

}  // namespace lockstep::detail
