// One process, several devices: a call splits its batch among replicas of the module, runs them at once and
// joins what they return. Backward runs at once too, and leaves in the module's own parameters the gradients
// of the whole batch.
//
//   Net model;                                                  // a plain torch::nn module holder
//   lockstep::DataParallel dp(model, {at::kCPU, at::kCPU});     // or dp(model): all CUDA devices
//   auto loss = torch::mse_loss(dp(inputs), labels);
//   loss.backward();
//   optimizer.step();                                           // on model->parameters(), as ever
//
// As torch.nn.DataParallel, but that replicas and their threads stay from call to call, and that several
// at::kCPU are as many worker threads. Where a replica's device is the module's it shares the module's
// memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <lockstep/base/error.h>
#include <lockstep/parallel/data_parallel/tensors.h>

namespace torch::nn {
class Module;
}

namespace lockstep {

struct DataParallelOptions {
  std::int64_t dim = 0;  // tensors are split and joined along it
  // Where results go. Unset: the first device.
  std::optional<at::Device> output_device = {};
  // Threads that operations of one replica may use. 0: those of the thread that makes the DataParallel,
  // divided.
  int threads_per_replica = 0;
  // Makes a module like the original, for modules that have no clone(). Called once for each device.
  std::function<std::shared_ptr<torch::nn::Module>()> make_replica = {};
};

// A replica's forward or backward threw; the exception is nested in this one (std::rethrow_if_nested).
class ReplicaError : public Error {
 public:
  ReplicaError(const std::string& text, std::size_t replica, at::Device device)
      : Error(text), replica_(replica), device_(device) {}
  std::size_t replica() const noexcept { return replica_; }
  at::Device device() const noexcept { return device_; }

 private:
  std::size_t replica_;
  at::Device device_;
};

namespace detail {

class DataParallelState;
using ReplicaForward = std::function<TensorsOf(torch::nn::Module& replica, std::size_t index,
                                               const std::vector<at::Tensor>& inputs)>;

std::shared_ptr<DataParallelState> make_data_parallel(std::shared_ptr<torch::nn::Module> module,
                                                      std::vector<at::Device> devices,
                                                      DataParallelOptions options);
const std::vector<at::Device>& data_parallel_devices(const DataParallelState& state);
void replicate_data_parallel(DataParallelState& state);
std::vector<at::Tensor> run_data_parallel(const std::shared_ptr<DataParallelState>& state,
                                          const std::vector<at::Tensor>& inputs, bool has_arguments,
                                          const ReplicaForward& forward);

template <typename Holder>
std::shared_ptr<typename Holder::ContainedType> module_of(const Holder& holder) {
  return holder.is_empty() ? nullptr : holder.ptr();
}
template <typename M>
std::shared_ptr<M> module_of(const std::shared_ptr<M>& module) {
  return module;
}
template <typename Holder>
using ModuleOf = typename decltype(module_of(std::declval<const Holder&>()))::element_type;

}  // namespace detail

// Copies share replicas and threads. Calls from several threads take turns in forward. Results outlive it:
// their backward runs when it is gone, too.
template <typename M>
class DataParallel {
 public:
  // Devices are of one type, the module's tensors on the first of them. No devices: every CUDA device; with
  // one device, or none, calls go straight to the module. ConfigError for anything else, and for a module
  // that cannot be replicated.
  template <typename Holder, typename = detail::ModuleOf<Holder>>
  explicit DataParallel(const Holder& module, std::vector<at::Device> devices = {},
                        DataParallelOptions options = {})
      : module_(detail::module_of(module)),
        state_(detail::make_data_parallel(module_, std::move(devices), std::move(options))) {}

  // Tensors in the arguments, also those in tuples, pairs, vectors, maps and optionals, are split as
  // torch.chunk does; a batch smaller than the number of devices uses fewer of them. What else there is goes
  // to every replica as it is. Returns what forward returns, joined; scalars become a vector. Throws
  // ReplicaError.
  template <typename... Args>
  auto operator()(Args&&... args) {
    using Output =
        std::decay_t<decltype(std::declval<M&>().forward(std::declval<detail::ArgumentWith<Args>&>()...))>;
    using Results = detail::TensorsIn<Output>;
    static_assert(Results::only,
                  "forward must return tensors, or tuples, vectors, maps of nothing but tensors");
    detail::TensorsOf inputs;
    (detail::TensorsIn<std::remove_cvref_t<Args>>::list(args, inputs), ...);
    std::optional<Output> first;
    const auto joined = detail::run_data_parallel(
        state_, inputs.tensors, sizeof...(Args) > 0,
        [&](torch::nn::Module& replica, std::size_t index, const std::vector<at::Tensor>& own) {
          [[maybe_unused]] const at::Tensor* next = own.data();
          std::tuple<detail::ArgumentWith<Args>...> given{detail::argument_with(args, next)...};
          Output output = std::apply(
              [&](auto&... each) -> decltype(auto) { return static_cast<M&>(replica).forward(each...); },
              given);
          detail::TensorsOf found;
          Results::list(output, found);
          if (index == 0) first.emplace(std::move(output));
          return found;
        });
    const at::Tensor* next = joined.data();
    return Output(Results::with(*first, next));
  }

  const std::shared_ptr<M>& module() const { return module_; }
  const std::vector<at::Device>& devices() const { return detail::data_parallel_devices(*state_); }

  // Makes the replicas anew. Parameters, buffers, train() and eval(), and submodules that are added or
  // replaced are followed without it; a member of another kind that is changed later (Dropout's p, say) is
  // not.
  void replicate() { detail::replicate_data_parallel(*state_); }

 private:
  std::shared_ptr<M> module_;
  std::shared_ptr<detail::DataParallelState> state_;
};

template <typename Holder>
explicit DataParallel(const Holder&, std::vector<at::Device> = {},
                      DataParallelOptions = {}) -> DataParallel<detail::ModuleOf<Holder>>;

}  // namespace lockstep
