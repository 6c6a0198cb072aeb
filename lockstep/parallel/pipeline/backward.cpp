#include <lockstep/parallel/pipeline/backward.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/unit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::detail {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Captures the gradients that reach a node, after all other hooks have run.
struct Catch : FunctionPreHook {
  explicit Catch(variable_list& given) : arrived(given) {}
  variable_list operator()(const variable_list& gradients) override {
    arrived = gradients;
    return gradients;
  }
  variable_list& arrived;
};

// Runs on the thread that executes the backward pass.
struct MakesContextCurrent : FunctionPreHook {
  explicit MakesContextCurrent(at::Device given) : device(given) {}
  variable_list operator()(const variable_list& gradients) override {
    make_context_current(device);
    return gradients;
  }
  const at::Device device;
};

// Disables a node's hooks, because they have already run for the gradients about to be passed to it.
class WithoutHooks {
 public:
  explicit WithoutHooks(Node& node) : node_(node) { swap(); }
  WithoutHooks(const WithoutHooks&) = delete;
  WithoutHooks& operator=(const WithoutHooks&) = delete;
  ~WithoutHooks() { swap(); }

 private:
  void swap() {
    std::swap(node_.pre_hooks(), pre_hooks_);
    std::swap(node_.tensor_pre_hooks(), tensor_hooks_);
    std::swap(node_.retains_grad_hooks(), retaining_);
    std::swap(node_.post_hooks(), post_hooks_);
  }
  Node& node_;
  std::vector<std::unique_ptr<FunctionPreHook>> pre_hooks_, tensor_hooks_;
  std::remove_reference_t<decltype(std::declval<Node&>().retains_grad_hooks())> retaining_;
  std::vector<std::unique_ptr<FunctionPostHook>> post_hooks_;
};

// For each node below the roots: whether an input can be reached from it. Visits a node after everything that
// it leads to.
struct Ways {
  explicit Ways(const edge_list& roots, const std::unordered_set<Node*>& inputs) {
    std::vector<std::pair<Node*, std::size_t>> path;
    const auto enter = [&](Node* node) {
      if (node != nullptr && to_input.emplace(node, inputs.contains(node)).second) path.emplace_back(node, 0);
    };
    for (const auto& root : roots) {
      enter(root.function.get());
      while (!path.empty()) {
        auto& [node, next] = path.back();
        const auto& edges = node->next_edges();
        if (next < edges.size()) {
          enter(edges[next++].function.get());
          continue;
        }
        bool& leads = to_input[node];
        for (const auto& edge : edges) leads = leads || (edge.is_valid() && to_input.at(edge.function.get()));
        path.pop_back();
      }
    }
  }
  std::unordered_map<Node*, bool> to_input;
};

// Collects the leaves below a node from which no input can be reached.
void collect_leaves(const Edge& from, std::unordered_set<Node*>& seen, edge_list& leaves) {
  std::vector<Edge> open = {from};
  while (!open.empty()) {
    const auto edge = open.back();
    open.pop_back();
    if (!edge.is_valid() || !seen.insert(edge.function.get()).second) continue;
    if (dynamic_cast<AccumulateGrad*>(edge.function.get()) != nullptr) leaves.push_back(edge);
    for (const auto& next : edge.function->next_edges()) open.push_back(next);
  }
}

}  // namespace

void make_context_current(at::Device device) {
  thread_local std::unordered_set<int> current;
  if (!device.is_cuda() || !current.insert(device.index()).second) return;
  const c10::DeviceGuard guard(device);  // does not call CUDA where that is the thread's device already
  const c10::impl::VirtualGuardImpl cuda(device.type());
  static_cast<void>(cuda.queryStream(cuda.getStreamFromGlobalPool(device)));
}

PipelineBackward::PipelineBackward(const std::vector<at::Tensor>& outputs,
                                   const std::vector<at::Tensor>& gradients, std::vector<at::Tensor> inputs) {
  LOCKSTEP_ASSERT(outputs.size() == gradients.size(), "expected one gradient per output, defined or not");
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined() || !outputs[i].requires_grad() || !gradients[i].defined()) continue;
    roots_.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
    gradients_.push_back(gradients[i]);
    if (const auto device = gradients[i].device(); device.is_cuda() && !outputs[i].is_leaf())
      roots_.back().function->add_pre_hook(std::make_unique<MakesContextCurrent>(device));
  }
  for (auto& input : inputs)
    if (input.defined() && input.requires_grad()) inputs_.push_back(std::move(input));
}

void PipelineBackward::whole() {
  if (roots_.empty()) return;
  Engine::get_default_engine().execute(roots_, gradients_, /*keep_graph=*/false, /*create_graph=*/false,
                                       /*accumulate_grad=*/true);
}

