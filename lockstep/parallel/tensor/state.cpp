#include <map>
#include <set>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/parallel/tensor_parallel.h>

namespace lockstep {
namespace {

std::vector<std::pair<std::string, at::Tensor>> named_tensors(torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& each : module.named_parameters()) tensors.emplace_back(each.key(), each.value());
  for (const auto& each : module.named_buffers()) tensors.emplace_back(each.key(), each.value());
  return tensors;
}

using ShardOf = std::map<const at::TensorImpl*, TensorShard>;
ShardOf shards_by_tensor(torch::nn::Module& module) {
  ShardOf shards;
  for (auto& shard : tensor_shards(module)) shards.emplace(shard.parameter.unsafeGetTensorImpl(), shard);
  return shards;
}

const TensorShard* find(const ShardOf& shards, const at::Tensor& tensor) {
  const auto found = shards.find(tensor.unsafeGetTensorImpl());
  return found == shards.end() ? nullptr : &found->second;
}

at::Tensor whole_of(const TensorShard& shard) {
  const auto mine = shard.parameter.detach();
  const auto parts = mine.unflatten(shard.dim, {shard.parts, mine.size(shard.dim) / shard.parts});
  return detail::joined(parts, shard.group, shard.dim + 1).flatten(shard.dim, shard.dim + 1);
}

}  // namespace

std::vector<TensorShard> tensor_shards(torch::nn::Module& module) {
  std::vector<TensorShard> found;
  std::set<const at::TensorImpl*> seen;
  const auto add = [&](torch::nn::Module& each, const std::string& prefix) {
    const auto* slot = detail::slot_of(&each);
    const auto* holder = dynamic_cast<detail::HoldsShards*>(&each);
    if (!holder && slot) holder = dynamic_cast<detail::HoldsShards*>(slot->attachment.get());
    if (!holder) return;
    for (auto& shard : holder->shards())
      if (seen.insert(shard.parameter.unsafeGetTensorImpl()).second)
        found.push_back({prefix + shard.name, shard.parameter, shard.dim, shard.parts, shard.group});
  };
  add(module, "");
  for (const auto& each : module.named_modules("", /*include_self=*/false))
    add(*each.value(), each.key() + ".");
  return found;
}

std::vector<at::Tensor> own_parameters(torch::nn::Module& module, const Group& group,
                                       const std::vector<at::Tensor>& parameters) {
  if (group.rank() == 0) return parameters;
  const auto shards = shards_by_tensor(module);
  std::vector<at::Tensor> own;
  for (const auto& parameter : parameters)
    if (find(shards, parameter)) own.push_back(parameter);
  return own;
}

FullState full_state(torch::nn::Module& module) {
  const auto shards = shards_by_tensor(module);
  FullState state;
  for (const auto& [name, tensor] : named_tensors(module)) {
    const auto* shard = find(shards, tensor);
    const bool split = shard && shard->group.size() > 1;
    state.emplace_back(name, split ? whole_of(*shard) : tensor.detach().clone());
  }
  return state;
}

void load_full_state(torch::nn::Module& module, const FullState& state) {
  const auto shards = shards_by_tensor(module);
  const auto tensors = named_tensors(module);
  std::map<std::string, at::Tensor> given;
  std::vector<std::string> problems;
  for (const auto& [name, tensor] : state)
    if (!given.emplace(name, tensor).second) problems.push_back(fmt::format("'{}' was given twice", name));
  std::set<std::string> known;
  for (const auto& [name, tensor] : tensors) {
    known.insert(name);
    const auto found = given.find(name);
    if (found == given.end() || !found->second.defined()) {
      problems.push_back(fmt::format("'{}' is missing", name));
      continue;
    }
    auto sizes = tensor.sizes().vec();
    if (const auto* shard = find(shards, tensor))
      sizes[static_cast<std::size_t>(shard->dim)] *= shard->group.size();
    if (found->second.sizes() != sizes)
      problems.push_back(fmt::format("'{}': expected shape [{}], got [{}]", name, fmt::join(sizes, ", "),
                                     fmt::join(found->second.sizes(), ", ")));
    if (found->second.scalar_type() != tensor.scalar_type())
      problems.push_back(fmt::format("'{}': expected {}, got {}", name, at::toString(tensor.scalar_type()),
                                     at::toString(found->second.scalar_type())));
  }
  for (const auto& [name, tensor] : given)
    if (!known.contains(name)) problems.push_back(fmt::format("the module has no '{}'", name));
  if (!problems.empty())
    throw ConfigError(fmt::format("load_full_state: nothing was loaded: {}", fmt::join(problems, "; ")));
  torch::NoGradGuard no_grad;
  for (auto [name, tensor] : tensors) {
    const auto* shard = find(shards, tensor);
    const auto& whole = given.at(name);
    tensor.copy_(shard ? detail::own_slice(whole, shard->group, shard->dim, shard->parts) : whole);
  }
}

}  // namespace lockstep
