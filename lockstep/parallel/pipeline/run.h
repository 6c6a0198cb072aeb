// One pass of a batch through a pipeline: this rank's actions, in the schedule's order.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/comm/group.h>
#include <lockstep/parallel/pipeline.h>
#include <lockstep/parallel/pipeline/backward.h>
#include <lockstep/parallel/pipeline/wire.h>

namespace lockstep::detail {

struct PipelineJob {
  StageValues inputs = {}, targets = {};
  std::function<at::Tensor(const StageValues&, const StageValues&)> loss = {};  // none: outputs are kept
  bool backward = false;
  double scale = 1;  // of each micro-batch's gradient
  Site site = {};    // of the call
};

class PipelineRun {
 public:
  using Stages = std::map<int, PipelineStage::Forward>;  // this rank's

  PipelineRun(const PipelineRoutes& routes, const PipelineSchedule& schedule, const Stages& stages,
              PipelineJob job);

  // Throws what a stage here threw; an Error with the text where another rank's did; CommError.
  void run();

  // Whether every message has found its receiver, so that another pass can follow, though this one failed.
  bool settled() const { return settled_; }

  const StageValues& losses() const { return losses_; }  // by micro-batch, where the last stage is
  const std::vector<StageValues>& outputs() const { return outputs_; }
  std::vector<ActionTiming>& moments() { return moments_; }

 private:
  // What there is of a micro-batch at a stage.
  struct Slot {
    StageValues inputs, outputs;
    StageValues gradients;        // of the outputs
    StageValues input_gradients;  // to be sent
    PipelineBackward weights;     // what its backward has left to do
  };

  // One transfer as its two ends see it. The tag says after which stage, which way, which micro-batch.
  struct Transfer {
    bool sends, ahead;
    int peer, tag;
  };
  Transfer transfer_of(PipelineAction action) const;
  bool is_left_out(PipelineOp op) const;

  void split(const StageValues& whole, std::vector<StageValues>& parts, const char* what) const;
  void prepare();
  void act(PipelineAction action);
  void forward(Slot& slot, PipelineAction action);
  void backward(Slot& slot, PipelineAction action);
  void transfer(Slot& slot, PipelineAction action);
  void fail(PipelineAction action);
  void fail(const std::string& where);
  void agree();

  Slot& slot(int stage, int microbatch) { return slots_[{stage, microbatch}]; }
  int rank_of(int stage) const { return schedule_.rank_of_stage[static_cast<std::size_t>(stage)]; }
  int world_rank() const { return group_.ranks()[static_cast<std::size_t>(group_.rank())]; }
  bool here(int stage) const { return rank_of(stage) == group_.rank(); }

  Group group_;
  const PipelineSchedule& schedule_;
  const Stages& stages_;
  PipelineJob job_;
  PipelineWire wire_;
  const int last_;
  std::map<std::pair<int, int>, Slot> slots_;
  std::vector<StageValues> inputs_, targets_;  // by micro-batch
  StageValues losses_;
  std::vector<StageValues> outputs_;
  std::vector<ActionTiming> moments_;
  bool settled_ = false;
  std::string failure_;           // of any rank, as far as it is known here
  std::exception_ptr exception_;  // where it was thrown
};

}  // namespace lockstep::detail