void PipelineBackward::find_branches() {
  std::unordered_set<Node*> inputs;
  for (const auto& input : inputs_) inputs.insert(torch::autograd::impl::grad_accumulator(input).get());
  Ways ways(roots_, inputs);
  std::unordered_map<Node*, int> branches_to;
  const auto add = [&](Branch branch) {
    if (branch.weights.empty()) return;
    for (const auto& leaf : branch.weights) ++branches_to[leaf.function.get()];
    branches_.push_back(std::move(branch));
  };
  // A root that reaches no input starts with the given gradients.
  std::unordered_set<Node*> begun;
  for (std::size_t i = 0; i < roots_.size(); ++i) {
    const auto& node = roots_[i].function;
    if (ways.to_input.at(node.get())) continue;
    if (!begun.insert(node.get()).second) continue;
    Branch branch{.node = node};
    branch.arrived.resize(node->num_inputs());
    for (std::size_t k = i; k < roots_.size(); ++k)
      if (roots_[k].function == node) {
        auto& place = branch.arrived[roots_[k].input_nr];
        place = place.defined() ? place + gradients_[k] : gradients_[k];
      }
    std::unordered_set<Node*> seen;
    collect_leaves({node, 0}, seen, branch.weights);
    add(std::move(branch));
  }
  // Hold the nodes by owning pointers, as edges do.
  std::unordered_set<Node*> visited;
  std::vector<NodePointer> open;
  for (const auto& root : roots_) open.push_back(root.function);
  while (!open.empty()) {
    const auto node = open.back();
    open.pop_back();
    if (!visited.insert(node.get()).second || !ways.to_input.at(node.get()) || inputs.contains(node.get()))
      continue;
    Branch branch{.node = node};
    std::unordered_set<Node*> seen;
    for (const auto& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      if (ways.to_input.at(edge.function.get()))
        open.push_back(edge.function);
      else
        collect_leaves(edge, seen, branch.weights);
    }
    add(std::move(branch));
  }
  // A weight reached from several branches would be counted twice, so it is handled early.
  std::unordered_set<Node*> early;
  for (auto& branch : branches_)
    std::erase_if(branch.weights, [&](const Edge& leaf) {
      if (branches_to.at(leaf.function.get()) == 1) return false;
      if (early.insert(leaf.function.get()).second) early_.push_back(leaf);
      return true;
    });
  std::erase_if(branches_, [](const Branch& branch) { return branch.weights.empty(); });
}

void PipelineBackward::input_part() {
  if (roots_.empty()) return;
  if (inputs_.empty()) return;  // Nothing is urgent: weight_part() does everything.
  find_branches();
  edge_list wanted = early_;
  for (const auto& input : inputs_) wanted.emplace_back(torch::autograd::impl::grad_accumulator(input), 0);
  // Only now, because branches no longer move.
  std::vector<FunctionPreHook*> catches;
  for (auto& branch : branches_) {
    if (!branch.arrived.empty()) {
      catches.push_back(nullptr);
      continue;
    }
    branch.hooked = true;
    auto hook = std::make_unique<Catch>(branch.arrived);
    catches.push_back(hook.get());
    branch.node->add_pre_hook(std::move(hook));
  }
  const auto let_go = [&] {
    for (std::size_t i = 0; i < branches_.size(); ++i)
      std::erase_if(branches_[i].node->pre_hooks(),
                    [&](const auto& each) { return each.get() == catches[i]; });
  };
  try {
    Engine::get_default_engine().execute(roots_, gradients_, /*keep_graph=*/true, /*create_graph=*/false,
                                         /*accumulate_grad=*/true, wanted);
  } catch (...) {
    let_go();
    throw;
  }
  let_go();
  split_ = true;
  inputs_.clear();
}

void PipelineBackward::weight_part() {
  if (!split_) return whole();
  const WeightPart unwatched;
  for (auto& branch : branches_) {
    edge_list roots;
    variable_list gradients;
    for (std::size_t i = 0; i < branch.arrived.size(); ++i) {
      if (!branch.arrived[i].defined()) continue;
      roots.emplace_back(branch.node, static_cast<std::uint32_t>(i));
      gradients.push_back(std::move(branch.arrived[i]));
    }
    if (roots.empty()) continue;
    std::optional<WithoutHooks> once;
    if (branch.hooked) once.emplace(*branch.node);
    Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/true, /*create_graph=*/false,
                                         /*accumulate_grad=*/true, branch.weights);
  }
  branches_.clear();
}

}  // namespace lockstep::detail
