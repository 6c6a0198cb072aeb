// Preparation of a pipeline: checks the pieces on every rank, cuts the model and places the pieces in a
// module.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include <lockstep/parallel/pipeline.h>

namespace lockstep::detail {

// Appends each tensor once, even if several modules share it.
void add_parameters(const torch::nn::Module& module, std::set<const void*>& seen,
                    std::vector<at::Tensor>& found);

std::string name_of(const std::vector<PipelineStage>& pieces, std::size_t number);

// Returns the schedule for the group. Throws ConfigError on every rank if the pieces or options differ
// between ranks or do not fit the schedule.
PipelineSchedule planned_schedule(const std::vector<PipelineStage>& pieces, const AnySchedule& schedule,
                                  const PipelineOptions& options, Group& group);
std::vector<int> find_cut(const std::vector<PipelineStage>& pieces, int stages,
                          const PipelineOptions& options, Group& group);

// Holds modules under names such as "blocks.0". A module named "" contributes its children and parameters
// directly.
class PlacedPieces : public torch::nn::Module {
 public:
  void place(const std::string& name, const std::shared_ptr<torch::nn::Module>& module);
  void train(bool on = true) override;

 private:
  std::vector<std::shared_ptr<torch::nn::Module>> unnamed_;
};

}  // namespace lockstep::detail
