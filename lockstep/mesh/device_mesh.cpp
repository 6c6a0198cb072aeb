#include <lockstep/mesh/device_mesh.h>

#include <algorithm>
#include <future>
#include <map>
#include <mutex>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>

namespace lockstep {

struct DeviceMesh::State {
  explicit State(Group all) : world(std::move(all)) {}

  Group world;  // Group of all ranks, from which the other groups are made.
  std::vector<std::string> axes;
  std::vector<int> sizes, coordinates;
  std::vector<int> ranks;  // World ranks, row-major over the axes.
  std::map<std::vector<std::size_t>, std::shared_future<Group>> groups;  // Keyed by axes.
  std::mutex mutex;

  std::size_t index(std::string_view axis) const {
    auto found = std::find(axes.begin(), axes.end(), axis);
    if (found == axes.end())
      throw ConfigError(
          fmt::format("DeviceMesh: unknown axis '{}'; expected one of {}", axis, fmt::join(axes, ", ")));
    return static_cast<std::size_t>(found - axes.begin());
  }

  // Indices of the chosen axes, in the mesh's own order.
  std::vector<std::size_t> indices(const std::vector<std::string>& chosen) const {
    std::vector<std::size_t> result;
    for (const auto& axis : chosen) result.push_back(index(axis));
    std::sort(result.begin(), result.end());
    if (result.empty() || std::adjacent_find(result.begin(), result.end()) != result.end())
      throw ConfigError(fmt::format("DeviceMesh: expected distinct axes of [{1}], got [{0}]",
                                    fmt::join(chosen, ", "), fmt::join(axes, ", ")));
    return result;
  }

  // World ranks whose coordinates equal this rank's on all axes but the chosen ones.
  std::vector<int> members(const std::vector<std::size_t>& chosen) const {
    std::vector<int> result;
    for (std::size_t place = 0; place < ranks.size(); ++place) {
      bool ours = true;
      std::size_t rest = place;
      for (std::size_t axis = axes.size(); axis-- > 0;) {
        const auto size = static_cast<std::size_t>(sizes[axis]);
        const bool free = std::find(chosen.begin(), chosen.end(), axis) != chosen.end();
        ours = ours && (free || static_cast<int>(rest % size) == coordinates[axis]);
        rest /= size;
      }
      if (ours) result.push_back(ranks[place]);
    }
    return result;
  }

  // The first caller makes the group, without holding the lock, because other threads may be making other
  // groups.
  Group group(const std::vector<std::size_t>& chosen) {
    std::vector<std::string> names;
    for (auto axis : chosen) names.push_back(axes[axis]);
    std::promise<Group> promise;
    std::unique_lock lock(mutex);
    auto [found, first] = groups.try_emplace(chosen, promise.get_future().share());
    auto future = found->second;
    lock.unlock();
    if (first) {
      try {
        promise.set_value(
            world.subgroup(members(chosen), {.name = fmt::format("{}", fmt::join(names, "."))}));
      } catch (...) {
        promise.set_exception(std::current_exception());
        lock.lock();
        groups.erase(chosen);
      }
    }
    return future.get();
  }

  void place(int world_rank) {
    auto found = std::find(ranks.begin(), ranks.end(), world_rank);
    LOCKSTEP_ASSERT(found != ranks.end(), "the mesh does not contain this rank");
    auto rest = static_cast<int>(found - ranks.begin());
    coordinates.resize(axes.size());
    for (std::size_t axis = axes.size(); axis-- > 0;) {
      coordinates[axis] = rest % sizes[axis];
      rest /= sizes[axis];
    }
  }
};

DeviceMesh::DeviceMesh(World& world, Axes axes) : state_(std::make_shared<State>(world.group())) {
  std::vector<std::string> texts;
  for (const auto& [name, size] : axes) texts.push_back(fmt::format("{}={}", name, size));
  auto refuse = [&](std::string_view why) {
    return ConfigError(fmt::format("DeviceMesh: invalid mesh [{}] over {} ranks: {}", fmt::join(texts, ", "),
                                   world.size(), why));
  };
  if (axes.empty()) throw refuse("expected at least one axis");
  std::int64_t known = 1;
  int open = 0;
  for (const auto& [name, size] : axes) {
    if (name.empty()) throw refuse("an axis has an empty name");
    if (std::find(state_->axes.begin(), state_->axes.end(), name) != state_->axes.end())
      throw refuse("axis names must be distinct");
    if (size != -1 && (size < 1 || size > world.size()))
      throw refuse("sizes must be from 1 to the number of ranks, or -1 for the rest");
    if (size == -1)
      ++open;
    else
      known *= size;
    state_->axes.push_back(name);
    state_->sizes.push_back(size);
  }
  if (open > 1) throw refuse("at most one size may be -1");
  if (open == 1 ? world.size() % known != 0 : known != world.size())
    throw refuse(fmt::format("the sizes multiply to {}", known));
  for (int& size : state_->sizes)
    if (size == -1) size = world.size() / static_cast<int>(known);

  state_->ranks.resize(static_cast<std::size_t>(world.size()));
  std::iota(state_->ranks.begin(), state_->ranks.end(), 0);
  state_->place(world.rank());
  for (std::size_t axis = 0; axis < state_->axes.size(); ++axis) (void)state_->group({axis});
}

const std::vector<std::string>& DeviceMesh::axes() const { return state_->axes; }
int DeviceMesh::size() const { return static_cast<int>(state_->ranks.size()); }
int DeviceMesh::size(std::string_view axis) const { return state_->sizes[state_->index(axis)]; }
int DeviceMesh::coordinate(std::string_view axis) const { return state_->coordinates[state_->index(axis)]; }
const std::vector<int>& DeviceMesh::ranks() const { return state_->ranks; }

Group DeviceMesh::operator[](std::string_view axis) const { return state_->group({state_->index(axis)}); }

Group DeviceMesh::group(const std::vector<std::string>& axes) const {
  return state_->group(state_->indices(axes));
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& axes) const {
  const auto chosen = state_->indices(axes);
  auto part = std::make_shared<State>(state_->world);
  part->ranks = state_->members(chosen);
  std::lock_guard lock(state_->mutex);
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    part->axes.push_back(state_->axes[chosen[i]]);
    part->sizes.push_back(state_->sizes[chosen[i]]);
    part->coordinates.push_back(state_->coordinates[chosen[i]]);
    part->groups.emplace(std::vector<std::size_t>{i}, state_->groups.at({chosen[i]}));
  }
  return DeviceMesh(std::move(part));
}

}  // namespace lockstep
