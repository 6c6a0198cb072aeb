#include <lockstep/train/step_graph.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <span>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <fmt/ostream.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/optim/detail/cuda_graph.h>
#include <lockstep/optim/detail/graphed_optimizers.h>

namespace lockstep::detail {
namespace {

using Tensors = StepGraphCore::Tensors;

// While it exists, optimizers stepped on this thread register with the watch.
class Watching {
 public:
  explicit Watching(GraphedOptimizers& watch)
      : before_(std::exchange(GraphedOptimizers::current(), &watch)) {}
  ~Watching() { GraphedOptimizers::current() = before_; }
  Watching(const Watching&) = delete;

 private:
  GraphedOptimizers* before_;
};

// Saves the tensors' values and restores them.
class Kept {
 public:
  explicit Kept(const Tensors& tensors) : tensors_(tensors) {
    for (const auto& tensor : tensors) values_.push_back(tensor.detach().clone());
  }
  void restore() const {
    for (std::size_t i = 0; i < tensors_.size(); ++i) tensors_[i].detach().copy_(values_[i]);
  }

 private:
  Tensors tensors_, values_;
};

Tensors copies(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
  return result;
}

// Describes the largest difference of two tensors if it exceeds the tolerance, relative to the largest
// element.
std::optional<std::string> difference(const at::Tensor& replayed, const at::Tensor& run, double tolerance) {
  if (!run.defined() || run.numel() == 0 || !run.is_floating_point()) return {};
  const auto a = replayed.detach().to(at::kDouble), b = run.detach().to(at::kDouble);
  const auto differ = (a - b).abs().nan_to_num().max().item<double>(),
             size = b.abs().nan_to_num().max().item<double>();
  const bool nan_alike = at::equal(a.isnan(), b.isnan());
  if (nan_alike && differ <= tolerance * size + 1e-12) return {};
  return fmt::format("differs by {:.3g} (largest value {:.3g}){}", differ, size,
                     nan_alike ? "" : ", and in NaNs");
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

struct StepGraphCore::State {
  // One per device and combination of input shapes.
  struct Graph {
    at::Device device;
    Tensors like = {};   // sizes and dtypes of the inputs, without memory
    bool again = false;  // its second warm-up: the first did not lead to a capture
    int warmed = 0;
    Tensors inputs = {}, outputs = {};
    Tensors parameters = {}, gradients = {};  // of the optimizers; where the graph writes gradients
    std::vector<std::pair<at::Tensor, const void*>> places = {};  // parameters and their addresses at capture
    std::vector<GraphedOptimizers::User> users = {};              // as they were at capture
    std::unique_ptr<CudaGraph> graph = {};
  };

  Step step;
  StepGraphOptions options;
  GraphedOptimizers watch;
  std::vector<Graph> graphs;
  std::string reason;
  bool given_up = false, captured = false, logged = false;
  std::int64_t replays = 0;

  Tensors as_it_is(const Tensors& inputs, std::string why = {}) {
    if (!why.empty()) {
      reason = std::move(why);
      if (!logged && options.enabled) log(LogLevel::warn, "StepGraph: steps are not captured: {}", reason);
      logged = true;
    }
    captured = false;
    const Watching watching(watch);
    return step(inputs);
  }

  // Reason why no graph can be captured for these inputs; empty if one can.
  std::string unfit(const Tensors& inputs) const {
    if (!options.enabled) return "disabled by {.enabled = false}";
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const auto& input = inputs[i];
      if (!input.defined()) return fmt::format("input {} is undefined", i);
      if (!input.is_cuda())
        return fmt::format("input {} is on {}; expected CUDA", i, fmt::streamed(input.device()));
      if (input.device() != inputs[0].device())
        return fmt::format("inputs are on {} and {}; expected one device", fmt::streamed(inputs[0].device()),
                           fmt::streamed(input.device()));
      if (input.layout() != at::kStrided) return fmt::format("input {} is sparse", i);
      if (input.requires_grad()) return fmt::format("input {} requires a gradient", i);
    }
    return no_graph_because();
  }

  Graph* find(at::Device device, const Tensors& inputs) {
    for (auto& graph : graphs)
      if (graph.device == device &&
          std::equal(inputs.begin(), inputs.end(), graph.like.begin(), graph.like.end(),
                     [](const at::Tensor& a, const at::Tensor& b) {
                       return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type();
                     }))
        return &graph;
    if (graphs.size() == static_cast<std::size_t>(options.max_graphs)) return nullptr;
    Graph graph{.device = device};
    for (const auto& input : inputs)
      graph.like.push_back(at::empty({}, input.options().device(at::kMeta)).expand(input.sizes()));
    return &graphs.emplace_back(std::move(graph));
  }

  static std::string text_of(at::Device device, const Tensors& inputs) {
    std::vector<std::string> texts;
    for (const auto& input : inputs)
      texts.push_back(
          fmt::format("{} [{}]", fmt::streamed(input.scalar_type()), fmt::join(input.sizes(), ", ")));
    return fmt::format("{} on {}", fmt::join(texts, ", "), fmt::streamed(device));
  }

  Tensors give_up(const Tensors& inputs, const std::string& why) {
    graphs.clear();
    given_up = true;
    return as_it_is(inputs, why);
  }

  Tensors run(const Tensors& inputs) {
    if (given_up) return as_it_is(inputs);
    if (auto why = unfit(inputs); !why.empty()) return as_it_is(inputs, why);
    const auto device = inputs.empty() ? current_device() : inputs[0].device();
    auto* graph = find(device, inputs);
    if (graph == nullptr)
      return as_it_is(inputs, fmt::format("max_graphs ({}) reached: no graph for inputs of {}",
                                          options.max_graphs, text_of(device, inputs)));
    reason.clear();
    const bool captured_before = graph->graph != nullptr;
    if ((captured_before || graph->warmed == options.warmup) && !in_place(*graph)) {
      // For example after loading a checkpoint: warm up again. Give up if that happens before every capture.
      if (!captured_before && graph->again)
        return give_up(inputs, "an optimizer's state was replaced before each capture");
      *graph = Graph{.device = device, .like = std::move(graph->like), .again = !captured_before};
    }
    if (graph->graph != nullptr) return replay(*graph, inputs);
    if (graph->warmed < options.warmup) {
      Tensors outputs;
      on_side_stream(device, [&] { outputs = as_it_is(inputs); });
      ++graph->warmed;
      return outputs;
    }
    if (auto why = record(*graph, device, inputs); !why.empty()) return give_up(inputs, why);
    if (!in_place(*graph)) return give_up(inputs, "an optimizer's state was replaced during capture");
    if (options.check && replays == 0) return first_replay_checked(*graph, device, inputs);
    return replay(*graph, inputs);
  }

  // Captures the step. Returns an error text, empty on success. On failure, gradients are restored and no
  // step was done.
  std::string record(Graph& graph, at::Device device, const Tensors& inputs) {
    for (const auto& user : watch.users)
      graph.parameters.insert(graph.parameters.end(), user.parameters.begin(), user.parameters.end());
    const auto before = gradients_of(graph.parameters);
    for (const auto& input : inputs)
      graph.inputs.push_back(at::empty_like(input, {}, at::MemoryFormat::Preserve));
    at::autocast::clear_cache();  // drop casts of the weights cached before
    try {
      graph.graph = capture(device, options.generators, [&] {
        const Watching watching(watch);
        graph.outputs = step(graph.inputs);
      });
    } catch (const std::exception& error) {
      set_gradients(graph.parameters, before);
      return fmt::format("the step cannot be captured: {}", first_line(error.what()));
    }
    at::autocast::clear_cache();  // drop casts that the capture has not computed
    for (auto& output : graph.outputs)
      if (output.defined()) output = output.detach();  // free the captured step's autograd graph
    graph.gradients = gradients_of(graph.parameters);
    graph.users = watch.users;
    for (const auto& user : graph.users)
      for (const auto& parameter : user.parameters)
        graph.places.emplace_back(parameter, parameter.const_data_ptr());
    return {};
  }

  // True if parameters and state are still where the graph writes to them. Steps with other shapes may have
  // changed that. Also makes optimizers upload their options.
  bool in_place(const Graph& graph) const {
    const auto& users = graph.graph != nullptr ? graph.users : watch.users;
    return std::all_of(graph.places.begin(), graph.places.end(),
                       [](const auto& place) { return place.first.const_data_ptr() == place.second; }) &&
           std::all_of(users.begin(), users.end(), [](const auto& user) { return user.before_replay(); });
  }

  static Tensors gradients_of(const Tensors& parameters) {
    Tensors gradients;
    for (const auto& parameter : parameters) gradients.push_back(parameter.grad());
    return gradients;
  }
  static void set_gradients(const Tensors& parameters, const Tensors& gradients) {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (!parameters[i].grad().is_same(gradients[i]))
        at::Tensor(parameters[i]).mutable_grad() = gradients[i];
  }

  Tensors replay(Graph& graph, const Tensors& inputs) {
    at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < inputs.size(); ++i) graph.inputs[i].copy_(inputs[i], /*non_blocking=*/true);
    // They may have been dropped since, or replaced by a step with another shape.
    set_gradients(graph.parameters, graph.gradients);
    graph.graph->replay();
    ++replays;
    captured = true;
    return graph.outputs;
  }

