#include <lockstep/parallel/data_parallel.h>

#include <atomic>
#include <mutex>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/group/error_text.h>
#include <lockstep/parallel/data_parallel/random.h>
#include <lockstep/parallel/data_parallel/replicas.h>
#include <lockstep/parallel/data_parallel/sum.h>
#include <lockstep/parallel/data_parallel/workers.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/nn/module.h>

namespace lockstep::detail {

namespace autograd = torch::autograd;
using Tensors = std::vector<at::Tensor>;

// One replica's share of a call: its own graph, from leaves to outputs.
struct ReplicaGraph {
  // Leaves of the replica's parameters, then of its inputs; invalid for those without a gradient.
  autograd::edge_list leaves;
  Tensors inputs, outputs;
};

// A call whose backward has not run yet.
struct ReplicaCall {
  std::shared_ptr<DataParallelState> state;
  std::shared_ptr<ReplicaSet> set;
  std::shared_ptr<ReplicaRandom> random;
  std::vector<ReplicaGraph> graphs;
  Tensors inputs;                     // The caller's inputs.
  std::vector<std::size_t> recorded;  // Indices of the outputs that are part of the caller's graph.
};

class DataParallelState : public std::enable_shared_from_this<DataParallelState> {
 public:
  DataParallelState(std::shared_ptr<torch::nn::Module> module, std::vector<at::Device> devices,
                    DataParallelOptions options);

  Tensors forward(const Tensors& inputs, bool has_arguments, const ReplicaForward& forward);
  // Maps gradients of the recorded outputs to those of the module's parameters and then the inputs, as far as
  // wanted.
  Tensors backward(const ReplicaCall& call, const Tensors& gradients, const std::vector<bool>& wanted,
                   bool keep_graph);

  void replicate();
  const std::vector<at::Device>& devices() const { return devices_; }

 private:
  Tensors forward_alone(const Tensors& inputs, const ReplicaForward& forward);
  std::vector<Tensors> scatter(const Tensors& inputs, bool has_arguments) const;
  TensorsOf run(ReplicaCall& call, std::size_t index, const Tensors& pieces, const ReplicaForward& forward);
  at::Tensor gather(std::size_t output, const Tensors& pieces);
  void record(const std::shared_ptr<ReplicaCall>& call, const Tensors& results);
  std::vector<Tensors> replica_gradients(const ReplicaCall& call, const Tensors& gradients,
                                         const std::vector<bool>& wanted, bool keep_graph);

  const std::shared_ptr<torch::nn::Module> module_;
  const std::vector<at::Device> devices_;
  const DataParallelOptions options_;
  std::atomic<bool> warned_of_scalars_ = false;
  std::mutex mutex_;  // Serialises forward: replicas may follow the module only between calls.
  std::optional<Replicas> replicas_;
  std::optional<ReplicaWorkers> workers_;
};

namespace {

// Size in bytes from which all workers sum gradients together.
constexpr std::size_t kSumTogether = 256 * 1024;

// Node for the backward of a call: passes each replica its part of the gradients, and returns the results to
// the module's parameters and the call's inputs, like any node of the caller's graph.
class DataParallelBackward : public autograd::Node {
 public:
  DataParallelBackward(autograd::edge_list edges, std::shared_ptr<ReplicaCall> call)
      : Node(std::move(edges)), call_(std::move(call)) {}

  std::string name() const override { return "DataParallelBackward"; }

  void release_variables() override {
    std::lock_guard lock(call_mutex_);
    call_.reset();
  }

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    if (at::GradMode::is_enabled())
      throw Error(
          "DataParallel: backward with create_graph = true is not supported, because replicas keep no "
          "graph of their gradients; call the module itself to compute gradients of gradients");
    std::shared_ptr<ReplicaCall> call;
    {
      std::lock_guard lock(call_mutex_);
      call = call_;
    }
    if (!call)
      throw Error(
          "DataParallel: backward ran a second time through a released graph; pass retain_graph = true to "
          "the first backward");
    std::vector<bool> wanted(num_outputs());
    for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = task_should_compute_output(i);
    return call->state->backward(*call, gradients, wanted, autograd::get_current_graph_task_keep_graph());
  }

