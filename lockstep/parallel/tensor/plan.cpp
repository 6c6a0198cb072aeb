#include <lockstep/parallel/tensor/plan.h>

#include <algorithm>
#include <map>
#include <typeinfo>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/nn/dropout.h>
#include <lockstep/nn/linear.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

namespace lockstep::detail {
namespace {

using torch::nn::EmbeddingImpl;
using torch::nn::LayerNormImpl;
using Problems = std::vector<std::string>;

void collect(const std::shared_ptr<torch::nn::Module>& module, const Place& place,
             std::vector<Target>& found) {
  const auto known =
      std::find_if(found.begin(), found.end(), [&](const auto& each) { return each.module == module; });
  if (known != found.end()) {
    known->places.push_back(place);
  } else {
    found.push_back(Target{place.name, {}, {}, module, {place}, {}});
  }
  for (const auto& child : module->named_children())
    collect(child.value(),
            {place.name.empty() ? child.key() : place.name + "." + child.key(),
             dynamic_cast<torch::nn::SequentialImpl*>(module.get()), child.key()},
            found);
}

// The type's name as written in a program.
std::string kind_of(torch::nn::Module& module) {
  if (dynamic_cast<torch::nn::LinearImpl*>(&module)) return "torch::nn::Linear";
  if (dynamic_cast<EmbeddingImpl*>(&module)) return "torch::nn::Embedding";
  if (dynamic_cast<LayerNormImpl*>(&module)) return "torch::nn::LayerNorm";
  if (dynamic_cast<nn::RMSNormImpl*>(&module)) return "lockstep::nn::RMSNorm";
  if (dynamic_cast<nn::DropoutImpl*>(&module)) return "lockstep::nn::Dropout";
  auto name = module.name();
  if (name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

bool can_be_split(torch::nn::Module& module) {
  return dynamic_cast<torch::nn::LinearImpl*>(&module) || dynamic_cast<EmbeddingImpl*>(&module) ||
         dynamic_cast<LayerNormImpl*>(&module) || dynamic_cast<nn::RMSNormImpl*>(&module) ||
         dynamic_cast<nn::DropoutImpl*>(&module);
}

// True if the module computes what its kind computes. A class derived from a layer may override forward.
bool is_plain(torch::nn::Module& module) {
  const auto* slot = slot_of(&module);
  const auto& forward = slot ? slot->forward_of() : typeid(module);
  for (const auto* known : {&typeid(torch::nn::LinearImpl), &typeid(nn::LinearImpl), &typeid(EmbeddingImpl),
                            &typeid(LayerNormImpl), &typeid(nn::RMSNormImpl), &typeid(nn::DropoutImpl)})
    if (forward == *known) return true;
  return false;
}

std::string advice(torch::nn::Module& module, const ParallelStyle& style) {
  if (dynamic_cast<torch::nn::DropoutImpl*>(&module))
    return "its masks depend on the layout; use lockstep::nn::Dropout";
  if (std::holds_alternative<SequenceParallel>(style))
    return "SequenceParallel is for LayerNorm, lockstep::nn::RMSNorm and lockstep::nn::Dropout";
  return "Colwise and Rowwise are for Linear and Embedding";
}

void add_split(Target& target, const Group& group, const char* parameter, const at::Tensor& tensor,
               std::int64_t dim, int parts, const char* what, Problems& problems) {
  if (!tensor.defined()) return;
  target.splits.push_back({parameter, tensor, dim, parts});
  if (parts < 1) {
    problems.push_back(fmt::format("'{}': expected parts of at least 1, got {}", target.name, parts));
  } else if (tensor.size(dim) % (static_cast<std::int64_t>(parts) * group.size()) != 0) {
    problems.push_back(fmt::format("'{}' has {} {}, which {} ranks cannot split{} evenly", target.name,
                                   tensor.size(dim), what, group.size(),
                                   parts > 1 ? fmt::format(" in {} parts", parts) : ""));
  }
}

void plan_linear(Target& target, const torch::nn::LinearImpl& linear, const Group& group,
                 Problems& problems) {
  if (const auto* colwise = std::get_if<Colwise>(&target.style)) {
    const auto before = problems.size();
    add_split(target, group, "weight", linear.weight, 0, colwise->parts, "output features", problems);
    if (problems.size() > before) return;  // The bias has the same problems.
    add_split(target, group, "bias", linear.bias, 0, colwise->parts, "output features", problems);
  } else {
    add_split(target, group, "weight", linear.weight, 1, 1, "input features", problems);
  }
}

void plan_embedding(Target& target, const EmbeddingImpl& embedding, const Group& group, Problems& problems) {
  const auto& options = embedding.options;
  const auto refuse = [&](const char* what) {
    problems.push_back(fmt::format("'{}' is an Embedding with {}, which cannot be {}", target.name, what,
                                   shown(target.style)));
  };
  if (options.max_norm()) refuse("max_norm");
  if (const auto* colwise = std::get_if<Colwise>(&target.style)) {
    if (colwise->sequence_dim) refuse("whole indices");
    add_split(target, group, "weight", embedding.weight, 1, colwise->parts, "columns", problems);
  } else {
    if (options.scale_grad_by_freq()) refuse("scale_grad_by_freq");
    if (options.sparse()) refuse("sparse gradients");
    add_split(target, group, "weight", embedding.weight, 0, 1, "embeddings", problems);
  }
}

void plan_target(Target& target, const Group& group, Problems& problems) {
  auto& module = *target.module;
  auto* slot = slot_of(&module);
  if (slot && slot->attachment) {
    problems.push_back(fmt::format("'{}' already has {} attached", target.name, slot->attachment->what()));
    return;
  }
  const bool sequence = std::holds_alternative<SequenceParallel>(target.style);
  const auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module);
  const auto* embedding = dynamic_cast<EmbeddingImpl*>(&module);
  if (dynamic_cast<HoldsShards*>(&module) || dynamic_cast<CommunicatesInForward*>(&module) ||
      !can_be_split(module) || sequence == (linear || embedding)) {
    problems.push_back(fmt::format("'{}' is a {}, which cannot be {}: {}", target.name, kind_of(module),
                                   shown(target.style), advice(module, target.style)));
    return;
  }
  if (!is_plain(module)) {
    problems.push_back(fmt::format(
        "'{}' is a class derived from {}, whose own forward would be bypassed{}", target.name,
        kind_of(module), slot ? "" : "; if it does not override forward, hold it as a lockstep::Unit"));
    return;
  }
  if (linear) plan_linear(target, *linear, group, problems);
  if (embedding) plan_embedding(target, *embedding, group, problems);
  if (slot || dynamic_cast<nn::DropoutImpl*>(&module)) return;
  for (const auto& place : target.places)
    if (!place.sequence)
      problems.push_back(fmt::format(
          "'{}' is a plain member, whose call C++ binds statically; hold it as lockstep::Unit<{}>",
          place.name.empty() ? "the module itself" : place.name, kind_of(module)));
}

// Reports tensors that several layers share but that would be split differently.
void check_ties(const std::vector<Target>& found, const std::vector<Target>& targets, Problems& problems) {
  struct Use {
    std::string name;
    const Split* split;  // Null: not split.
  };
  std::map<const at::TensorImpl*, std::vector<Use>> uses;
  const auto add = [&](const Target& owner, const std::string& parameter, const at::Tensor& tensor) {
    const auto target = std::find_if(targets.begin(), targets.end(),
                                     [&](const auto& each) { return each.module == owner.module; });
    const Split* split = nullptr;
    if (target != targets.end())
      for (const auto& each : target->splits)
        if (each.tensor.is_same(tensor)) split = &each;
    uses[tensor.unsafeGetTensorImpl()].push_back({owner.name + "." + parameter, split});
  };
  for (const auto& each : found)
    for (const auto& parameter : each.module->named_parameters(/*recurse=*/false))
      add(each, parameter.key(), parameter.value());
  // A weight tied by assigning to a member may not be registered anywhere.
  for (const auto& each : found) {
    if (const auto* linear = dynamic_cast<torch::nn::LinearImpl*>(each.module.get()))
      add(each, "weight", linear->weight);
    if (const auto* embedding = dynamic_cast<EmbeddingImpl*>(each.module.get()))
      add(each, "weight", embedding->weight);
  }
  for (const auto& [tensor, all] : uses)
    for (const auto& use : all) {
      const auto& first = all.front();
      const bool alike =
          (use.split == nullptr) == (first.split == nullptr) &&
          (!use.split || (use.split->dim == first.split->dim && use.split->parts == first.split->parts));
      if (!alike)
        problems.push_back(fmt::format("'{}' and '{}' are one tensor, but would be split differently",
                                       first.name, use.name));
    }
}

// Reports parameters used by an autograd graph, which knows their old shape.
void check_unused(const std::vector<Target>& targets, Problems& problems) {
  for (const auto& target : targets)
    for (const auto& split : target.splits)
      if (split.tensor.requires_grad() && torch::autograd::impl::try_get_grad_accumulator(split.tensor))
        problems.push_back(
            fmt::format("'{}.{}' is already in use by a graph, a hook or DistributedDataParallel; call "
                        "parallelize_module before those",
                        target.name, split.parameter));
}

}  // namespace

std::string shown(const ParallelStyle& style) {
  std::vector<std::string> parts;
  const auto dim = [&](const std::optional<std::int64_t>& given) {
    if (given) parts.push_back(fmt::format("sequence_dim = {}", *given));
  };
  const char* name = "SequenceParallel";
  if (const auto* colwise = std::get_if<Colwise>(&style)) {
    name = "Colwise";
    if (colwise->gather_output) parts.emplace_back("gather_output");
    dim(colwise->sequence_dim);
    if (colwise->parts != 1) parts.push_back(fmt::format("parts = {}", colwise->parts));
  } else if (const auto* rowwise = std::get_if<Rowwise>(&style)) {
    name = "Rowwise";
    if (!rowwise->input_is_parallel) parts.emplace_back("whole input");
    dim(rowwise->sequence_dim);
  } else {
    parts.push_back(fmt::format("dim = {}", std::get<SequenceParallel>(style).dim));
  }
  return fmt::format("{}{{{}}}", name, fmt::join(parts, ", "));
}

ResolvedPlan resolve(torch::nn::Module& module, const Group& group, const ParallelPlan& plan) {
  // A module that its owner holds by value has no shared_ptr, so this one owns nothing.
  const std::shared_ptr<torch::nn::Module> root(std::shared_ptr<void>(), &module);
  std::vector<Target> found;
  collect(root, {"", nullptr, ""}, found);
  ResolvedPlan resolved;
  auto& [targets, problems] = resolved;
  for (const auto& [pattern, style] : plan) {
    bool hit = false;
    for (const auto& each : found) {
      const auto place = std::find_if(each.places.begin(), each.places.end(),
                                      [&](const auto& one) { return name_matches(pattern, one.name); });
      if (place == each.places.end()) continue;
      hit = true;
      const auto known = std::find_if(targets.begin(), targets.end(),
                                      [&](const auto& one) { return one.module == each.module; });
      if (known == targets.end()) {
        targets.push_back(Target{place->name, pattern, style, each.module, each.places, {}});
      } else if (shown(known->style) != shown(style)) {
        problems.push_back(fmt::format("'{}' is {} by '{}' and {} by '{}'", place->name, shown(known->style),
                                       known->pattern, shown(style), pattern));
      }
    }
    if (hit) continue;
    std::vector<std::string> names;
    for (const auto& each : found)
      if (can_be_split(*each.module) && !each.name.empty()) names.push_back(each.name);
    if (names.size() > 12) {
      names.resize(12);
      names.emplace_back("...");
    }
    problems.push_back(
        fmt::format("'{}' matches no module (available: {})", pattern, fmt::join(names, ", ")));
  }
  for (auto& target : targets) plan_target(target, group, problems);
  check_ties(found, targets, problems);
  check_unused(targets, problems);
  return resolved;
}

}  // namespace lockstep::detail
