// What stages on different ranks hand to one another: values of any number and shape, or the word that a
// stage failed.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/comm/group.h>
#include <lockstep/parallel/pipeline_stage.h>
#include <lockstep/schedule/schedule.h>

namespace lockstep::detail {

// Made once for a pipeline.
struct PipelineRoutes {
  // Every rank. own: where this rank's weights are, if it has any. Else its stages are where the others'
  // weights are: at like, or at the World's device. ConfigError on every rank where values could not travel.
  PipelineRoutes(Group group, std::optional<at::Device> own, at::Device like,
                 const PipelineSchedule& schedule);

  // Where an engine has no tags: a group of two for each way between neighbours, so that what goes one way
  // never waits for what goes the other. In the order in which all ranks open them, and let go of them: NCCL
  // waits for both ranks each time.
  struct Channel {
    int peer;
    bool sends;
    Group group;
  };

  const Group* channel(int peer, bool sends) const;  // null: there is none

  Group group;
  at::Device device;
  bool alike = true;  // all ranks' devices are of one kind

 private:
  void open(int sender, int receiver);
  std::vector<Channel> channels_;
};

class PipelineWire {
 public:
  struct Message {
    StageValues values = {};  // those that need a gradient require one
    std::optional<std::string> failure = {};
  };

  // site: for errors.
  PipelineWire(const PipelineRoutes& routes, Site site);

  // The tags of what the peer will send here, in its order. Of peers with a channel.
  void expect(int peer, int tag) { coming_[peer].push_back(tag); }

  // Both return at once. The same tag on both sides, one for each message; peers are ranks of the group.
  // Where send throws anything but a CommError, nothing has been sent.
  void send(const StageValues& values, int peer, int tag);
  void send_failure(const std::string& text, int peer, int tag);
  Message receive(int peer, int tag);
  void finish();  // all that was sent has been taken

 private:
  void post(at::Tensor tensor, int peer, int tag);
  at::Tensor take(at::Tensor tensor, int peer, int tag);
  Message take_message(int peer, int tag);

  // The group, or the channel where the engine of that device has no tags.
  Work message(bool sends, at::Tensor tensor, int peer, int tag);

  const PipelineRoutes& routes_;
  Group group_;
  const bool has_cpu_;      // an engine for CPU tensors
  const at::Device words_;  // where headers are
  const Site site_;
  std::deque<Work> sent_;
  std::map<int, std::deque<int>> coming_;  // by peer
  std::map<int, Message> early_;           // by tag: came before it was asked for
};

}  // namespace lockstep::detail
