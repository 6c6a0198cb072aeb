#include <lockstep/comm/group/model_scope.h>

#include <utility>

#include <fmt/format.h>
#include <lockstep/comm/group/group_state.h>

namespace lockstep::detail {
namespace {

thread_local ModelScope* innermost_model = nullptr;

}  // namespace

GroupModel::GroupModel(const Group& group, const std::string& name) {
  const auto state = ModelScope::state_of(group);
  group_ = state;
  text_ = fmt::format("model {} ({})", state->add_model(), name);
}

ModelScope::ModelScope(const std::optional<GroupModel>& model, bool begins)
    : model_(model ? &*model : nullptr), begins_(begins), outer_(std::exchange(innermost_model, this)) {
  // A scope within one of the same model does not begin a pass.
  for (const auto* scope = outer_; scope != nullptr; scope = scope->outer_)
    if (scope->model_ == model_) begins_ = false;
}

ModelScope::~ModelScope() { innermost_model = outer_; }

bool ModelScope::mark(const GroupState& group, int models, Call& call) {
  if (models < 2 || innermost_model == nullptr || point_to_point(call.operation)) return false;
  const auto* model = innermost_model->model_;
  if (model == nullptr || model->group_.lock().get() != &group) return false;
  call.tag = call.tag.empty() ? model->text_ : fmt::format("{} of {}", call.tag, model->text_);
  bool begins = false;
  for (auto* scope = innermost_model; scope != nullptr; scope = scope->outer_)
    if (scope->model_ == model) begins = std::exchange(scope->begins_, false) || begins;
  return begins;
}

}  // namespace lockstep::detail
