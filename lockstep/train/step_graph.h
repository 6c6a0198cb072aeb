// Captures a whole training step in a CUDA graph and replays it, which avoids the host's work for each
// kernel.
//
//   lockstep::AdamW optimizer(model->parameters(), {.lr = 3e-4, .capturable = true});
//   lockstep::StepGraph step([&](const at::Tensor& tokens, const at::Tensor& targets) {
//     optimizer.zero_grad();
//     auto loss = loss_of(model(tokens), targets);
//     loss.backward();
//     optimizer.step();
//     return loss.detach();
//   });
//   for (auto& batch : loader) {
//     at::Tensor loss = step.run(batch.tokens, batch.targets);
//     scheduler.step();
//   }
//
// Every run() is one step. The first ones run eagerly (warm-up), then one is captured. From then on, run()
// copies the inputs into the captured ones, replays the graph and returns the captured outputs, which the
// next run overwrites. If a graph cannot be used, the step runs eagerly and reason() says why: no CUDA,
// inputs on another device, work that cannot be captured (such as item(), which waits for the device), or an
// optimizer that is not capturable.
//
// The step must do the same work on the device every time: what it does on the host (a schedule, a counter, a
// log line) happens during capture and is not repeated. Its model, optimizer and everything else it refers to
// must stay in place. Loading a checkpoint into model and optimizer is detected and starts a new warm-up;
// after other changes call reset(). Begin the step with zero_grad(), or clear gradients in place. LibTorch's
// own optimizers would repeat their step count and learning rate; Lockstep's throw unless they are
// capturable. NCCL's collectives can be captured, those of other transports cannot.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace lockstep {

struct StepGraphOptions {
  bool enabled = true;     // false: the step always runs eagerly
  int warmup = 3;          // eager steps before the capture; at least 1
  int max_graphs = 1;      // number of input shapes to capture; others run eagerly
  bool check = false;      // compare the first replay with the step itself, from the same state
  double tolerance = 0.1;  // relative, for check: of returned tensors and everything the step writes
  // Generators that the step uses besides the device's default one.
  std::vector<at::Generator> generators = {};
  // For check: tensors that the step writes besides the optimizers' parameters and state, such as
  // model->buffers() with BatchNorm. They are restored before the step itself runs, because the replay has
  // modified them, and compared.
  std::vector<at::Tensor> state = {};
};

namespace detail {

class StepGraphCore {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Step = std::function<Tensors(const Tensors& inputs)>;

  StepGraphCore(Step step, StepGraphOptions options);
  ~StepGraphCore();
  StepGraphCore(StepGraphCore&&) noexcept;

  Tensors run(Tensors inputs);
  void reset();
  bool captured() const;
  const std::string& reason() const;
  std::int64_t replays() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Converts a step's result to a list and back: nothing, a tensor, or a vector of tensors.
template <typename Result>
struct StepResult;
template <>
struct StepResult<at::Tensor> {
  static std::vector<at::Tensor> list(at::Tensor result) { return {std::move(result)}; }
  static at::Tensor of(std::vector<at::Tensor> list) { return std::move(list.at(0)); }
};
template <>
struct StepResult<std::vector<at::Tensor>> {
  static std::vector<at::Tensor> list(std::vector<at::Tensor> result) { return result; }
  static std::vector<at::Tensor> of(std::vector<at::Tensor> list) { return list; }
};

}  // namespace detail

// Makes the stream on which steps are warmed up and captured the current one of this thread while it exists.
// Autograd accumulates a gradient on the stream that was current when its accumulator was created.
// Accumulators that are kept, as DistributedDataParallel does, must therefore be created and used within a
// GraphStream. No-op without CUDA.
//
//   lockstep::GraphStream stream(device);
//   lockstep::DistributedDataParallel ddp(model, group);
//   lockstep::StepGraph step(...);
class GraphStream {
 public:
  explicit GraphStream(at::Device device = at::kCUDA);

 private:
  std::shared_ptr<void> stay_;
};

// Step: a callable that takes tensors and returns a tensor, a vector of tensors, or nothing.
template <typename Step>
class StepGraph {
 public:
  // Throws ConfigError for options out of range.
  explicit StepGraph(Step step, StepGraphOptions options = {})
      : call_(std::make_unique<Call>(Call{std::move(step), {}})),
        core_([call = call_.get()](const std::vector<at::Tensor>& inputs) { return call->with(inputs); },
              std::move(options)) {}

  template <std::convertible_to<at::Tensor>... Inputs>
    requires std::invocable<Step&, const Inputs&...>
  auto run(const Inputs&... inputs) {
    using Result = std::invoke_result_t<Step&, const Inputs&...>;
    call_->with = [this](const std::vector<at::Tensor>& given) {
      return call<Result>(given, std::make_index_sequence<sizeof...(Inputs)>());
    };
    auto outputs = core_.run({inputs...});
    if constexpr (!std::is_void_v<Result>)
      return detail::StepResult<std::decay_t<Result>>::of(std::move(outputs));
  }

  // Drops captured graphs; the next run starts a new warm-up.
  void reset() { core_.reset(); }
  bool captured() const { return core_.captured(); }  // true if the last run was a replay
  const std::string& reason() const {
    return core_.reason();
  }  // reason for running eagerly; empty during warm-up and after a replay
  std::int64_t replays() const { return core_.replays(); }

 private:
  struct Call {
    Step step;
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> with;
  };
  template <typename Result, std::size_t... I>
  std::vector<at::Tensor> call(const std::vector<at::Tensor>& given, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<Result>) {
      call_->step(given[I]...);
      return {};
    } else {
      return detail::StepResult<std::decay_t<Result>>::list(call_->step(given[I]...));
    }
  }

  std::unique_ptr<Call> call_;
  detail::StepGraphCore core_;
};

}  // namespace lockstep
