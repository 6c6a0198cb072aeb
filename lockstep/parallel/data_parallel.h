// DataParallel: one process, several devices. A call splits its batch among replicas of the module, runs them
// in parallel and joins their results. Backward also runs in parallel and leaves the gradients of the whole
// batch in the module's own parameters.
//
//   Net model;                                                  // a plain torch::nn module holder
//   lockstep::DataParallel dp(model, {at::kCPU, at::kCPU});     // or dp(model): all CUDA devices
//   auto loss = torch::mse_loss(dp(inputs), labels);
//   loss.backward();
//   optimizer.step();                                           // on model->parameters(), unchanged
//
// Like torch.nn.DataParallel, except that replicas and their threads persist between calls, and that several
// at::kCPU devices mean as many worker threads. A replica on the module's own device shares the module's
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
  std::int64_t dim = 0;  // Dimension along which tensors are split and joined.
  // Device of the results. Unset: the first device.
  std::optional<at::Device> output_device = {};
  // Number of threads that the operations of one replica may use. 0: the constructing thread's number of
  // threads, divided among the replicas.
  int threads_per_replica = 0;
  // Makes a module like the original, for modules without clone(). Called once per device.
  std::function<std::shared_ptr<torch::nn::Module>()> make_replica = {};
};

// Thrown if a replica's forward or backward throws. The exception is nested in this one
// (std::rethrow_if_nested).
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

// Copies share replicas and threads. Thread-safe: concurrent calls run forward one after another. Results may
// outlive the object, and so may their backward.
template <typename M>
class DataParallel {
 public:
  // All devices must be of one type, with the module's tensors on the first. Without devices, every CUDA
  // device is used. With one device, or none, calls go straight to the module. Throws ConfigError for other
  // arguments, and for a module that cannot be replicated.
  template <typename Holder, typename = detail::ModuleOf<Holder>>
  explicit DataParallel(const Holder& module, std::vector<at::Device> devices = {},
                        DataParallelOptions options = {})
      : module_(detail::module_of(module)),
        state_(detail::make_data_parallel(module_, std::move(devices), std::move(options))) {}

  // Splits the tensors in the arguments, including those in tuples, pairs, vectors, maps and optionals, as
  // torch.chunk does. A batch smaller than the number of devices uses fewer of them. Other values are passed
  // to every replica unchanged. Returns the joined results of forward; scalars become a vector. Throws
  // ReplicaError.
  template <typename... Args>
  auto operator()(Args&&... args) {
    using Output =
        std::decay_t<decltype(std::declval<M&>().forward(std::declval<detail::ArgumentWith<Args>&>()...))>;
    using Results = detail::TensorsIn<Output>;
    static_assert(Results::only,
                  "forward must return tensors, or tuples, vectors or maps that contain only tensors");
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

  // Makes new replicas. Not needed for changes of parameters, buffers, submodules, train() or eval(), which
  // replicas follow; needed after a change of any other member, such as Dropout's p.
  void replicate() { detail::replicate_data_parallel(*state_); }

 private:
  std::shared_ptr<M> module_;
  std::shared_ptr<detail::DataParallelState> state_;
};

template <typename Holder>
explicit DataParallel(const Holder&, std::vector<at::Device> = {},
                      DataParallelOptions = {}) -> DataParallel<detail::ModuleOf<Holder>>;

}  // namespace lockstep
