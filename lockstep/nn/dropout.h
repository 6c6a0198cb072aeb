// Dropout with masks that do not depend on how a batch is distributed over ranks.
//
//   lockstep::nn::Dropout drop(0.1);
//   lockstep::nn::name_layers(*model);                       // once: each Dropout's key is its name
//   lockstep::nn::DropoutScope scope({.seed = 7, .step = step, .first_sample = rank * batch});
//   model->forward(x);
//
// Whether an element is dropped depends only on the seed, the step, the layer's key, the sample's index in
// the global batch and the element's index in the whole sample (it uses a counter-based generator). One rank
// with the global batch therefore gets the same masks as several ranks with slices of it, by samples or
// within a sample. Dimension 0 of the input is the samples. A layer called twice in a step drops the same
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

// Identifies a tensor as one of `count` equal slices along a dimension.
struct Shard {
  std::int64_t dim = 0;
  int index = 0;
  int count = 1;
};

struct DropoutStep {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::int64_t first_sample = 0;  // index in the global batch of the input's first sample
};

// Sets the seed, step and first sample for dropout on this thread until the scope ends; scopes nest. Backward
// needs no scope.
class DropoutScope {
 public:
  explicit DropoutScope(DropoutStep step);
  DropoutScope(const DropoutScope&) = delete;
  DropoutScope& operator=(const DropoutScope&) = delete;
  ~DropoutScope();

 private:
  std::optional<DropoutStep> outer_;
};

// The innermost scope's values. To repeat a forward later or on another thread, open a scope with them.
std::optional<DropoutStep> dropout_step();

// Opens a scope like the current one with the first sample shifted, for a micro-batch. Throws ConfigError
// outside any scope.
[[nodiscard]] DropoutScope shift_samples(std::int64_t offset);

// Dropout for training. Throws ConfigError outside any scope, for an empty key and for p outside [0, 1].
at::Tensor dropout(const at::Tensor& input, double p, std::string_view key, std::optional<Shard> shard = {});

struct DropoutOptions {
  double p = 0.5;
  std::string key = {};             // empty: set by name_layers
  std::optional<Shard> shard = {};  // set if inputs are slices; tensor parallelism does that
};

class DropoutImpl : public torch::nn::Cloneable<DropoutImpl> {
 public:
  explicit DropoutImpl(double p = 0.5) : DropoutImpl(DropoutOptions{.p = p}) {}
  explicit DropoutImpl(DropoutOptions given);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);  // returns the input itself in evaluation and for p = 0

  DropoutOptions options;
};

class Dropout : public torch::nn::ModuleHolder<DropoutImpl> {
 public:
  using torch::nn::ModuleHolder<DropoutImpl>::ModuleHolder;
  Dropout() = default;
  explicit Dropout(DropoutOptions options)
      : ModuleHolder(std::make_shared<DropoutImpl>(std::move(options))) {}
};

// Sets the key of each Dropout in the module (including itself) that has none to its name there. prefix: name
// of the module within the whole model, if it is only a part of one. Returns the number of keys set.
int name_layers(torch::nn::Module& module, const std::string& prefix = {});

}  // namespace lockstep::nn
