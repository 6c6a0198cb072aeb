// Pipeline parallelism: the ranks hold stages of a model, and micro-batches flow through them.
//
//   std::vector<PipelineStage> pieces = {embedding, block0, block1, head};     // all pieces, on every rank
//   Pipeline pipeline(std::move(pieces), mesh["pp"], Schedule1F1B{.num_microbatches = 8});
//   AdamW optimizer(pipeline.parameters(), {.lr = 3e-4});
//   for (...) {
//     optimizer.zero_grad();
//     pipeline.step(inputs, targets, torch::nn::CrossEntropyLoss());
//     optimizer.step();
//     at::Tensor loss = pipeline.loss();
//   }
//
// Every rank constructs it with the same pieces (the same seed gives the same weights) and keeps those of its
// own stages. step() adds the gradients of the loss of the whole batch, which is the mean over micro-batches,
// to the existing gradients. Weights shared by pieces on several ranks stay equal: the first rank's values
// are broadcast, and the gradients are summed. The rank with the first stage needs inputs, the one with the
// last stage needs targets; other ranks may pass anything, or {}. The shapes passed between stages may change
// from step to step.
//
// If a stage throws, its rank's step() rethrows the exception, and step() on every other rank throws an Error
// with its text. The pipeline can then be used again, but gradients cover only part of the batch: call
// zero_grad(). Throws CommError as Group does, for a dead rank or a missed deadline. Not thread-safe.
// Reserves all tags from 1 << 20 up in its group.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/comm/group.h>
#include <lockstep/parallel/pipeline_stage.h>
#include <lockstep/schedule/schedule.h>
#include <torch/nn/modules/container/sequential.h>

namespace lockstep {

struct ScheduleGPipe {
  int num_microbatches = 1;
};
struct Schedule1F1B {
  int num_microbatches = 1;
};
struct ScheduleInterleaved1F1B {
  int num_microbatches = 1;
  int stages_per_rank = 2;
};
struct ScheduleLoopedBFS {
  int num_microbatches = 1;
  int stages_per_rank = 2;
};
struct ScheduleZBH1 {
  int num_microbatches = 1;
};
struct ScheduleZBVZeroBubble {
  int num_microbatches = 1;
};
struct ScheduleDualPipeV {
  int num_microbatches = 1;
};
// Selects a schedule by its command-line name; see schedule_names().
struct ScheduleNamed {
  std::string name;
  int num_microbatches = 1;
  int stages_per_rank = 0;
};

// Any of the above, or a custom schedule.
class AnySchedule {
 public:
  AnySchedule(ScheduleGPipe given) : AnySchedule(ScheduleNamed{"gpipe", given.num_microbatches}) {}
  AnySchedule(Schedule1F1B given) : AnySchedule(ScheduleNamed{"1f1b", given.num_microbatches}) {}
  AnySchedule(ScheduleInterleaved1F1B given)
      : AnySchedule(ScheduleNamed{"interleaved1f1b", given.num_microbatches, given.stages_per_rank}) {}
  AnySchedule(ScheduleLoopedBFS given)
      : AnySchedule(ScheduleNamed{"loopedbfs", given.num_microbatches, given.stages_per_rank}) {}
  AnySchedule(ScheduleZBH1 given) : AnySchedule(ScheduleNamed{"zbh1", given.num_microbatches}) {}
  AnySchedule(ScheduleZBVZeroBubble given) : AnySchedule(ScheduleNamed{"zbv", given.num_microbatches}) {}
  AnySchedule(ScheduleDualPipeV given) : AnySchedule(ScheduleNamed{"dualpipev", given.num_microbatches}) {}
  AnySchedule(ScheduleNamed given);
  AnySchedule(PipelineSchedule given);
  PipelineSchedule on(int ranks) const { return make_(ranks); }

