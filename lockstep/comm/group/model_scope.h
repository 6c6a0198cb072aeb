// Which model of a group the calls of a thread belong to. Models of equal shapes make calls that look alike:
// only their identity tells gradients of one from those of another.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <lockstep/comm/group.h>

namespace lockstep::detail {

// Collective: every rank makes its models of a group in the same order, and so gives them the same numbers.
class GroupModel {
 public:
  GroupModel(const Group& group, const std::string& name);

 private:
  friend class ModelScope;
  std::weak_ptr<GroupState> group_;  // a model may outlive its World
  std::string text_;                 // "model 2 (Generator)"
};

// While it lives, this thread's collectives on the model's group name the model in their tag, where the group has
// several. begins: they are the first of a forward or backward pass, at which ranks may have come to different
// models. The first of them is then compared also by engines that compare no calls by themselves.
class ModelScope {
 public:
  ModelScope(const std::optional<GroupModel>& model, bool begins);  // no model: no effect
  ~ModelScope();
  ModelScope(const ModelScope&) = delete;
  ModelScope& operator=(const ModelScope&) = delete;

  // Of a call that this thread makes on the group: adds the model to its tag. Returns true if it must be compared.
  static bool mark(const GroupState& group, int models, Call& call);

 private:
  static std::shared_ptr<GroupState> state_of(const Group& group) { return group.state_; }
  friend class GroupModel;

  const GroupModel* const model_;
  bool begins_;
  ModelScope* const outer_;
};

}  // namespace lockstep::detail
