// What a pipeline is made of, before it runs: checked on every rank, cut, and placed in a module.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include <lockstep/parallel/pipeline.h>

namespace lockstep::detail {

// Each tensor once, though several modules may have it.
void add_parameters(const torch::nn::Module& module, std::set<const void*>& seen,
                    std::vector<at::Tensor>& found);

std::string name_of(const std::vector<PipelineStage>& pieces, std::size_t number);

// The schedule for the group, where every rank's pieces and options are the same and fit it; else every rank
// is told.
PipelineSchedule planned_schedule(const std::vector<PipelineStage>& pieces, const AnySchedule& schedule,
                                  const PipelineOptions& options, Group& group);
std::vector<int> find_cut(const std::vector<PipelineStage>& pieces, int stages,
                          const PipelineOptions& options, Group& group);

// Modules under names such as "blocks.0". Those named "" stand there with what they have.
class PlacedPieces : public torch::nn::Module {
 public:
  void place(const std::string& name, const std::shared_ptr<torch::nn::Module>& module);
  void train(bool on = true) override;

 private:
  std::vector<std::shared_ptr<torch::nn::Module>> unnamed_;
};

}  // namespace lockstep::detail
