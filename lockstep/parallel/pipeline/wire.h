// Messages between stages on different ranks: any number of values of any shape, or a report that a stage
// failed.
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

// The routes between stages. Constructed once per pipeline.
struct PipelineRoutes {
  // Collective: every rank constructs it. own: the device of this rank's weights, if it has any. Otherwise
  // its stages run on a device of the type that holds the peers' weights: `like`, or the World's device.
  // Throws ConfigError on every rank if values cannot be transferred.
  PipelineRoutes(Group group, std::optional<at::Device> own, at::Device like,
                 const PipelineSchedule& schedule);

  // A two-rank group, used if an engine has no tags: one per direction between neighbours, so that messages
  // in one direction never wait for the other. All ranks open and release them in the same order, because
  // NCCL waits for both ranks each time.
  struct Channel {
    int peer;
    bool sends;
    Group group;
  };

  const Group* channel(int peer, bool sends) const;  // Null if there is none.

  Group group;
  at::Device device;
  bool alike = true;  // True if all ranks' devices are of one type.

 private:
  void open(int sender, int receiver);
  std::vector<Channel> channels_;
};

class PipelineWire {
 public:
  struct Message {
    StageValues values = {};  // Values that need a gradient require one.
    std::optional<std::string> failure = {};
  };

  // site: reported in errors.
  PipelineWire(const PipelineRoutes& routes, Site site);

  // Announces the tags of the peer's messages, in the order in which it sends them. For peers with a channel.
  void expect(int peer, int tag) { coming_[peer].push_back(tag); }

  // Both sends return immediately. Both sides must use the same tag, a different one for each message; peers
  // are ranks of the group. If send() throws anything but a CommError, nothing has been sent.
  void send(const StageValues& values, int peer, int tag);
  void send_failure(const std::string& text, int peer, int tag);
  Message receive(int peer, int tag);
  void finish();  // Waits until everything sent has been received.

 private:
  void post(at::Tensor tensor, int peer, int tag);
  at::Tensor take(at::Tensor tensor, int peer, int tag);
  Message take_message(int peer, int tag);

  // The group, or the channel where the engine of that device has no tags.
  Work message(bool sends, at::Tensor tensor, int peer, int tag);

  const PipelineRoutes& routes_;
  Group group_;
  const bool has_cpu_;      // True if the group has an engine for CPU tensors.
  const at::Device words_;  // Device of the headers.
  const Site site_;
  std::deque<Work> sent_;
  std::map<int, std::deque<int>> coming_;  // Tags of the messages to come, by peer.
  std::map<int, Message> early_;           // Messages that arrived before they were needed, by tag.
};

}  // namespace lockstep::detail
