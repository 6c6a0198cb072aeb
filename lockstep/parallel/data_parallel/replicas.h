// Replicas of a module, made once per device and updated from it. Internal to DataParallel.
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

// A replica's parameters are separate leaf tensors. They share the module's memory on the module's device,
// and are copies elsewhere. So gradients of different replicas stay separate until they are summed.
struct ReplicaSet {
  struct Leaf {
    at::Tensor tensor;
    std::size_t parameter;  // Index of the module's parameter.
  };
  struct Replica {
    at::Device device;
    std::shared_ptr<torch::nn::Module> module;
    std::vector<Leaf> leaves;         // A tied parameter has several leaves.
    std::vector<at::Tensor> buffers;  // In the module's order.
    std::vector<std::shared_ptr<torch::nn::Module>> modules;
  };
  std::vector<Replica> replicas;

  // The module as it was when the replicas were made.
  std::vector<at::Tensor> parameters;  // Each parameter once.
  std::vector<std::string> names;      // Their names.
  std::vector<at::Tensor> entries;     // Parameters, a tied one as often as it is registered.
  std::vector<at::Tensor> buffers;
  std::vector<std::string> buffer_names;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
};

class Replicas {
 public:
  using Factory = std::function<std::shared_ptr<torch::nn::Module>()>;

  // Makes the replicas. Throws ConfigError for a module that cannot be replicated.
  Replicas(std::shared_ptr<torch::nn::Module> module, std::vector<at::Device> devices, Factory factory);

  // Updates the first `count` replicas from the module: values, requires_grad, dtype and training mode. Makes
  // new replicas if the set of parameters, buffers or submodules has changed. Graphs that still wait for
  // backward keep their own set.
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
