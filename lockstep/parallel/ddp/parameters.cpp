// Selects the parameters that DistributedDataParallel reduces: finds them, compares them between ranks, hooks
// them, and updates the selection when the program changes the model.
#include <algorithm>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/cpu_memory.h>
#include <lockstep/modules/detail/unready_gradient.h>
#include <lockstep/modules/replicas.h>
#include <lockstep/modules/unit.h>
#include <lockstep/parallel/ddp/reducer.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

namespace lockstep::detail {
namespace {

DdpOptions checked_ddp_options(DdpOptions options) {
  if (options.bucket_bytes <= 0 || options.first_bucket_bytes <= 0)
    throw ConfigError(
        fmt::format("DdpOptions: bucket_bytes and first_bucket_bytes must be positive, got {} and {}",
                    options.bucket_bytes, options.first_bucket_bytes));
  if (options.micro_batches < 1)
    throw ConfigError(
        fmt::format("DdpOptions::micro_batches: expected at least 1, got {}", options.micro_batches));
  if (options.micro_batches > 1 && options.static_graph)
    throw ConfigError(
        "DdpOptions: static_graph cannot be combined with micro_batches above 1, because it would miscount "
        "how often a parameter gets a gradient");
  if (!options.reduce_in_backward && (options.static_graph || options.micro_batches > 1))
    throw ConfigError(
        "DdpOptions: reduce_in_backward = false cannot be combined with static_graph or with micro_batches "
        "above 1: both describe a single backward pass");
  if (options.check_replicas_every < 0)
    throw ConfigError(fmt::format("DdpOptions::check_replicas_every: expected at least 0 (0: never), got {}",
                                  options.check_replicas_every));
  return options;
}

// Runs a callback before autograd adds a gradient to p.grad().
struct BeforeGradient : torch::autograd::FunctionPreHook {
  explicit BeforeGradient(std::function<void()> given) : call(std::move(given)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    call();
    return gradients;
  }
  std::function<void()> call;
};

// Registry of the parameters that any DistributedDataParallel of this process reduces. Thread-safe.
class ReducedParameters {
 public:
  void add(const at::Tensor& parameter) {
    std::lock_guard lock(mutex_);
    ++counts_[parameter.unsafeGetTensorImpl()];
  }
  void remove(const at::Tensor& parameter) {
    std::lock_guard lock(mutex_);
    const auto found = counts_.find(parameter.unsafeGetTensorImpl());
    if (found != counts_.end() && --found->second == 0) counts_.erase(found);
  }
  bool contain(const at::Tensor& parameter) {
    std::lock_guard lock(mutex_);
    return counts_.contains(parameter.unsafeGetTensorImpl());
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, int> counts_;
};
ReducedParameters& reduced_parameters() {
  static ReducedParameters all;
  return all;
}

// LibTorch's own accessors of a module's parameters make copies.
struct RegisteredParameters : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& of(const torch::nn::Module& module) {
    return module.*(&RegisteredParameters::parameters_);
  }
};

// Calls tell(address) for each module, and for each parameter registered in it.
template <typename Tell>
void for_each_part(const torch::nn::Module& module, Tell tell) {
  module.apply([&](const torch::nn::Module& each) {
    tell(static_cast<const void*>(&each));
    for (const auto& item : RegisteredParameters::of(each))
      tell(static_cast<const void*>(item.value().unsafeGetTensorImpl()));
  });
}

const void* accumulator_of(const at::Tensor& parameter) {
  return torch::autograd::impl::try_get_grad_accumulator(parameter).get();
}

// The storage, by its address; null: it has none.
const void* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

torch::autograd::Edge edge_into(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                                    : torch::autograd::Edge();
}

}  // namespace

DdpReducer::DdpReducer(std::shared_ptr<torch::nn::Module> module, Group group, DdpOptions options)
    : module_(std::move(module)),
      group_(std::move(group)),
      options_(checked_ddp_options(std::move(options))),
      alone_(group_.size() == 1),
      check_every_graph_(env::flag("LOCKSTEP_CHECK", false)) {
  find_parameters();
  if (const auto split = find_split(*module_)) {
    const auto& ranks = split->group.ranks();
    const auto common = std::count_if(ranks.begin(), ranks.end(), [&](int rank) {
      return std::find(group_.ranks().begin(), group_.ranks().end(), rank) != group_.ranks().end();
    });
    if (common > 1)
      throw ConfigError(fmt::format(
          "DistributedDataParallel: '{}' is split over ranks {}, which are not replicas of one another. "
          "Pass the group of the ranks that hold the same slices, such as mesh[\"dp\"]",
          split->name, fmt::join(ranks, ", ")));
  }
}

DdpReducer::~DdpReducer() {
  clear_unready_gradients();
  remove_hooks();
}

void DdpReducer::start() {
  compare_and_synchronize();
  install_hooks();
}

void DdpReducer::find_parameters() {
  params_.clear();
  watched_.clear();
  buffers_.clear();
  std::set<const void*> seen;  // A tensor shared by two modules counts once, by its first name.
  std::set<std::string> ignored;
  const auto skip = [&](const std::string& name, const at::Tensor& tensor) {
    if (auto entry = listed(options_.ignore, name)) {
      ignored.insert(*entry);
      return true;
    }
    return !tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second;
  };
  for (const auto& item : module_->named_parameters()) {
    if (skip(item.key(), item.value())) continue;
    watched_.push_back({item.key(), item.value(), item.value().requires_grad()});
    if (item.value().requires_grad()) params_.push_back({.name = item.key(), .tensor = item.value()});
  }
  for (const auto& item : module_->named_buffers())
    if (!skip(item.key(), item.value())) buffers_.emplace_back(item.key(), item.value());
  for (const auto& entry : options_.ignore)
    if (!ignored.contains(entry))
      throw ConfigError(
          fmt::format("DdpOptions::ignore: the model has no parameter, buffer or submodule '{}'", entry));
  if (params_.empty())
    throw ConfigError("DistributedDataParallel: the model has no parameter that requires a gradient");
}

void DdpReducer::compare_and_synchronize() {
  if (alone_) return;
  verify();
  if (!model_) model_.emplace(group_, module_->name());
  agree_on_zero_copy();
  if (options_.init_sync) broadcast_tensors(group_, parameters_and_buffers(), 0);
}

// Zero-copy needs every rank, because one may use another allocator.
void DdpReducer::agree_on_zero_copy() {
  const bool here = options_.zero_copy && options_.micro_batches == 1 && group_.backend(at::kCPU) == "shm" &&
                    caching_cpu_allocator_is_used();
  const auto all = group_.all_gather_values(static_cast<char>(here), {.tag = "ddp zero copy"});
  zero_copy_ = std::all_of(all.begin(), all.end(), [](char each) { return each != 0; });
  std::set<std::size_t> sizes;
  for (const auto& param : params_)
    if (may_be_in_place(param)) sizes.insert(param.tensor.nbytes());
  shared_sizes_ = sizes.empty() ? nullptr : shared_sizes(sizes);
}

void DdpReducer::install_hooks() {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    param.accumulator = torch::autograd::impl::grad_accumulator(param.tensor);
    reduced_parameters().add(param.tensor);
    const auto self = weak_from_this();
    param.hook = param.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [self, i](const torch::autograd::variable_list& outputs,
                  const torch::autograd::variable_list& inputs) {
          if (auto reducer = self.lock()) reducer->on_gradient(i, inputs.empty() ? at::Tensor() : inputs[0]);
          return outputs;
        }));
  }
  if (options_.micro_batches > 1) install_pre_hooks();
  for (auto& each : watched_) each.accumulator = each.requires_grad ? accumulator_of(each.tensor) : nullptr;
  structure_.clear();
  for_each_part(*module_, [&](const void* part) { structure_.push_back(part); });
  graph_checked_ = false;
}

