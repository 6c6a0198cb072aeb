// Ranks on a grid with named axes, and a Group for each axis.
//
//   DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}, {"tp", 2}});
//   mesh["tp"].all_reduce(t).wait();      // with the ranks that differ from this one in "tp" alone
//   mesh.group({"dp", "tp"})              // with those that share this one's "pp"
//
// The last axis varies fastest: rank = (pp * 2 + dp) * 2 + tp. One size may be -1: what is left.
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

  // Every rank of the world calls it with the same axes. ConfigError when the sizes do not multiply to
  // the world's, or names repeat or are empty.
  DeviceMesh(World& world, Axes axes);

  const std::vector<std::string>& axes() const;
  int size() const;                             // of the whole mesh
  int size(std::string_view axis) const;        // ConfigError for an unknown axis names those there are
  int coordinate(std::string_view axis) const;  // of this rank
  const std::vector<int>& ranks() const;        // of the world, in the mesh's order

  // The ranks that differ from this one in that axis alone, in its order.
  Group operator[](std::string_view axis) const;
  // In those axes alone, in the order of the mesh. Made at the first call, which all its ranks make.
  Group group(const std::vector<std::string>& axes) const;
  // The part of the mesh that this rank shares in those axes, as a mesh of its own. Local.
  DeviceMesh slice(const std::vector<std::string>& axes) const;

 private:
  struct State;
  explicit DeviceMesh(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace lockstep
