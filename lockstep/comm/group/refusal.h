// A rank that cannot take part in collectives which its peers issue comes to them with the reason. Every rank's
// operation then fails with that text as the cause (CommError::Kind::stopped), nothing is read or written, and the
// group lives: as many operations follow on each rank as before.
#pragma once

#include <string>

#include <lockstep/comm/group.h>

namespace lockstep::detail {

class Refusal {
 public:
  // True where the transport of CPU tensors is shared memory; the others cannot refuse.
  static bool possible(const Group& group);
  // Refuses the next collective of the group. Every rank that issues it gets the text.
  static void next(Group& group, const std::string& text, Site site = Site::current());
  // True after a failed operation if it was refused: the group can be used.
  static bool group_lives(const Group& group);
};

}  // namespace lockstep::detail
