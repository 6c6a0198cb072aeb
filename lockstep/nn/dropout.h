// Dropout whose mask does not depend on how a batch is laid out over ranks.
//
//   lockstep::nn::Dropout drop(0.1);
//   lockstep::nn::name_layers(*model);                       // once: each Dropout's key is its name
//   lockstep::nn::DropoutScope scope({.seed = 7, .step = step, .first_sample = rank * batch});
//   model->forward(x);
//
// Whether an element is dropped follows from the seed, the step, the layer's key, the sample's number in the
// global batch and the element's number in the whole sample, and from nothing else (a counter-based
// generator): the same for one rank with the global batch as for ranks that have slices of it, of samples or
// of a sample. Dimension 0 of the input is the samples. A layer that is called twice in a step drops the same
// elements twice.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

namespace lockstep::nn {

// Which of count equal slices along a dimension a tensor is.
struct Shard {
  std::int64_t dim = 0;
  int index = 0;
  int count = 1;
};

struct DropoutStep {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::int64_t first_sample = 0;  // the number in the global batch of the input's first one
};

// What dropout on this thread goes by, until the scope ends; the innermost one counts. Backward needs none.
class DropoutScope {
 public:
  explicit DropoutScope(DropoutStep step);
  DropoutScope(const DropoutScope&) = delete;
  DropoutScope& operator=(const DropoutScope&) = delete;
  ~DropoutScope();

 private:
  std::optional<DropoutStep> outer_;
};

// The innermost scope's. What runs a forward again later, or on another thread, opens a scope with it.
std::optional<DropoutStep> dropout_step();

// The scope that holds now, with the first sample moved on: for a micro-batch. ConfigError outside any scope.
[[nodiscard]] DropoutScope shift_samples(std::int64_t offset);

// Training's dropout. ConfigError outside any scope, for an empty key and for p outside [0, 1].
at::Tensor dropout(const at::Tensor& input, double p, std::string_view key, std::optional<Shard> shard = {});

struct DropoutOptions {
  double p = 0.5;
  std::string key = {};             // empty: name_layers gives one
  std::optional<Shard> shard = {};  // where inputs are slices; tensor parallelism sets it
};

class DropoutImpl : public torch::nn::Cloneable<DropoutImpl> {
 public:
  explicit DropoutImpl(double p = 0.5) : DropoutImpl(DropoutOptions{.p = p}) {}
  explicit DropoutImpl(DropoutOptions given);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);  // in evaluation, and for p = 0, the input itself

  DropoutOptions options;
};

class Dropout : public torch::nn::ModuleHolder<DropoutImpl> {
 public:
  using torch::nn::ModuleHolder<DropoutImpl>::ModuleHolder;
  Dropout() = default;
  explicit Dropout(DropoutOptions options)
      : ModuleHolder(std::make_shared<DropoutImpl>(std::move(options))) {}
};

// Gives each Dropout below (and including) the module that has no key its name there. prefix: of the module
// in the whole model, where it is but a part of one. Returns how many were named.
int name_layers(torch::nn::Module& module, const std::string& prefix = {});

}  // namespace lockstep::nn