 private:
  std::function<PipelineSchedule(int)> make_;
};

enum class PipelineBalance { parameters, time, pieces };

struct PipelineOptions {
  // Number of pieces in each stage, in stage order. If empty: one piece each if there are as many pieces as
  // stages, otherwise the cut whose largest stage is smallest.
  std::vector<int> cut = {};
  PipelineBalance balance = PipelineBalance::parameters;
  // For PipelineBalance::time. sample: a micro-batch to run through the pieces on the first rank; pass it on
  // every rank. agree: the ranks that must use the same cut, if they are more than the pipeline's own, for
  // example those of the whole mesh.
  StageValues sample = {};
  std::optional<Group> agree = {};
  bool scale_gradients = true;  // The loss is the mean over micro-batches; if false, the sum.
};

// One action with its times, in seconds of std::chrono::steady_clock, which all processes of a host share.
struct ActionTiming {
  PipelineAction action;
  double begin = 0, end = 0;
};

namespace detail {
std::vector<PipelineStage> pieces_of(const torch::nn::Sequential& model);
}

class Pipeline {
 public:
  // Throws ConfigError, on every rank, if the ranks differ, if the schedule is invalid, or if the pieces do
  // not fit it.
  Pipeline(std::vector<PipelineStage> pieces, Group group, const AnySchedule& schedule,
           PipelineOptions options = {});
  // Makes a piece of each child. A template, so that pieces in braces are never taken for the arguments of a
  // Sequential.
  template <std::convertible_to<torch::nn::Sequential> Model>
  Pipeline(const Model& model, Group group, const AnySchedule& schedule, PipelineOptions options = {})
      : Pipeline(detail::pieces_of(model), std::move(group), schedule, std::move(options)) {}
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;
  ~Pipeline();

  // Runs forward and backward of a batch, split into micro-batches along dim 0. Tensors without dimensions
  // are passed whole to every micro-batch. loss(output, target) takes a tensor each, or StageValues each.
  // Returns the loss on the rank with the last stage, an undefined tensor elsewhere. Every rank must call it.
  template <typename Inputs = StageValues, typename Targets = StageValues, typename Loss>
  at::Tensor step(const Inputs& inputs, const Targets& targets, Loss&& loss, Site site = Site::current()) {
    return run(flat(inputs), flat(targets), wrap(std::forward<Loss>(loss)), /*backward=*/true, site);
  }
  // Like step(), but without gradients: computes the loss only.
  template <typename Inputs = StageValues, typename Targets = StageValues, typename Loss>
  at::Tensor evaluate(const Inputs& inputs, const Targets& targets, Loss&& loss,
                      Site site = Site::current()) {
    return run(flat(inputs), flat(targets), wrap(std::forward<Loss>(loss)), /*backward=*/false, site);
  }
  // Runs forward without gradients. Returns the outputs of the whole batch on the rank with the last stage,
  // nothing elsewhere.
  template <typename Inputs = StageValues>
  StageValues forward(const Inputs& inputs, Site site = Site::current()) {
    return run_forward(flat(inputs), site);
  }
  // Loss of the last step or evaluation, on every rank, as a double on the CPU. Every rank must call it.
  at::Tensor loss();

  // Module with this rank's stages, under the names of their pieces.
  const std::shared_ptr<torch::nn::Module>& module() const;
  std::vector<at::Tensor> parameters() const;
  // Parameters without those that an earlier rank also has. Over all ranks they are the whole model, as a
  // norm needs.
  std::vector<at::Tensor> own_parameters() const;

  const PipelineSchedule& schedule() const;          // including transfers
  const std::vector<int>& cut() const;               // number of pieces in each stage
  bool is_first() const;                             // true if this rank has the first stage
  bool is_last() const;                              // true if this rank has the last stage
  const std::vector<ActionTiming>& moments() const;  // actions of the last step on this rank

 private:
  using LossOf = std::function<at::Tensor(const StageValues&, const StageValues&)>;
  template <typename T>
  static StageValues flat(const T& given) {
    StageValues values;
    detail::put_values(given, values);
    return values;
  }
  template <typename Loss>
  static LossOf wrap(Loss&& loss) {
    if constexpr (std::is_invocable_v<std::decay_t<Loss>&, const at::Tensor&, const at::Tensor&>)
      return [loss = std::forward<Loss>(loss)](const StageValues& output,
                                               const StageValues& target) mutable -> at::Tensor {
        if (output.size() != 1) detail::refuse_stage_values("loss(tensor, tensor)", output.size(), 1);
        if (target.size() != 1) detail::refuse_stage_values("loss(tensor, tensor)", target.size(), 1);
        return loss(output[0], target[0]);
      };
    else
      return std::forward<Loss>(loss);
  }
  at::Tensor run(StageValues inputs, StageValues targets, LossOf loss, bool backward, Site site);
  StageValues run_forward(StageValues inputs, Site site);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
