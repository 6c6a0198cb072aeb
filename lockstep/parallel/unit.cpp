#include <lockstep/parallel/unit.h>

#include <algorithm>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::detail {
namespace {
std::atomic<int> weight_parts = 0;  // backward of other devices runs on threads of its own
}

WeightPart::WeightPart() { ++weight_parts; }
WeightPart::~WeightPart() { --weight_parts; }

// A parameter of the module: its gradient must have come through the attachment.
struct Attachment::Watch {
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
  std::uintptr_t hook;
  ~Watch() { accumulator->del_post_hook(hook); }
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
  const auto modules = module.modules();
  return std::any_of(modules.begin(), modules.end(), [](const auto& each) {
    const auto* slot = slot_of(each.get());
    return dynamic_cast<MeetsInForward*>(each.get()) != nullptr ||
           (slot && dynamic_cast<MeetsInForward*>(slot->attachment.get()) != nullptr);
  });
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
    const auto hook = accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [watched = attachment.get(), name](const torch::autograd::variable_list& outputs,
                                           const torch::autograd::variable_list&) {
          if (weight_parts == 0 && watched->pass_ != torch::autograd::get_current_graph_task_id())
            throw ConfigError(fmt::format(
                "'{0}' was called round its Unit, so that {1} had no part in it: call it as "
                "{0}(x), not {0}->forward(x). (If it was not, this backward is of its parameters alone, "
                "such as of a penalty on them: add that to the loss)",
                name, watched->what()));
          return outputs;
        }));
    attachment->watches_.push_back(
        std::unique_ptr<Attachment::Watch>(new Attachment::Watch{std::move(accumulator), hook}));
  }
  slot->attachment = std::move(attachment);
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