// Installed only if p.grad() may be unready between passes, because autograd would read it.
void DdpReducer::install_pre_hooks() {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    if (param.pre_hook) continue;
    auto before = std::make_unique<BeforeGradient>([self = weak_from_this(), i] {
      if (auto reducer = self.lock()) reducer->before_gradient(i);
    });
    param.pre_hook = before.get();
    param.accumulator->add_pre_hook(std::move(before));
  }
}

void DdpReducer::remove_hooks() {
  for (auto& param : params_) {
    if (!param.accumulator) continue;
    param.accumulator->del_post_hook(param.hook);
    std::erase_if(param.accumulator->pre_hooks(),
                  [&](const auto& each) { return param.pre_hook && each.get() == param.pre_hook; });
    param.pre_hook = nullptr;
    param.accumulator = {};
    reduced_parameters().remove(param.tensor);
  }
}

// Includes frozen parameters, because replicas must be equal.
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

// ---- a model that the program changes ---------------------------------------------------------------------

// Describes the first difference from the model on which the hooks were installed; empty if there is none.
// Costs a few nanoseconds per module and parameter. torch::load and Module::to give a parameter a new
// accumulator; replace_module replaces a module.
std::string DdpReducer::model_change() const {
  std::size_t count = 0;
  bool same = true;
  for_each_part(*module_, [&](const void* part) {
    same = same && count < structure_.size() && structure_[count] == part;
    ++count;
  });
  if (!same || count != structure_.size()) return "a submodule or a parameter was added, removed or replaced";
  bool frozen = true;
  for (const auto& each : watched_) frozen = frozen && !each.tensor.requires_grad();
  if (frozen) return "";  // All frozen for the moment, as in a GAN, so no gradient will arrive.
  for (const auto& each : watched_) {
    if (each.tensor.requires_grad() != each.requires_grad)
      return fmt::format("parameter '{}' was {}", each.name, each.requires_grad ? "frozen" : "unfrozen");
    if (each.requires_grad && accumulator_of(each.tensor) != each.accumulator)
      return fmt::format(
          "the data of parameter '{}' was replaced, as by torch::load or "
          "Module::to",
          each.name);
  }
  return "";
}

