// What stages on different ranks hand to one another: values of any number and shape, or the word that a
// stage failed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/group.h>
#include <lockstep/parallel/pipeline_stage.h>

namespace lockstep::detail {

class PipelineWire {
 public:
  struct Message {
    StageValues values = {};  // those that need a gradient require one
    std::optional<std::string> failure = {};
  };

  explicit PipelineWire(Group group) : group_(std::move(group)) {}

  // Both return at once. The same tag on both sides; peers are ranks of the group.
  void send(const StageValues& values, int peer, int tag);
  void send_failure(const std::string& text, int peer, int tag);
  Message receive(int peer, int tag, at::Device device);
  void finish();  // all that was sent has been taken

 private:
  void post(at::Tensor tensor, int peer, int tag);
  Group group_;
  std::vector<Work> sent_;
};

}  // namespace lockstep::detail
