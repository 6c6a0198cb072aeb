#include <lockstep/checkpoint/detail/contents.h>

#include <algorithm>
#include <bit>
#include <mutex>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/checkpoint/format/format_error.h>
#include <lockstep/modules/script_module.h>
#include <lockstep/modules/unit.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

namespace lockstep {

ModelPart::ModelPart(const torch::jit::Module& script)
    : owned_(detail::registered(script)), module_(owned_.get()) {}

}  // namespace lockstep

namespace lockstep::detail {
namespace {

static_assert(std::endian::native == std::endian::little, "the safetensors format is little-endian");

struct DtypePair {
  at::ScalarType dtype;
  const char* name;
};
constexpr DtypePair kDtypes[] = {
    {at::kFloat, "F32"},
    {at::kDouble, "F64"},
    {at::kBFloat16, "BF16"},
    {at::kHalf, "F16"},
    {at::kLong, "I64"},
    {at::kInt, "I32"},
    {at::kShort, "I16"},
    {at::kChar, "I8"},
    {at::kByte, "U8"},
    {at::kBool, "BOOL"},
    {at::kUInt16, "U16"},
    {at::kUInt32, "U32"},
    {at::kUInt64, "U64"},
    {at::kFloat8_e5m2, "F8_E5M2"},
    {at::kFloat8_e4m3fn, "F8_E4M3"},
    {at::kComplexFloat, "C64"},
};

std::vector<at::Device> devices_of(const ModelPart& model, const OptimizerPart& optimizer) {
  std::vector<at::Device> devices;
  auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_cuda() &&
        std::find(devices.begin(), devices.end(), tensor.device()) == devices.end())
      devices.push_back(tensor.device());
  };
  for (const auto& named : tensors_of(model)) add(named.tensor);
  if (optimizer.get() != nullptr)
    for (const auto& group : optimizer.get()->param_groups())
      for (const auto& parameter : group.params()) add(parameter);
  return devices;
}

}  // namespace

std::string dtype_name(const NamedTensor& named) {
  for (const auto& [dtype, name] : kDtypes)
    if (dtype == named.tensor.scalar_type()) return name;
  throw ConfigError(fmt::format("'{}': the safetensors format does not support dtype {}", named.name,
                                c10::toString(named.tensor.scalar_type())));
}

at::ScalarType dtype_of(std::string_view name) {
  for (const auto& [dtype, known] : kDtypes)
    if (name == known) return dtype;
  throw FormatError(fmt::format("LibTorch does not support dtype '{}'", name));
}

std::string rng_name(std::int64_t rank, std::size_t generator) {
  return fmt::format("rng/{}/{}", rank, generator);
}

bool reserved(std::string_view name) {
  return name.starts_with("optimizer/") || name.starts_with("rng/") || name == "__metadata__";
}

// Returns parameters and buffers with their names.
std::vector<NamedTensor> tensors_of(const ModelPart& model) {
  std::vector<NamedTensor> tensors;
  if (model.get() == nullptr) return tensors;
  if (const auto split = find_split(*model.get()))
    throw ConfigError(fmt::format(
        "'{}' is distributed over {} ranks: save the result of full_state(), and pass what you load to "
        "load_full_state()",
        split->name, split->group.size()));
  for (const auto& [kind, list] : {std::pair("parameter", model.get()->named_parameters()),
                                   std::pair("buffer", model.get()->named_buffers())})
    for (const auto& item : list) {
      if (!item.value().defined()) continue;
      const NamedTensor named{item.key(), item.value()};
      if (reserved(named.name))
        throw ConfigError(fmt::format("the {} name '{}' is reserved in checkpoints", kind, named.name));
      if (named.tensor.layout() != at::kStrided || named.tensor.is_quantized() || named.tensor.is_meta())
        throw ConfigError(
            fmt::format("cannot save the {} '{}': it is sparse, quantized or has no data", kind, named.name));
      tensors.push_back(named);
    }
  return tensors;
}

std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}
std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::vector<at::Generator> default_generators(const ModelPart& model, const OptimizerPart& optimizer) {
  std::vector<at::Generator> generators = {at::detail::getDefaultCPUGenerator()};
  for (const auto& device : devices_of(model, optimizer))
    generators.push_back(at::globalContext().defaultGenerator(device));
  return generators;
}

std::vector<at::Tensor> generator_states(std::vector<at::Generator> generators) {
  std::vector<at::Tensor> states;
  for (auto& generator : generators) {
    const std::lock_guard lock(generator.mutex());
    states.push_back(generator.get_state());
  }
  return states;
}

void check_generators(const std::vector<at::Generator>& generators, const std::vector<at::Tensor>& states) {
  for (std::size_t g = 0; g < generators.size(); ++g) {
    auto trial = generators[g].clone();
    try {
      trial.set_state(states[g]);
    } catch (const c10::Error&) {
      throw FormatError(
          "a random number generator's state is not valid for this version of LibTorch; load without .rng");
    }
  }
}

void set_generators(std::vector<at::Generator>& generators, const std::vector<at::Tensor>& states) {
  for (std::size_t g = 0; g < generators.size(); ++g) {
    const std::lock_guard lock(generators[g].mutex());
    generators[g].set_state(states[g]);
  }
}

std::string problem_of(std::string_view doing, const std::string& path, const std::function<void()>& what) {
  std::string problem;
  try {
    what();
    return {};
  } catch (const c10::Error& error) {
    problem = error.what_without_backtrace();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (problem.find(path) != std::string::npos) return problem;
  return fmt::format("cannot {} '{}': {}", doing, path, problem);
}

std::optional<Group> called_at(const std::optional<Group>& group, Site site) {
  return group ? std::optional(group->called_at(site)) : std::nullopt;
}

void agree(const std::optional<Group>& group, const std::string& problem) {
  if (!group) {
    if (!problem.empty()) throw ConfigError(problem);
    return;
  }
  const auto problems = Group(*group).all_gather_values(problem, {.tag = "checkpoint"});
  for (std::size_t r = 0; r < problems.size(); ++r)
    if (!problems[r].empty()) throw ConfigError(fmt::format("{} (on rank {})", problems[r], r));
}

}  // namespace lockstep::detail
