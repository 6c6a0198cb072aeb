// The state of LibTorch's optimizers, and so of ours, as names, numbers and tensors.
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

// By group: each parameter's name in the model; "group0.3" for one that is not the model's.
using ParameterNames = std::vector<std::vector<std::string>>;
ParameterNames parameter_names(const torch::optim::Optimizer& optimizer,
                               const std::vector<NamedTensor>& model);

// The tensors are appended, named optimizer/PARAMETER/FIELD. ConfigError for an optimizer that is not known.
OptimizerManifest describe(torch::optim::Optimizer& optimizer, const ParameterNames& names,
                           std::vector<NamedTensor>& tensors);

// Whether what was saved fits, and what is needed of the file: for each of the optimizer's tensors of which
// `in_file` says the dtype, a tensor like the parameter is asked for; of bfloat16 and float16 parameters in
// float32, if it was saved so. FormatError where it does not fit.
using InFile = std::function<std::optional<at::ScalarType>(const std::string& name)>;
using Want = std::function<void(const std::string& name, const at::Tensor& like)>;
void want_state(torch::optim::Optimizer& optimizer, const ParameterNames& names,
                const OptimizerManifest& saved, const InFile& in_file, const Want& want);

// The state made of what was read; calling the result puts it into the optimizer, and cannot fail.
std::function<void()> prepare_state(torch::optim::Optimizer& optimizer, const ParameterNames& names,
                                    const OptimizerManifest& saved,
                                    const std::map<std::string, at::Tensor>& read);

}  // namespace lockstep::detail
