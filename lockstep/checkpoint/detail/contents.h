// What save and load have in common: what a checkpoint's file is called inside, and how ranks agree.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <lockstep/checkpoint/detail/optimizer_state.h>
#include <lockstep/checkpoint/parts.h>
#include <lockstep/comm/group.h>

namespace lockstep::detail {

constexpr std::string_view kManifestKey = "lockstep";
constexpr std::string_view kChecksumKey = "lockstep.checksum";
// As it stands in the header, up to the first digit.
constexpr std::string_view kChecksumBegins = "\"lockstep.checksum\":\"";

// The format's name of a tensor's dtype; ConfigError where it has none.
std::string dtype_name(const NamedTensor& named);
at::ScalarType dtype_of(std::string_view name);  // FormatError for one that LibTorch has not

// Names that are not a model's.
bool reserved(std::string_view name);
std::string rng_name(std::int64_t rank, std::size_t generator);

// Parameters and buffers by their names; ConfigError for what cannot be saved.
std::vector<NamedTensor> tensors_of(const ModelPart& model);

std::span<std::byte> bytes_of(const at::Tensor& tensor);  // of a dense one, on the CPU
std::span<const std::byte> bytes_of(std::string_view text);

// LibTorch's default random number generators: the CPU's, then those of the CUDA devices that these parts are
// on.
std::vector<at::Generator> default_generators(const ModelPart& model, const OptimizerPart& optimizer);
std::vector<at::Tensor> generator_states(std::vector<at::Generator> generators);
// FormatError where a state is not one of its generator; nothing is changed.
void check_generators(const std::vector<at::Generator>& generators, const std::vector<at::Tensor>& states);
void set_generators(std::vector<at::Generator>& generators, const std::vector<at::Tensor>& states);

// What went wrong, or nothing: for telling the other ranks instead of leaving them to wait. The file is
// named.
std::string problem_of(std::string_view doing, const std::string& path, const std::function<void()>& what);
// Every rank brings what went wrong with it. Where anything did, all throw the same ConfigError.
void agree(const std::optional<Group>& group, const std::string& problem);
std::optional<Group> called_at(const std::optional<Group>& group, Site site);

}  // namespace lockstep::detail
