// Adapts TorchScript modules to interfaces that take a torch::nn::Module.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace c10 {
struct IValue;
}
namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace lockstep::detail {

// Returns a module that registers the parameters, buffers and submodules of a TorchScript module under their
// names, as the same tensors, and passes train() on. Returns null for an empty torch::jit::Module.
std::shared_ptr<torch::nn::Module> registered(const torch::jit::Module& script);

// Appends the tensors in a value, including those in its lists, tuples and dictionaries.
void collect_tensors_of(const c10::IValue& value, std::vector<at::Tensor>& found);

}  // namespace lockstep::detail
