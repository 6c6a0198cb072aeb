// A plan resolved against a module: the layers, the tensors to split, and all problems found.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/parallel/tensor_parallel.h>
#include <torch/nn/modules/container/sequential.h>

namespace lockstep::detail {

// A place in a model that holds a module.
struct Place {
  std::string name;
  torch::nn::SequentialImpl* sequence;  // The Sequential that contains it, or null.
  std::string key;                      // Key in its parent.
};

struct Split {
  std::string parameter;
  at::Tensor tensor;
  std::int64_t dim;
  int parts;
};

struct Target {
  std::string name;     // Name at its first place.
  std::string pattern;  // First pattern that matched it.
  ParallelStyle style;
  std::shared_ptr<torch::nn::Module> module;
  std::vector<Place> places;
  std::vector<Split> splits;
};

struct ResolvedPlan {
  std::vector<Target> targets;
  std::vector<std::string> problems;
};

ResolvedPlan resolve(torch::nn::Module& module, const Group& group, const ParallelPlan& plan);

std::string shown(const ParallelStyle& style);  // "Colwise{parts = 3}"

}  // namespace lockstep::detail
