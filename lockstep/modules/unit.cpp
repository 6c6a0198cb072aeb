#include <lockstep/modules/unit.h>

#include <algorithm>
#include <map>
#include <mutex>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::detail {
namespace {
std::atomic<int> weight_parts = 0;  // Atomic, because backward on other devices runs on threads of its own.

// Matches one component of a name: '*' stands for any text.
bool matches_component(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] != '*')
    return !name.empty() && pattern[0] == name[0] && matches_component(pattern.substr(1), name.substr(1));
  for (std::size_t skipped = 0; skipped <= name.size(); ++skipped)
    if (matches_component(pattern.substr(1), name.substr(skipped))) return true;
  return false;
}

}  // namespace

bool name_matches(std::string_view pattern, std::string_view name) {
  if (name.empty()) return pattern.empty();  // The module itself.
  const auto pattern_dot = pattern.find('.'), name_dot = name.find('.');
  if (!matches_component(pattern.substr(0, pattern_dot), name.substr(0, name_dot))) return false;
  if (pattern_dot == pattern.npos || name_dot == name.npos) return pattern_dot == name_dot;
  return name_matches(pattern.substr(pattern_dot + 1), name.substr(name_dot + 1));
}

WeightPart::WeightPart() { ++weight_parts; }
WeightPart::~WeightPart() { --weight_parts; }

// Attachments whose module uses a parameter. If layers share it, its gradient must have passed through one of
// them. Not in the unnamed namespace, because Attachment::Watch, which has linkage, contains it.
struct Sharers {
  std::mutex mutex;
  std::vector<const Attachment*> attachments;
};

// Returns the same object for all that share the accumulator.
static std::shared_ptr<Sharers> sharers_of(const torch::autograd::Node* accumulator) {
  static std::mutex mutex;
  static std::map<const torch::autograd::Node*, std::weak_ptr<Sharers>> known;
  std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& each) { return each.second.expired(); });
  auto& entry = known[accumulator];
  auto sharers = entry.lock();
  if (!sharers) entry = sharers = std::make_shared<Sharers>();
  return sharers;
}

// Watches one parameter of the module: its gradient must have passed through the attachment.
struct Attachment::Watch {
  const Attachment* attachment;
  std::shared_ptr<Sharers> sharers;
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
  std::uintptr_t hook;
  ~Watch() {
    accumulator->del_post_hook(hook);
    std::lock_guard lock(sharers->mutex);
    std::erase(sharers->attachments, attachment);
  }
  static bool passed(Sharers& sharers, int pass) {
    std::lock_guard lock(sharers.mutex);
    return std::any_of(sharers.attachments.begin(), sharers.attachments.end(),
                       [&](const Attachment* each) { return each->pass_ == pass; });
  }
};

Attachment::Attachment(std::string what) : what_(std::move(what)) {}
Attachment::~Attachment() = default;

at::Tensor Attachment::operator()(const at::Tensor& input) {
  auto output = forward(input);
  if (output.defined() && output.requires_grad())
    output.register_hook([self = shared_from_this()](const at::Tensor& gradient) {
      self->pass_ = torch::autograd::get_current_graph_task_id();
      return gradient;
    });
  return output;
}

bool communicates_in_forward(const torch::nn::Module& module) {
  const auto below = module.modules(/*include_self=*/false);  // A module object has no shared_ptr to itself.
  return role_of<CommunicatesInForward>(module) ||
         std::any_of(below.begin(), below.end(),
                     [](const auto& each) { return role_of<CommunicatesInForward>(*each); });
}

std::optional<SplitModule> find_split(const torch::nn::Module& module) {
  const auto look = [](const torch::nn::Module& each, const std::string& name) -> std::optional<SplitModule> {
    const auto* sharded = role_of<ShardedModule>(each);
    if (!sharded || sharded->slices_over().size() == 1) return std::nullopt;
    return SplitModule{name, sharded->slices_over()};
  };
  if (auto found = look(module, "the model itself")) return found;
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    if (auto found = look(*item.value(), item.key())) return found;
  return std::nullopt;
}

UnitSlot* slot_of(torch::nn::Module* module) { return dynamic_cast<UnitSlot*>(module); }
const UnitSlot* slot_of(const torch::nn::Module* module) { return dynamic_cast<const UnitSlot*>(module); }

void attach(torch::nn::Module& module, const std::string& name, std::shared_ptr<Attachment> attachment,
            bool watch) {
  auto* slot = slot_of(&module);
  LOCKSTEP_ASSERT(slot, "attached to a module that was not made by a Unit");
  if (slot->attachment)
    throw ConfigError(fmt::format("'{}' already has {} attached, so {} cannot be attached", name,
                                  slot->attachment->what(), attachment->what()));
  for (const auto& parameter : module.parameters(/*recurse=*/false)) {
    if (!watch || !parameter.defined() || !parameter.requires_grad()) continue;
    auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
    auto sharers = sharers_of(accumulator.get());
    {
      std::lock_guard lock(sharers->mutex);
      sharers->attachments.push_back(attachment.get());
    }
    const auto hook = accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [watched = attachment.get(), sharers, name](const torch::autograd::variable_list& outputs,
                                                    const torch::autograd::variable_list&) {
          if (weight_parts == 0 &&
              !Attachment::Watch::passed(*sharers, torch::autograd::get_current_graph_task_id()))
            throw ConfigError(fmt::format(
                "'{0}' bypassed its Unit ({0}->forward(x)), so {1} was not applied: call {0}(x). If the "
                "Unit was called, this backward pass covers its parameters only, as for a penalty on them: "
                "add the penalty to the loss",
                name, watched->what()));
          return outputs;
        }));
    attachment->watches_.push_back(std::unique_ptr<Attachment::Watch>(
        new Attachment::Watch{attachment.get(), std::move(sharers), std::move(accumulator), hook}));
  }
  slot->attachment = std::move(attachment);
}

void refuse_call(const torch::nn::Module& module) {
  throw ConfigError(fmt::format(
      "'{}' cannot be called here: its forward must take one tensor and return one tensor", module.name()));
}

void refuse_clone(const Attachment& attachment) {
  throw ConfigError(
      fmt::format("a Unit with {0} attached cannot be cloned, because the clone would lack it; clone the "
                  "Unit first, then attach {0} to both",
                  attachment.what()));
}

void refuse_arguments(const Attachment& attachment, std::size_t count) {
  throw ConfigError(
      fmt::format("a Unit with {1} attached must take one tensor and return one, but was called with {0} "
                  "arguments or returns another type",
                  count, attachment.what()));
}

}  // namespace lockstep::detail
