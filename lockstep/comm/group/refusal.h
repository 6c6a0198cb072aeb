// Refusal: a rank that cannot take part in the collectives of its peers joins them with the reason instead.
// The operation then fails on every rank with that text as the cause (CommError::Kind::stopped). Nothing is
// read or written, and the group stays usable: as many operations follow on each rank as before.
#pragma once

#include <string>

#include <lockstep/comm/group.h>

namespace lockstep::detail {

class Refusal {
 public:
  // True if the transport of CPU tensors is shared memory; other transports cannot refuse.
  static bool possible(const Group& group);
  // Refuses the next collective of the group. Every rank that issues it gets the text.
  static void next(Group& group, const std::string& text, Site site = Site::current());
  // True after a failed operation if it failed because of a refusal: the group can still be used.
  static bool group_lives(const Group& group);
};

}  // namespace lockstep::detail