  // Compares a replay with the step itself, then keeps the result of the step itself.
  Tensors first_replay_checked(Graph& graph, at::Device device, const Tensors& inputs) {
    Tensors written;
    for (const auto& user : watch.users)
      for (const auto* list : {&user.parameters, &user.state})
        written.insert(written.end(), list->begin(), list->end());
    const auto of_optimizers = written.size();
    std::copy_if(options.state.begin(), options.state.end(), std::back_inserter(written),
                 [](const at::Tensor& tensor) { return tensor.defined(); });
    auto generators = options.generators;
    generators.push_back(at::globalContext().defaultGenerator(device));
    at::NoGradGuard no_grad;
    const Kept before(written);
    Tensors drawn;
    for (const auto& generator : generators) drawn.push_back(generator.get_state());
    const auto replayed = copies(replay(graph, inputs));
    const auto replayed_state = copies(written);
    before.restore();
    for (std::size_t i = 0; i < generators.size(); ++i) generators[i].set_state(drawn[i]);
    Tensors outputs;
    {
      at::AutoGradMode enable_grad(true);
      on_side_stream(device, [&] { outputs = as_it_is(inputs); });
    }
    auto compare = [&](std::span<const at::Tensor> a, std::span<const at::Tensor> b,
                       const char* what) -> std::string {
      for (std::size_t i = 0; i < b.size(); ++i)
        if (const auto found = difference(a[i], b[i], options.tolerance))
          return fmt::format("replay differs from the step: {} {} {}", what, i, *found);
      return {};
    };
    const std::span<const at::Tensor> a = replayed_state, b = written;
    auto why = compare(replayed, outputs, "returned tensor");
    if (why.empty())
      why = compare(a.first(of_optimizers), b.first(of_optimizers), "tensor of the optimizers");
    if (why.empty()) why = compare(a.subspan(of_optimizers), b.subspan(of_optimizers), "tensor of .state");
    if (!why.empty()) {
      graphs.clear();
      given_up = true;
      reason = why;
      log(LogLevel::warn, "StepGraph: steps are not captured: {}", reason);
    }
    return outputs;
  }
};

StepGraphCore::StepGraphCore(Step step, StepGraphOptions options) : state_(std::make_unique<State>()) {
  if (options.warmup < 1)
    throw ConfigError(
        fmt::format("StepGraph: warmup: expected at least 1, because the first step creates state, got {}",
                    options.warmup));
  if (options.max_graphs < 1)
    throw ConfigError(fmt::format("StepGraph: max_graphs: expected at least 1, got {}", options.max_graphs));
  if (!(options.tolerance >= 0))
    throw ConfigError(fmt::format("StepGraph: tolerance: expected 0 or more, got {}", options.tolerance));
  state_->step = std::move(step);
  state_->options = std::move(options);
}
StepGraphCore::~StepGraphCore() = default;
StepGraphCore::StepGraphCore(StepGraphCore&&) noexcept = default;

StepGraphCore::Tensors StepGraphCore::run(Tensors inputs) { return state_->run(inputs); }
void StepGraphCore::reset() {
  state_->graphs.clear();
  state_->watch.users.clear();
  state_->reason.clear();
  state_->given_up = state_->captured = state_->logged = false;
}
bool StepGraphCore::captured() const { return state_->captured; }
const std::string& StepGraphCore::reason() const { return state_->reason; }
std::int64_t StepGraphCore::replays() const { return state_->replays; }

}  // namespace lockstep::detail

namespace lockstep {

GraphStream::GraphStream(at::Device device) {
  if (!device.is_cuda() || !detail::no_graph_because().empty()) return;
  stay_ = detail::stay_on_side_stream(device.has_index() ? device : detail::current_device());
}

}  // namespace lockstep
