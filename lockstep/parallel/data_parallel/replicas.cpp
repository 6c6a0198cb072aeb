#include <lockstep/parallel/data_parallel/replicas.h>

#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

namespace lockstep::detail {

using torch::nn::Module;

namespace {

// Restores the random generator after a replica's initialisation, so that later code draws the same numbers
// as without replicas.
class KeepRandomNumbers {
 public:
  KeepRandomNumbers() {
    std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~KeepRandomNumbers() {
    std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }

 private:
  at::Generator generator_ = at::detail::getDefaultCPUGenerator();
  at::Tensor state_;
};

std::string type_of(const Module& module) { return c10::demangle(typeid(module).name()); }

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.is_alias_of(b) && a.storage_offset() == b.storage_offset() &&
         a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// Copies values to a tensor on another device. Goes through an alias, so that graphs waiting for backward do
// not see a change when the values are equal.
void copy_values(const at::Tensor& from, const at::Tensor& to) {
  if (to.scalar_type() != from.scalar_type() || to.sizes() != from.sizes())
    to.set_data(at::empty_like(from.variable_data(), from.options().device(to.device())));
  to.variable_data().copy_(from.variable_data(), /*non_blocking=*/true);
}

// Shares the version counter, so that graphs that saved one tensor report in-place changes of the other.
void share_version(const at::Tensor& original, const at::Tensor& replica) {
  if (!original.is_inference() && !replica.is_inference())
    replica.unsafeGetTensorImpl()->set_version_counter(original.unsafeGetTensorImpl()->version_counter());
}

void follow_tensor(const at::Tensor& original, const at::Tensor& replica) {
  if (replica.device() != original.device())
    copy_values(original, replica);
  else if (!same_memory(original, replica))
    replica.set_data(original.variable_data());
}

template <typename Dict>
auto tensors_of(const Dict& named) {
  std::vector<at::Tensor> tensors;
  for (const auto& each : named) tensors.push_back(each.value());
  return tensors;
}

bool same_tensors(const std::vector<at::Tensor>& now, const std::vector<at::Tensor>& then) {
  return std::equal(now.begin(), now.end(), then.begin(), then.end(),
                    [](const auto& a, const auto& b) { return a.is_same(b); });
}

[[noreturn]] void refuse(const Module& module, const std::string& why) {
  throw ConfigError(fmt::format("DataParallel: cannot replicate {}: {}", type_of(module), why));
}

// C++ programs usually tie weights by `decoder->weight = encoder->weight`, which does not register the tie.
template <typename Impl>
void tie_weight(const Module& original, Module& replica,
                const std::unordered_map<const at::TensorImpl*, at::Tensor>& leaf_of) {
  const auto* from = dynamic_cast<const Impl*>(&original);
  auto* to = dynamic_cast<Impl*>(&replica);
  if (!from || !to || !from->weight.defined()) return;
  if (const auto found = leaf_of.find(from->weight.unsafeGetTensorImpl()); found != leaf_of.end())
    to->weight = found->second;
}

}  // namespace

Replicas::Replicas(std::shared_ptr<Module> module, std::vector<at::Device> devices, Factory factory)
    : module_(std::move(module)), devices_(std::move(devices)), factory_(std::move(factory)) {
  replicate();
}

std::shared_ptr<Module> Replicas::replica_for(std::size_t index) const {
  if (factory_) {
    auto made = factory_();
    if (!made) throw ConfigError("DataParallel: make_replica returned no module");
    made->to(devices_[index]);
    return made;
  }
  try {
    return module_->clone(devices_[index]);
  } catch (const c10::Error& e) {
    const std::string text = e.what_without_backtrace();
    if (text.find("clone() has not been implemented") == std::string::npos) refuse(*module_, text);
    // The type named in LibTorch's text: the module itself or a submodule.
    auto type = type_of(*module_);
    if (const auto begin = text.find("implemented for "); begin != std::string::npos)
      type = text.substr(begin + 16, text.find(". Subclass") - begin - 16);
    throw ConfigError(fmt::format(
        "DataParallel: cannot replicate {0}, because it has no clone(). Derive it from "
        "torch::nn::Cloneable<{0}> instead of torch::nn::Module, and move what its constructor registers "
        "to `void reset() override`; or set {{.make_replica = [] {{ return std::make_shared<{0}>(); }}}}",
        type));
  }
}

// Pairs each parameter and buffer of the module with the replica's, and makes it share the module's memory.
void Replicas::pair(ReplicaSet& set, std::size_t index) const {
  auto& replica = set.replicas[index];
  if (typeid(*replica.module) != typeid(*module_))
    refuse(*module_, fmt::format("its replica is a {}", type_of(*replica.module)));
  replica.modules = replica.module->modules();
  if (replica.modules.size() != set.modules.size())
    refuse(*module_, fmt::format("it has {} submodules, but its replica has {}", set.modules.size() - 1,
                                 replica.modules.size() - 1));
  std::unordered_set<std::shared_ptr<Module>> others(set.modules.begin(), set.modules.end());
  for (std::size_t i = 0; i < index; ++i)
    others.insert(set.replicas[i].modules.begin(), set.replicas[i].modules.end());
  for (const auto& each : replica.modules)
    if (others.contains(each))
      refuse(*module_,
             fmt::format("its replicas share a {}; reset() or make_replica must make a new one each time",
                         type_of(*each)));

  // Both are in order of registration.
  const auto check = [&](const auto& ours, const auto& theirs, const char* what) {
    if (ours.keys() != theirs.keys())
      refuse(*module_, fmt::format("its {0} are {1}, but its replica's are {2}", what,
                                   fmt::join(ours.keys(), ", "), fmt::join(theirs.keys(), ", ")));
    for (std::size_t i = 0; i < ours.size(); ++i) {
      const auto &a = ours[i].value(), &b = theirs[i].value();
      if (a.is_same(b))
        refuse(*module_,
               fmt::format("its replica shares '{}'; reset() must register a new tensor", ours[i].key()));
      if (a.sizes() != b.sizes())
        refuse(*module_,
               fmt::format("its '{}' is {}, but its replica's is {}", ours[i].key(), a.sizes(), b.sizes()));
    }
  };
  const auto parameters = replica.module->named_parameters();
  const auto buffers = replica.module->named_buffers();
  check(module_->named_parameters(), parameters, "parameters");
  check(module_->named_buffers(), buffers, "buffers");

  std::unordered_map<const at::TensorImpl*, std::size_t> place;
  for (std::size_t i = 0; i < set.parameters.size(); ++i) place[set.parameters[i].unsafeGetTensorImpl()] = i;
  std::unordered_map<const at::TensorImpl*, at::Tensor> leaf_of;
  for (std::size_t i = 0; i < set.entries.size(); ++i) {
    const auto& original = set.entries[i];
    const auto& leaf = parameters[i].value();
    if (const auto [first, is_first] = leaf_of.emplace(original.unsafeGetTensorImpl(), leaf); !is_first) {
      if (leaf.is_same(first->second)) continue;  // The replica has the tie too.
      leaf.set_data(first->second.variable_data());
    }
    share_version(original, leaf);
    replica.leaves.push_back({leaf, place.at(original.unsafeGetTensorImpl())});
  }
  for (std::size_t i = 0; i < set.modules.size(); ++i) {
    tie_weight<torch::nn::LinearImpl>(*set.modules[i], *replica.modules[i], leaf_of);
    tie_weight<torch::nn::EmbeddingImpl>(*set.modules[i], *replica.modules[i], leaf_of);
    tie_weight<torch::nn::EmbeddingBagImpl>(*set.modules[i], *replica.modules[i], leaf_of);
  }
  replica.buffers = tensors_of(buffers);
  // The first replica shares the module's buffers; the other replicas have copies.
  if (index == 0)
    for (std::size_t i = 0; i < set.buffers.size(); ++i) share_version(set.buffers[i], replica.buffers[i]);
}

void Replicas::replicate() {
  check_devices();
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  KeepRandomNumbers keep;
  auto set = std::make_shared<ReplicaSet>();
  set->modules = module_->modules();
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& each : module_->named_parameters()) {
    set->entries.push_back(each.value());
    if (!seen.insert(each.value().unsafeGetTensorImpl()).second) continue;
    set->parameters.push_back(each.value());
    set->names.push_back(each.key());
  }
  for (const auto& each : module_->named_buffers()) {
    set->buffers.push_back(each.value());
    set->buffer_names.push_back(each.key());
  }
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    set->replicas.push_back({devices_[i], replica_for(i), {}, {}, {}});
    pair(*set, i);
    for (const auto& leaf : set->replicas[i].leaves)
      follow_tensor(set->parameters[leaf.parameter], leaf.tensor);
  }
  set_ = std::move(set);
}

