// Pipeline parallelism: ranks have parts of a model, and micro-batches go through them.
//
//   std::vector<PipelineStage> pieces = {embedding, block0, block1, head};     // all of them, on every rank
//   Pipeline pipeline(std::move(pieces), mesh["pp"], Schedule1F1B{.num_microbatches = 8});
//   AdamW optimizer(pipeline.parameters(), {.lr = 3e-4});
//   for (...) {
//     optimizer.zero_grad();
//     pipeline.step(inputs, targets, torch::nn::CrossEntropyLoss());
//     optimizer.step();
//     at::Tensor loss = pipeline.loss();
//   }
//
// Every rank makes it with the same pieces (the same seed gives the same weights) and keeps those of its own
// stages. step() adds the gradients of the whole batch's loss, the mean over micro-batches, to what is there.
// Weights that pieces on several ranks share stay equal: the first one's values go to all, and their
// gradients are added up. Inputs are needed where the first stage is, targets where the last is; other ranks
// may give anything, or {}. What stages hand on may change its shape from step to step.
//
// An exception in a stage reaches its caller as it is; every other rank's step() throws an Error with its
// text, and the pipeline can be used again (gradients are then of a part of the batch: zero_grad). CommError
// as Group does: a rank that died, a deadline. One thread at a time. In its group the tags from 1 << 20 on
// are its own.
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
// By the name that command lines have: schedule_names().
struct ScheduleNamed {
  std::string name;
  int num_microbatches = 1;
  int stages_per_rank = 0;
};

// Any of these, or a schedule of one's own.
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
  // How many pieces each stage has, from the first on. Empty: one each where there are as many, else such
  // that the largest stage is as small as can be.
  std::vector<int> cut = {};
  PipelineBalance balance = PipelineBalance::parameters;
  // With time: a micro-batch that goes through the pieces on the first rank, given on every rank; and the
  // ranks that are to have the same cut, where they are more than the pipeline's: those of the whole mesh.
  StageValues sample = {};
  std::optional<Group> agree = {};
  bool scale_gradients = true;  // the loss is the mean over micro-batches, not the sum
};

// One action as it was done; in seconds of std::chrono::steady_clock, which a host's processes have in
// common.
struct ActionTiming {
  PipelineAction action;
  double begin = 0, end = 0;
};

namespace detail {
std::vector<PipelineStage> pieces_of(const torch::nn::Sequential& model);
}

class Pipeline {
 public:
  // Throws ConfigError, on every rank: what differs between ranks, a schedule that cannot be, pieces that do
  // not fit it.
  Pipeline(std::vector<PipelineStage> pieces, Group group, const AnySchedule& schedule,
           PipelineOptions options = {});
  // A piece for each child.
  // A template, so that pieces in braces are never taken for what makes a Sequential.
  template <std::convertible_to<torch::nn::Sequential> Model>
  Pipeline(const Model& model, Group group, const AnySchedule& schedule, PipelineOptions options = {})
      : Pipeline(detail::pieces_of(model), std::move(group), schedule, std::move(options)) {}
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;
  ~Pipeline();

  // Forward and backward of a batch, which micro-batches divide along dim 0 (tensors without dimensions go to
  // each whole). loss(output, target) with a tensor each, or with StageValues each. Returns the loss where
  // the last stage is, undefined elsewhere. Every rank.
  template <typename Inputs = StageValues, typename Targets = StageValues, typename Loss>
  at::Tensor step(const Inputs& inputs, const Targets& targets, Loss&& loss, Site site = Site::current()) {
    return run(flat(inputs), flat(targets), wrap(std::forward<Loss>(loss)), /*backward=*/true, site);
  }
  // The same without gradients: the loss alone.
  template <typename Inputs = StageValues, typename Targets = StageValues, typename Loss>
  at::Tensor evaluate(const Inputs& inputs, const Targets& targets, Loss&& loss,
                      Site site = Site::current()) {
    return run(flat(inputs), flat(targets), wrap(std::forward<Loss>(loss)), /*backward=*/false, site);
  }
  // Without gradients: where the last stage is, what it gives for the whole batch; elsewhere nothing.
  template <typename Inputs = StageValues>
  StageValues forward(const Inputs& inputs, Site site = Site::current()) {
    return run_forward(flat(inputs), site);
  }
  // Of the last step or evaluation, on every rank, as a double on the CPU: every rank calls it.
  at::Tensor loss();

  // This rank's stages, under the names of their pieces.
  const std::shared_ptr<torch::nn::Module>& module() const;
  std::vector<at::Tensor> parameters() const;
  // Those without what an earlier rank has too: all ranks' together are the model, for a norm over all.
  std::vector<at::Tensor> own_parameters() const;

  const PipelineSchedule& schedule() const;  // with its transfers
  const std::vector<int>& cut() const;       // pieces of each stage
  bool is_first() const;                     // this rank has the first stage
  bool is_last() const;
  const std::vector<ActionTiming>& moments() const;  // of the last step, here

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
