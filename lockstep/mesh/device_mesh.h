// DeviceMesh: arranges ranks in a grid with named axes and provides a Group for each axis.
//
//   DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}, {"tp", 2}});
//   mesh["tp"].all_reduce(t).wait();      // among the ranks that differ from this one only in "tp"
//   mesh.group({"dp", "tp"})              // the ranks with this rank's "pp" coordinate
//
// The last axis varies fastest: rank = (pp * 2 + dp) * 2 + tp. One size may be -1: it is computed from the
// rest.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <lockstep/comm/world.h>

namespace lockstep {

class DeviceMesh {
 public:
  using Axes = std::vector<std::pair<std::string, int>>;

  // Collective: every rank of the world must call it with the same axes. Throws ConfigError if the sizes do
  // not multiply to the world size, or if a name is empty or repeated.
  DeviceMesh(World& world, Axes axes);

  const std::vector<std::string>& axes() const;
  int size() const;  // number of ranks in the mesh
  // Throws ConfigError for an unknown axis, with the valid names.
  int size(std::string_view axis) const;
  int coordinate(std::string_view axis) const;  // this rank's coordinate
  const std::vector<int>& ranks() const;        // world ranks, in the mesh's order

  // Group of the ranks that differ from this one only on that axis, ordered along it.
  Group operator[](std::string_view axis) const;
  // Group of the ranks that differ only on these axes, in the order of the mesh. The first call is
  // collective: every rank of the group must make it.
  Group group(const std::vector<std::string>& axes) const;
  // The part of the mesh that differs from this rank only on these axes, as a mesh. Does not communicate.
  DeviceMesh slice(const std::vector<std::string>& axes) const;

 private:
  struct State;
  explicit DeviceMesh(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace lockstep