bool Replicas::is_current() const {
  return same_tensors(module_->parameters(), set_->entries) &&
         same_tensors(module_->buffers(), set_->buffers) && module_->modules() == set_->modules;
}

void Replicas::check_devices() const {
  const auto check = [&](const auto& named, const char* what) {
    for (const auto& each : named)
      if (each.value().device() != devices_[0])
        throw ConfigError(
            fmt::format("DataParallel: the module's tensors must be on the first device, {0}, but its "
                        "{1} '{2}' is on {3}; call module->to({0})",
                        devices_[0].str(), what, each.key(), each.value().device().str()));
      else if (what[0] == 'b' && each.value().requires_grad())
        throw ConfigError(fmt::format(
            "DataParallel: buffer '{}' requires a gradient; register it as a parameter", each.key()));
  };
  check(module_->named_parameters(), "parameter");
  check(module_->named_buffers(), "buffer");
}

std::shared_ptr<ReplicaSet> Replicas::follow(std::size_t count) {
  if (!is_current()) replicate();
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  auto& set = *set_;
  bool in_place = true;
  for (const auto& each : set.parameters) in_place &= each.device() == devices_[0];
  for (const auto& each : set.buffers) in_place &= each.device() == devices_[0] && !each.requires_grad();
  if (!in_place) check_devices();
  for (std::size_t r = 0; r < count; ++r) {
    auto& replica = set.replicas[r];
    for (const auto& [leaf, parameter] : replica.leaves) {
      const auto& original = set.parameters[parameter];
      follow_tensor(original, leaf);
      if (leaf.requires_grad() != original.requires_grad()) leaf.set_requires_grad(original.requires_grad());
    }
    for (std::size_t i = 0; i < set.buffers.size(); ++i)
      if (r == 0)
        follow_tensor(set.buffers[i], replica.buffers[i]);
      else
        copy_values(set.buffers[i], replica.buffers[i]);
    // Parents come first, so that children with a different mode override what a parent's train() sets.
    for (std::size_t i = 0; i < set.modules.size(); ++i)
      if (const bool training = set.modules[i]->is_training(); replica.modules[i]->is_training() != training)
        replica.modules[i]->train(training);
  }
  return set_;
}

}  // namespace lockstep::detail