 private:
  std::mutex call_mutex_;
  std::shared_ptr<ReplicaCall> call_;
};

// LibTorch changed how it counts references to nodes in one of its releases.
template <typename Pointer = decltype(autograd::Edge::function)>
Pointer make_node(autograd::edge_list edges, std::shared_ptr<ReplicaCall> call) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<autograd::Node>>)
    return Pointer(new DataParallelBackward(std::move(edges), std::move(call)),
                   [](auto* node) { deleteNode(node); });
  else
    return c10::make_intrusive<DataParallelBackward>(std::move(edges), std::move(call));
}

std::string shape_of(const at::Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.sizes(), ", "));
}

autograd::Edge edge_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() ? autograd::impl::gradient_edge(tensor)
                                                    : autograd::Edge();
}

// Throws if the graph reaches a tensor that is neither a parameter nor an argument, because its gradient
// would be lost.
void check_leaves(const ReplicaGraph& graph) {
  std::unordered_set<autograd::Node*> seen;
  for (const auto& leaf : graph.leaves) seen.insert(leaf.function.get());
  std::vector<autograd::Node*> open;
  const auto visit = [&](autograd::Node* node) {
    if (node && seen.insert(node).second) open.push_back(node);
  };
  for (const auto& output : graph.outputs) visit(edge_of(output).function.get());
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    if (const auto* leaf = dynamic_cast<autograd::AccumulateGrad*>(node))
      throw ConfigError(
          fmt::format("forward uses a tensor of shape {} that requires a gradient and is neither a "
                      "registered parameter nor an argument, so its gradient would be lost",
                      shape_of(leaf->variable)));
    for (const auto& next : node->next_edges()) visit(next.function.get());
  }
}

at::Device with_index(at::Device device) {
  if (device.is_cpu()) return at::Device(at::kCPU);
  if (!device.is_cuda())
    throw ConfigError(fmt::format("DataParallel: expected a cpu or cuda device, got {}", device.str()));
  if (!at::globalContext().hasCUDA())
    throw ConfigError(
        fmt::format("DataParallel: got {}, but this LibTorch finds no CUDA device", device.str()));
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  if (!device.has_index()) return cuda.getDevice();
  if (device.index() >= cuda.deviceCount())
    throw ConfigError(
        fmt::format("DataParallel: got {}, but there are {} CUDA devices", device.str(), cuda.deviceCount()));
  return device;
}

std::vector<at::Device> usable(std::vector<at::Device> devices) {
  if (devices.empty() && at::globalContext().hasCUDA()) {
    const auto count = c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount();
    for (c10::DeviceIndex i = 0; i < count; ++i) devices.emplace_back(at::kCUDA, i);
  }
  for (auto& device : devices) device = with_index(device);
  for (const auto device : devices)
    if (device.type() != devices[0].type())
      throw ConfigError(fmt::format("DataParallel: devices must be of one type, got {} and {}",
                                    devices[0].str(), device.str()));
  return devices;
}

DataParallelOptions checked(DataParallelOptions options, const std::vector<at::Device>& devices) {
  if (options.threads_per_replica < 0)
    throw ConfigError(
        fmt::format("DataParallel: threads_per_replica: expected at least 0 (0: automatic), got {}",
                    options.threads_per_replica));
  if (options.output_device)
    options.output_device = with_index(*options.output_device);
  else if (!devices.empty())
    options.output_device = devices[0];
  return options;
}

}  // namespace

DataParallelState::DataParallelState(std::shared_ptr<torch::nn::Module> module,
                                     std::vector<at::Device> devices, DataParallelOptions options)
    : module_(std::move(module)),
      devices_(usable(std::move(devices))),
      options_(checked(std::move(options), devices_)) {
  if (!module_) throw ConfigError("DataParallel: the module holder is empty (constructed from nullptr)");
  if (devices_.size() == 1) module_->to(devices_[0]);
  if (devices_.size() < 2) return;
  replicas_.emplace(module_, devices_, options_.make_replica);
  const int threads = std::max(1, at::get_num_threads() / static_cast<int>(devices_.size()));
  workers_.emplace(devices_, options_.threads_per_replica > 0 ? options_.threads_per_replica : threads);
}

void DataParallelState::replicate() {
  std::lock_guard lock(mutex_);
  if (replicas_) replicas_->replicate();
}

