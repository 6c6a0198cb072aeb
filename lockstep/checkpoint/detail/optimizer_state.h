// Converts the state of optimizers of LibTorch and Lockstep to and from names, numbers and tensors.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/checkpoint/format/manifest.h>

namespace torch::optim {
class Optimizer;
}

namespace lockstep::detail {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// Per group: each parameter's name in the model, or "group0.3" for one that the model does not have.
using ParameterNames = std::vector<std::vector<std::string>>;
ParameterNames parameter_names(const torch::optim::Optimizer& optimizer,
                               const std::vector<NamedTensor>& model);

// Describes the optimizer and appends its tensors, named optimizer/PARAMETER/FIELD. Throws ConfigError for an
// unsupported optimizer.
OptimizerManifest describe(torch::optim::Optimizer& optimizer, const ParameterNames& names,
                           std::vector<NamedTensor>& tensors);

// Checks that the saved state fits, and requests the tensors to read: calls want(name, like) for each of the
// optimizer's tensors for which `in_file` returns a dtype. `like` resembles the parameter, but is float32 for
// bfloat16 and float16 parameters if it was saved so. Throws FormatError if the state does not fit.
using InFile = std::function<std::optional<at::ScalarType>(const std::string& name)>;
using Want = std::function<void(const std::string& name, const at::Tensor& like)>;
void want_state(torch::optim::Optimizer& optimizer, const ParameterNames& names,
                const OptimizerManifest& saved, const InFile& in_file, const Want& want);

// Builds the state from the tensors that were read. Calling the result installs it in the optimizer; that
// cannot fail.
std::function<void()> prepare_state(torch::optim::Optimizer& optimizer, const ParameterNames& names,
                                    const OptimizerManifest& saved,
                                    const std::map<std::string, at::Tensor>& read);

}  // namespace lockstep::detail
