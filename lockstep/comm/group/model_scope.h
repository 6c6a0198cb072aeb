// ModelScope: marks which model of a group a thread's calls belong to. Models of equal shapes make calls that
// look alike, so only the model's number distinguishes the gradients of one from those of another.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <lockstep/comm/group.h>

namespace lockstep::detail {

// Collective: every rank makes its models of a group in the same order, so they get the same numbers.
class GroupModel {
 public:
  GroupModel(const Group& group, const std::string& name);

 private:
  friend class ModelScope;
  std::weak_ptr<GroupState> group_;  // a model may outlive its World
  std::string text_;                 // "model 2 (Generator)"
};

// While it lives, this thread's collectives on the model's group carry the model in their tag, if the group
// has several models. begins: the first call starts a forward or backward pass, where ranks may run different
// models. That call is then compared even on engines that do not compare calls.
class ModelScope {
 public:
  ModelScope(const std::optional<GroupModel>& model, bool begins);  // no model: no effect
  ~ModelScope();
  ModelScope(const ModelScope&) = delete;
  ModelScope& operator=(const ModelScope&) = delete;

  // Adds the model to the tag of a call that this thread makes on the group. Returns true if the call must be
  // compared.
  static bool mark(const GroupState& group, int models, Call& call);

 private:
  static std::shared_ptr<GroupState> state_of(const Group& group) { return group.state_; }
  friend class GroupModel;

  const GroupModel* const model_;
  bool begins_;
  ModelScope* const outer_;
};

}  // namespace lockstep::detail