std::vector<Tensors> DataParallelState::scatter(const Tensors& inputs, bool has_arguments) const {
  at::NoGradGuard no_grad;
  std::vector<Tensors> pieces(has_arguments ? devices_.size() : 1, Tensors(inputs.size()));
  const auto place = [&](std::size_t i) {
    return fmt::format("DataParallel: tensor {} of the arguments", i);
  };
  std::optional<std::size_t> first;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;  // Undefined for every replica.
    const auto dims = inputs[i].dim();
    if (options_.dim >= dims || options_.dim < -dims)
      throw ConfigError(
          fmt::format("{} has shape {}, which cannot be split along dim {}; to pass the same value to "
                      "every replica, use a number or expand the tensor",
                      place(i), shape_of(inputs[i]), options_.dim));
    const auto chunks = inputs[i].chunk(static_cast<std::int64_t>(devices_.size()), options_.dim);
    if (first && chunks.size() != pieces.size())
      throw ConfigError(
          fmt::format("{} has shape {} and gives {} pieces along dim {}, but tensor {} of shape {} gives "
                      "{}; every replica needs a piece of each",
                      place(i), shape_of(inputs[i]), chunks.size(), options_.dim, *first,
                      shape_of(inputs[*first]), pieces.size()));
    if (!first) pieces.resize(chunks.size());
    if (!first) first = i;
    for (std::size_t r = 0; r < chunks.size(); ++r) pieces[r][i] = chunks[r];
  }
  return pieces;
}

// Runs on the replica's worker: forward, and recording of its graph.
TensorsOf DataParallelState::run(ReplicaCall& call, std::size_t index, const Tensors& pieces,
                                 const ReplicaForward& forward) {
  std::optional<ReplicaRandom::Guard> random;
  if (call.random) random.emplace(*call.random, index);
  auto& replica = call.set->replicas[index];
  Tensors inputs = pieces;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    inputs[i] = inputs[i].to(replica.device, /*non_blocking=*/true).detach();
    if (at::GradMode::is_enabled() && call.inputs[i].requires_grad()) inputs[i].requires_grad_();
  }
  auto found = forward(*replica.module, index, inputs);
  if (!at::GradMode::is_enabled()) return found;
  auto& graph = call.graphs[index];
  for (const auto& leaf : replica.leaves) graph.leaves.push_back(edge_of(leaf.tensor));
  for (const auto& input : inputs) graph.leaves.push_back(edge_of(input));
  graph.inputs = std::move(inputs);
  graph.outputs = found.tensors;
  check_leaves(graph);
  return found;
}

// Joins the pieces without their graphs, which belong to the replicas.
at::Tensor DataParallelState::gather(std::size_t output, const Tensors& pieces) {
  const auto undefined =
      std::count_if(pieces.begin(), pieces.end(), [](const auto& each) { return !each.defined(); });
  if (static_cast<std::size_t>(undefined) == pieces.size()) return {};
  const auto fail = [&](const std::string& why) -> void {
    std::vector<std::string> shapes;
    for (const auto& each : pieces) shapes.push_back(each.defined() ? shape_of(each) : "undefined");
    throw Error(fmt::format(
        "DataParallel: tensor {} of the results cannot be joined along dim {}: the replicas returned {}{}",
        output, options_.dim, fmt::join(shapes, ", "), why));
  };
  if (undefined) fail("");
  Tensors whole;
  bool scalars = true;
  for (const auto& each : pieces) {
    scalars &= each.dim() == 0;
    // With accelerators, pieces are moved to the output device outside the graph.
    whole.push_back(devices_[0].is_cpu() ? each.detach() : each.detach().to(*options_.output_device));
  }
  if (scalars) {
    if (options_.dim != 0 && options_.dim != -1) fail("");
    if (!warned_of_scalars_.exchange(true))
      log(LogLevel::warn,
          "DataParallel: tensor {} of the results is a scalar; the replicas' scalars are joined into a "
          "vector",
          output);
    for (auto& each : whole) each = each.view(1);
  }
  if (whole.size() == 1) return whole[0];
  try {
    return at::cat(whole, options_.dim);
  } catch (const c10::Error& e) {
    fail(fmt::format(": {}", e.what_without_backtrace()));
    throw;
  }
}

// Makes the results part of the caller's graph.
void DataParallelState::record(const std::shared_ptr<ReplicaCall>& call, const Tensors& results) {
  for (std::size_t i = 0; i < results.size(); ++i)
    for (const auto& graph : call->graphs)
      if (graph.outputs[i].defined() && graph.outputs[i].requires_grad()) {
        call->recorded.push_back(i);
        break;
      }
  if (call->recorded.empty()) return;
  autograd::edge_list edges;
  for (const auto& each : call->set->parameters) edges.push_back(edge_of(each));
  for (const auto& each : call->inputs) edges.push_back(edge_of(each));
  const auto node = make_node(std::move(edges), call);
  for (const auto i : call->recorded)
    autograd::impl::set_gradient_edge(results[i], {node, node->add_input_metadata(results[i])});
}

