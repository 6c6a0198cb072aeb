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
std::atomic<int> weight_parts = 0;  // backward of other devices runs on threads of its own

// One component: '*' stands for any text.
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
  if (name.empty()) return pattern.empty();  // the module itself
  const auto pattern_dot = pattern.find('.'), name_dot = name.find('.');
  if (!matches_component(pattern.substr(0, pattern_dot), name.substr(0, name_dot))) return false;
  if (pattern_dot == pattern.npos || name_dot == name.npos) return pattern_dot == name_dot;
  return name_matches(pattern.substr(pattern_dot + 1), name.substr(name_dot + 1));
}

WeightPart::WeightPart() { ++weight_parts; }
WeightPart::~WeightPart() { --weight_parts; }

// Whose gradient a parameter's may be. Layers may share it: then it has come through one of them.
// Attachment::Watch, which has linkage, contains it: it is not in an unnamed namespace.
struct Sharers {
  std::mutex mutex;
  std::vector<const Attachment*> attachments;
};

// The same for all that share the accumulator.
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

// A parameter of the module: its gradient must have come through the attachment.
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

bool meets_in_forward(torch::nn::Module& module) {
  const auto meets = [](torch::nn::Module& each) {
    const auto* slot = slot_of(&each);
    return dynamic_cast<CommunicatesInForward*>(&each) != nullptr ||
           (slot && dynamic_cast<CommunicatesInForward*>(slot->attachment.get()) != nullptr);
  };
  const auto below = module.modules(/*include_self=*/false);  // a module object has no pointer to itself
  return meets(module) ||
         std::any_of(below.begin(), below.end(), [&](const auto& each) { return meets(*each); });
}

std::optional<SplitModule> find_split(const torch::nn::Module& module) {
  const auto look = [](const torch::nn::Module& each, const std::string& name) -> std::optional<SplitModule> {
    const auto* holder = dynamic_cast<const HoldsSlices*>(&each);
    const auto* slot = dynamic_cast<const UnitSlot*>(&each);
    if (!holder && slot) holder = dynamic_cast<const HoldsSlices*>(slot->attachment.get());
    if (!holder || holder->slices_over().size() == 1) return std::nullopt;
    return SplitModule{name, holder->slices_over()};
  };
  if (auto found = look(module, "the model itself")) return found;
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    if (auto found = look(*item.value(), item.key())) return found;
  return std::nullopt;
}

UnitSlot* slot_of(torch::nn::Module* module) { return dynamic_cast<UnitSlot*>(module); }

void attach(torch::nn::Module& module, const std::string& name, std::shared_ptr<Attachment> attachment,
            bool watch) {
  auto* slot = slot_of(&module);
  LOCKSTEP_ASSERT(slot, "attached to a module that no Unit made");
  if (slot->attachment)
    throw ConfigError(fmt::format("'{}' has {} attached: {} cannot be attached too", name,
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
                "'{0}' was called round its Unit, so that {1} had no part in it: call it as "
                "{0}(x), not {0}->forward(x). (If it was not, this backward is of its parameters alone, "
                "such as of a penalty on them: add that to the loss)",
                name, watched->what()));
          return outputs;
        }));
    attachment->watches_.push_back(std::unique_ptr<Attachment::Watch>(
        new Attachment::Watch{attachment.get(), std::move(sharers), std::move(accumulator), hook}));
  }
  slot->attachment = std::move(attachment);
}

void refuse_call(const torch::nn::Module& module) {
  throw ConfigError(fmt::format("'{}' cannot be called with one tensor for one tensor, which is needed here",
                                module.name()));
}

void refuse_clone(const Attachment& attachment) {
  throw ConfigError(
      fmt::format("a Unit with {0} attached cannot be cloned, because its clone would be without: clone "
                  "first, then attach {0} to both",
                  attachment.what()));
}

void refuse_arguments(const Attachment& attachment, std::size_t count) {
  throw ConfigError(
      fmt::format("a Unit was called with {} arguments or another result than a tensor, and has {} attached, "
                  "which takes one "
                  "tensor and gives one",
                  count, attachment.what()));
}

}  // namespace lockstep::detail