// Reinstalls the hooks if the model has changed, so that its present parameters are reduced from now on.
// Every rank must call it.
void DdpReducer::follow_model() {
  const auto change = model_change();
  if (change.empty()) return;
  if (shards_)
    throw ConfigError(fmt::format(
        "{} after the DistributedOptimizer was constructed: construct a new DistributedDataParallel and a "
        "new DistributedOptimizer on every rank. lockstep::load may follow",
        change));
  const bool cleared = std::none_of(params_.begin(), params_.end(), [](const auto& param) {
    return unready_text(param.tensor.grad()) != nullptr;
  });
  if (cleared) prepare_gradients();  // zero_grad() has dropped the sum
  if (micro_batch_ > 0)
    throw ConfigError(
        fmt::format("{} after {} of {} micro-batches were summed: change the model after a complete step, or "
                    "call discard_micro_batches() first",
                    change, micro_batch_, options_.micro_batches));
  if (joining_) throw ConfigError(fmt::format("{} inside join(): change the model before join()", change));
  // Ranks whose model has not changed issue no barrier in a step, so no other call can match this one.
  if (!alone_) group_.barrier({.tag = fmt::format("ddp model change: {}", change)}).wait();
  std::set<const void*> used;
  for (const auto& param : params_)
    if (param.used) used.insert(param.tensor.unsafeGetTensorImpl());
  remove_hooks();
  structure_.clear();  // If the comparison below fails, the next call starts over.
  buckets_.clear();
  buckets_made_ = false;
  launched_ = 0;
  used_.clear();
  find_parameters();
  // The hooks did not see what passes inside no_sync() have left since the change.
  for (auto& param : params_)
    param.used = used.contains(param.tensor.unsafeGetTensorImpl()) || param.tensor.grad().defined();
  compare_and_synchronize();
  install_hooks();
}

// Throws ConfigError if the graph reaches a tensor that is neither a registered parameter nor an argument,
// because its gradient would not be averaged. The walk costs as much as a small backward pass, so only the
// first forward is checked, or every one with LOCKSTEP_CHECK=1.
void DdpReducer::check_graph(const std::vector<at::Tensor>& outputs) {
  namespace autograd = torch::autograd;
  std::unordered_set<autograd::Node*> seen;
  for (const auto& edge : input_edges_) seen.insert(edge.function.get());
  input_edges_.clear();
  const auto input_memory = std::exchange(input_memory_, {});
  std::unordered_set<const void*> known;
  for (const auto& parameter : module_->parameters())
    if (parameter.defined()) known.insert(parameter.unsafeGetTensorImpl());
  std::vector<autograd::Node*> open;
  const auto visit = [&](autograd::Node* node) {
    if (node && seen.insert(node).second) open.push_back(node);
  };
  for (const auto& output : outputs) visit(edge_into(output).function.get());
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    if (const auto* leaf = dynamic_cast<autograd::AccumulateGrad*>(node);
        leaf && !known.contains(leaf->variable.unsafeGetTensorImpl()) &&
        !reduced_parameters().contain(leaf->variable) && !input_memory.contains(storage_of(leaf->variable)))
      throw ConfigError(fmt::format(
          "DistributedDataParallel: forward uses a tensor of shape [{}] that requires a gradient and is neither a "
          "registered parameter nor an argument, so its gradient would not be averaged. Register it with "
          "register_parameter, or its module with register_module; pass it as an argument; or detach it",
          fmt::join(leaf->variable.sizes(), ", ")));
    for (const auto& next : node->next_edges()) visit(next.function.get());
  }
  graph_checked_ = true;
}

void DdpReducer::note_inputs(const std::vector<at::Tensor>& inputs) {
  input_edges_.clear();
  input_memory_.clear();
  if (graph_checked_ && !check_every_graph_) return;
  graph_checked_ = false;
  for (const auto& input : inputs) {
    if (auto edge = edge_into(input); edge.function) input_edges_.push_back(std::move(edge));
    if (const auto* memory = storage_of(input)) input_memory_.insert(memory);
  }
}

}  // namespace lockstep::detail
