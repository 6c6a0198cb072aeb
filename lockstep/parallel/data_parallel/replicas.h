// Copies of a module that follow it: one per device, made once. Internal to DataParallel.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace lockstep::detail {

// A replica's parameters are leaves of their own over the module's memory where its device is the module's,
// else over a copy. Gradients of replicas thus never meet before they are summed.
struct ReplicaSet {
  struct Leaf {
    at::Tensor tensor;
    std::size_t parameter;  // of the module
  };
  struct Replica {
    at::Device device;
    std::shared_ptr<torch::nn::Module> module;
    std::vector<Leaf> leaves;         // tied parameters are several leaves of one parameter
    std::vector<at::Tensor> buffers;  // as the module's
    std::vector<std::shared_ptr<torch::nn::Module>> modules;
  };
  std::vector<Replica> replicas;

  // The module as it was when the replicas were made.
  std::vector<at::Tensor> parameters;  // each once
  std::vector<std::string> names;      // of these
  std::vector<at::Tensor> entries;     // parameters, a tied one as often as it is registered
  std::vector<at::Tensor> buffers;
  std::vector<std::string> buffer_names;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
};

class Replicas {
 public:
  using Factory = std::function<std::shared_ptr<torch::nn::Module>()>;

  // Makes them. ConfigError for a module that cannot be replicated.
  Replicas(std::shared_ptr<torch::nn::Module> module, std::vector<at::Device> devices, Factory factory);

  // Brings the first `count` replicas up to date with the module: values, requires_grad, dtype, training
  // mode. Makes them anew where parameters, buffers or submodules are others. Graphs that are still to run
  // backward keep the set they came from.
  std::shared_ptr<ReplicaSet> follow(std::size_t count);
  void replicate();

  torch::nn::Module& original() { return *module_; }

 private:
  std::shared_ptr<torch::nn::Module> replica_for(std::size_t index) const;
  void pair(ReplicaSet& set, std::size_t index) const;
  bool is_current() const;
  void check_devices() const;

  const std::shared_ptr<torch::nn::Module> module_;
  const std::vector<at::Device> devices_;
  const Factory factory_;
  std::shared_ptr<ReplicaSet> set_;
};

}  // namespace lockstep::detail