Tensors DataParallelState::forward_alone(const Tensors& inputs, const ReplicaForward& forward) {
  Tensors own = inputs;
  if (!devices_.empty())
    for (auto& each : own)
      if (each.defined()) each = each.to(devices_[0], /*non_blocking=*/true);
  auto found = forward(*module_, 0, own);
  if (options_.output_device)
    for (auto& each : found.tensors)
      if (each.defined()) each = each.to(*options_.output_device);
  return std::move(found.tensors);
}

Tensors DataParallelState::forward(const Tensors& inputs, bool has_arguments, const ReplicaForward& forward) {
  if (devices_.size() < 2) return forward_alone(inputs, forward);
  if (workers_->is_one_of_them())
    throw ConfigError("DataParallel: called from inside one of its own replicas");
  const auto pieces = scatter(inputs, has_arguments);
  const auto count = pieces.size();
  const auto call = std::make_shared<ReplicaCall>();
  call->state = shared_from_this();
  call->inputs = inputs;
  call->graphs.resize(count);
  if (devices_[0].is_cpu()) call->random = std::make_shared<ReplicaRandom>(count);
  std::vector<TensorsOf> found(count);
  {
    std::lock_guard lock(mutex_);
    call->set = replicas_->follow(count);
    const auto steps = dropout_steps(pieces, options_.dim);
    workers_->run(count, "forward", [&](std::size_t i) {
      std::optional<nn::DropoutScope> scope;
      if (steps[i]) scope.emplace(*steps[i]);
      found[i] = run(*call, i, pieces[i], forward);
    });
  }
  for (std::size_t r = 1; r < count; ++r)
    if (found[r].shape != found[0].shape)
      throw Error(fmt::format(
          "DataParallel: replicas 0 and {} return vectors, maps or optionals of different sizes or keys", r));
  Tensors results;
  {
    at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < found[0].tensors.size(); ++i) {
      Tensors each;
      for (const auto& replica : found) each.push_back(replica.tensors[i]);
      results.push_back(gather(i, each));
    }
  }
  if (at::GradMode::is_enabled()) record(call, results);
  for (auto& each : results)
    if (each.defined()) each = each.to(*options_.output_device);
  return results;
}

