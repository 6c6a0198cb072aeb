// What stages on different ranks hand to one another: values of any number and shape, or the word that a
// stage failed.
#pragma once

#include <deque>
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

  // device: where values are wanted. site: for errors.
  PipelineWire(Group group, at::Device device, Site site);

  // Both return at once. The same tag on both sides; peers are ranks of the group. Where send throws anything
  // but a CommError, nothing has been sent.
  void send(const StageValues& values, int peer, int tag);
  void send_failure(const std::string& text, int peer, int tag);
  Message receive(int peer, int tag);
  void finish();  // all that was sent has been taken

 private:
  void post(at::Tensor tensor, int peer, int tag);
  at::Tensor take(at::Tensor tensor, int peer, int tag);
  Group group_;
  at::Device device_;
  at::Device words_;  // where headers are
  Site site_;
  std::deque<Work> sent_;
};

}  // namespace lockstep::detail
