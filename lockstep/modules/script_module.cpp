#include <lockstep/modules/script_module.h>

#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

namespace lockstep::detail {
namespace {

class RegisteredScript : public torch::nn::Module {
 public:
  explicit RegisteredScript(torch::jit::Module script) : script_(std::move(script)) {
    // Before submodules are registered, because train() is passed on to them.
    torch::nn::Module::train(script_.is_training());
    for (const auto& item : script_.named_parameters(/*recurse=*/false))
      register_parameter(item.name, item.value, item.value.requires_grad());
    for (const auto& item : script_.named_buffers(/*recurse=*/false)) register_buffer(item.name, item.value);
    for (const auto& item : script_.named_children())
      register_module(item.name, std::make_shared<RegisteredScript>(item.value));
  }

  void train(bool on) override {
    script_.train(on);
    torch::nn::Module::train(on);
  }

 private:
  torch::jit::Module script_;
};

bool holds_nothing(const torch::jit::Module& script) {
  try {
    return script._ivalue() == nullptr;
  } catch (const c10::Error&) {  // LibTorch offers no other check.
    return true;
  }
}

}  // namespace

std::shared_ptr<torch::nn::Module> registered(const torch::jit::Module& script) {
  if (holds_nothing(script)) return nullptr;
  return std::make_shared<RegisteredScript>(script);
}

void collect_tensors_of(const c10::IValue& value, std::vector<at::Tensor>& found) {
  value.visit([&](const c10::IValue& each) {
    if (each.isTensor()) found.push_back(each.toTensor());
    return false;  // Descend into the value.
  });
}

}  // namespace lockstep::detail