// Returns each replica's gradients, as [replica][parameter or input].
std::vector<Tensors> DataParallelState::replica_gradients(const ReplicaCall& call, const Tensors& gradients,
                                                          const std::vector<bool>& wanted, bool keep_graph) {
  const auto count = call.graphs.size();
  const auto num_parameters = call.set->parameters.size();
  struct Part {
    autograd::edge_list roots, leaves;
    Tensors gradients;
    std::vector<std::size_t> places;  // Indices of the leaves' gradients in the result.
  };
  std::vector<Part> parts(count);
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    if (!gradients[k].defined()) continue;
    std::int64_t begin = 0;
    for (std::size_t r = 0; r < count; ++r) {
      const auto& output = call.graphs[r].outputs[call.recorded[k]];
      const auto length = output.dim() == 0 ? 1 : output.size(options_.dim);
      auto piece = gradients[k].narrow(options_.dim, begin, length);
      begin += length;
      if (!output.requires_grad()) continue;
      if (output.dim() == 0) piece = piece.squeeze(0);
      parts[r].roots.push_back(edge_of(output));
      parts[r].gradients.push_back(piece.to(output.options(), /*non_blocking=*/true));
    }
  }
  for (std::size_t r = 0; r < count; ++r) {
    const auto& leaves = call.set->replicas[r].leaves;
    for (std::size_t i = 0; i < call.graphs[r].leaves.size(); ++i) {
      const auto place = i < leaves.size() ? leaves[i].parameter : num_parameters + i - leaves.size();
      if (parts[r].roots.empty() || !wanted[place] || !call.graphs[r].leaves[i].is_valid()) continue;
      parts[r].leaves.push_back(call.graphs[r].leaves[i]);
      parts[r].places.push_back(place);
    }
  }

  std::vector<Tensors> results(count, Tensors(wanted.size()));
  auto& engine = autograd::Engine::get_default_engine();
  const auto keep = [&](std::size_t r, auto found) {
    for (const auto place : parts[r].places) {
      auto& result = results[r][place];
      if (!found->defined()) {
      } else if (!result.defined()) {
        result = std::move(*found);
      } else {
        result = result + *found;  // A tied parameter.
      }
      ++found;
    }
  };
  if (devices_[0].is_cpu()) {
    workers_->run(count, "backward", [&](std::size_t r) {
      auto& part = parts[r];
      if (part.leaves.empty()) return;
      const ReplicaRandom::Guard random(*call.random, r);
      auto found = engine.execute(part.roots, part.gradients, keep_graph, false, false, part.leaves);
      keep(r, found.begin());
    });
    return results;
  }
  // On CUDA the engine has one thread per device, and this may be one of them. Waiting here for another
  // thread's backward could deadlock, so the replicas run in parallel as parts of one graph.
  Part all;
  for (auto& part : parts) {
    if (part.leaves.empty()) continue;
    all.roots.insert(all.roots.end(), part.roots.begin(), part.roots.end());
    all.gradients.insert(all.gradients.end(), part.gradients.begin(), part.gradients.end());
    all.leaves.insert(all.leaves.end(), part.leaves.begin(), part.leaves.end());
  }
  if (all.leaves.empty()) return results;
  Tensors found;
  try {
    found = engine.execute(all.roots, all.gradients, keep_graph, false, false, all.leaves);
  } catch (...) {
    std::vector<std::string> names;
    for (std::size_t r = 0; r < count; ++r) names.push_back(devices_[r].str());
    std::throw_with_nested(Error(fmt::format("DataParallel: backward of the replicas on {}: {}",
                                             fmt::join(names, ", "), plain_text(std::current_exception()))));
  }
  auto next = found.begin();
  for (std::size_t r = 0; r < count; ++r) {
    if (parts[r].leaves.empty()) continue;
    keep(r, next);
    next += static_cast<std::ptrdiff_t>(parts[r].leaves.size());
  }
  return results;
}

Tensors DataParallelState::backward(const ReplicaCall& call, const Tensors& gradients,
                                    const std::vector<bool>& wanted, bool keep_graph) {
  auto parts = replica_gradients(call, gradients, wanted, keep_graph);
  GradientSums sums;
  for (std::size_t p = 0; p < call.set->parameters.size(); ++p) {
    Tensors each;
    for (auto& part : parts)
      if (auto gradient = std::move(part[p]); gradient.defined())
        each.push_back(gradient.device() == devices_[0] ? std::move(gradient)
                                                        : gradient.to(devices_[0], /*non_blocking=*/true));
    sums.add(std::move(each));
  }
  if (devices_[0].is_cpu() && sums.bytes() >= kSumTogether)
    workers_->run(parts.size(), "the sum of gradients",
                  [&](std::size_t r) { sums.do_share(r, parts.size()); });
  else
    sums.do_share(0, 1);
  auto results = sums.take();

  for (std::size_t i = 0; i < call.inputs.size(); ++i) {
    auto& result = results.emplace_back();
    Tensors pieces;
    bool any = false;
    for (std::size_t r = 0; r < parts.size(); ++r) {
      auto& piece = pieces.emplace_back(std::move(parts[r][results.size() - 1]));
      any |= piece.defined();
    }
    if (!any) continue;
    for (std::size_t r = 0; r < parts.size(); ++r) {
      if (!pieces[r].defined()) pieces[r] = at::zeros_like(call.graphs[r].inputs[i]);
      pieces[r] = pieces[r].to(call.inputs[i].device());
    }
    result = at::cat(pieces, options_.dim);
  }
  return results;
}

std::shared_ptr<DataParallelState> make_data_parallel(std::shared_ptr<torch::nn::Module> module,
                                                      std::vector<at::Device> devices,
                                                      DataParallelOptions options) {
  return std::make_shared<DataParallelState>(std::move(module), std::move(devices), std::move(options));
}

const std::vector<at::Device>& data_parallel_devices(const DataParallelState& state) {
  return state.devices();
}

void replicate_data_parallel(DataParallelState& state) { state.replicate(); }

Tensors run_data_parallel(const std::shared_ptr<DataParallelState>& state, const Tensors& inputs,
                          bool has_arguments, const ReplicaForward& forward) {
  return std::shared_ptr(state)->forward(inputs, has_arguments, forward);
}

}  // namespace lockstep::detail
