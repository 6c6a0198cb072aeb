// Shared by save and load: names used inside a checkpoint file, and how ranks agree.
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
// How the checksum entry appears in the header, up to its first digit.
constexpr std::string_view kChecksumBegins = "\"lockstep.checksum\":\"";

// The format's name of a tensor's dtype. Throws ConfigError if it has none.
std::string dtype_name(const NamedTensor& named);
at::ScalarType dtype_of(std::string_view name);  // throws FormatError if LibTorch lacks it

// True for names that a model cannot use.
bool reserved(std::string_view name);
std::string rng_name(std::int64_t rank, std::size_t generator);

// Returns parameters and buffers with their names. Throws ConfigError for tensors that cannot be saved.
std::vector<NamedTensor> tensors_of(const ModelPart& model);

std::span<std::byte> bytes_of(const at::Tensor& tensor);  // of a dense CPU tensor
std::span<const std::byte> bytes_of(std::string_view text);

// LibTorch's default random number generators: the CPU's, then those of the CUDA devices that these parts
// use.
std::vector<at::Generator> default_generators(const ModelPart& model, const OptimizerPart& optimizer);
std::vector<at::Tensor> generator_states(std::vector<at::Generator> generators);
// Throws FormatError if a state is not valid for its generator. Changes nothing.
void check_generators(const std::vector<at::Generator>& generators, const std::vector<at::Tensor>& states);
void set_generators(std::vector<at::Generator>& generators, const std::vector<at::Tensor>& states);

// Runs `what` and returns its error text, which names the file, or an empty string. Ranks exchange the text,
// so that peers do not wait for a rank that failed.
std::string problem_of(std::string_view doing, const std::string& path, const std::function<void()>& what);
// Collective: throws the same ConfigError on every rank if any rank passes a problem.
void agree(const std::optional<Group>& group, const std::string& problem);
std::optional<Group> called_at(const std::optional<Group>& group, Site site);

}  // namespace lockstep::detail
