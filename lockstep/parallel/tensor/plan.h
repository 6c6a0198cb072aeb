// A plan for a module, resolved and checked: which layers, what is split, and all that is wrong with it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/parallel/tensor_parallel.h>
#include <torch/nn/modules/container/sequential.h>

namespace lockstep::detail {

// Where a model holds a module.
struct Place {
  std::string name;
  torch::nn::SequentialImpl* sequence;  // null: not one's child
  std::string key;                      // there
};

struct Split {
  std::string parameter;
  at::Tensor tensor;
  std::int64_t dim;
  int parts;
};

struct Target {
  std::string name;     // the first place's
  std::string pattern;  // that hit it first
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
