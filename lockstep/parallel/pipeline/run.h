// One pass of a batch through a pipeline: runs this rank's actions in the order of the schedule.
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
  // Without a loss, outputs are kept.
  std::function<at::Tensor(const StageValues&, const StageValues&)> loss = {};
  bool backward = false;
  double scale = 1;  // Scale of each micro-batch's gradient.
  Site site = {};    // Where the program called the pipeline.
};

class PipelineRun {
 public:
  using Stages = std::map<int, PipelineStage::Forward>;  // Stages of this rank, by number.

  PipelineRun(const PipelineRoutes& routes, const PipelineSchedule& schedule, const Stages& stages,
              PipelineJob job);

  // Rethrows the exception of a stage on this rank; throws an Error with the text of one on another rank.
  // Throws CommError.
  void run();

  // True if every message has been received, so that another pass can follow even if this one failed.
  bool settled() const { return settled_; }

  const StageValues& losses() const { return losses_; }  // By micro-batch; on the rank with the last stage.
  const std::vector<StageValues>& outputs() const { return outputs_; }
  std::vector<ActionTiming>& moments() { return moments_; }

 private:
  // State of one micro-batch at one stage.
  struct Slot {
    StageValues inputs, outputs;
    StageValues gradients;        // Gradients of the outputs.
    StageValues input_gradients;  // Gradients of the inputs, to be sent.
    PipelineBackward weights;     // The weight part of backward, still to run.
  };

  // One transfer as seen by one of its ends. The tag encodes the boundary, the direction and the micro-batch.
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
  std::vector<StageValues> inputs_, targets_;  // By micro-batch.
  StageValues losses_;
  std::vector<StageValues> outputs_;
  std::vector<ActionTiming> moments_;
  bool settled_ = false;
  std::string failure_;           // First failure of any rank known here; empty: none.
  std::exception_ptr exception_;  // Exception, if this rank failed.
};

}  // namespace lockstep::detail
