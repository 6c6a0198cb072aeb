// A whole training step as a CUDA graph: recorded once, then replayed without the host's work for each
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
// Every run is one step. The first ones run as they are (warm-up), then one is captured, and from then on run
// copies the inputs into those that were captured, replays, and gives the tensors that were returned then:
// the next run writes to them again. Where there can be no graph the step runs as it is, and reason() says
// why: no CUDA, inputs elsewhere, work that cannot be captured (it waits for the device, as item() does), an
// optimizer that is not capturable.
//
// The step must do the same work each time, on the device: what it does on the host (a schedule, a counter, a
// log line) happens when it is captured and not again. Its model, optimizer and whatever else it refers to
// stay where they are; a checkpoint that is loaded into model and optimizer is noticed, and the step warmed
// up again, after other changes call reset(). Gradients: begin it with zero_grad(), or clear them in place.
// LibTorch's own optimizers would repeat their step count and learning rate; ours refuse unless they are
// capturable. Groups: NCCL's collectives can be captured, other transports' cannot.
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
  bool enabled = true;     // false: the step runs as it is
  int warmup = 3;          // steps that run as they are before one is captured; 1 or more
  int max_graphs = 1;      // for so many shapes of the inputs; others run as they are
  bool check = false;      // the first replay is compared with the step itself, from the same state
  double tolerance = 0.1;  // relative, of check: of returned tensors and of what the step has written to
  // Generators that the step draws from beside the device's default one.
  std::vector<at::Generator> generators = {};
  // For check: what the step writes to beside the optimizers' parameters and state, as model->buffers() with
  // BatchNorm. Brought back before the step itself runs, or both would have written to it; and compared.
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

// What a step returns, as a list and back: nothing, a tensor, or a vector of tensors.
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

// The stream that steps are warmed up and captured on, as the current one of this thread while it lives.
// Autograd adds a gradient up on the stream that was current when its accumulator was made. Accumulators that
// somebody keeps, as DistributedDataParallel does, must therefore be made, and used, within one of these.
// Nothing where there is no CUDA.
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

// Step: called with tensors; returns a tensor, a vector of tensors, or nothing.
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

  // Drops what was captured; the next runs begin with the warm-up.
  void reset() { core_.reset(); }
  bool captured() const { return core_.captured(); }  // whether the last run was a replay
  const std::string& reason() const {
    return core_.reason();
  }  // why it was not; empty while it warms up, or was
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
