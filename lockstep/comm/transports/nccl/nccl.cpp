// LibTorch's own NCCL as a transport. CUDA tensors. NCCL refuses two ranks on one GPU.
#include <cstdlib>

#include <future>
#include <thread>

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/reduce.h>
#include <lockstep/comm/transport.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace lockstep::detail {
namespace {

using Nccl = c10d::ProcessGroupNCCL;

class NcclTransport final : public Transport {
 public:
  explicit NcclTransport(const TransportContext& context)
      : device_(at::kCUDA, static_cast<c10::DeviceIndex>(context.device_index)), timeout_(context.timeout) {
    const int devices = c10::cuda::device_count();
    if (context.device_index >= devices)
      throw ConfigError(
          fmt::format("backend 'nccl' needs a GPU of its own for each rank of a host: local rank {} has "
                      "none, there are {}",
                      context.device_index, devices));
    // By default LibTorch's watchdog ends the process at an error, and a monitor ends it when the watchdog is
    // slow; errors and deadlines are ours to report. What somebody has set stays.
    for (const char* name :
         {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT",
          "TORCH_NCCL_PROPAGATE_ERROR", "TORCH_NCCL_BLOCKING_WAIT"})
      ::setenv(name, "0", /*overwrite=*/0);
    auto options = Nccl::Options::create();
    options->timeout = context.timeout;
    options->group_name = context.group;
    backend_ = c10::make_intrusive<Nccl>(context.store, context.rank, context.size(), options);
    backend_->setBoundDeviceId(device_);
  }

  // NCCL waits for what is under way, for as long as that takes: a thread of its own does, and we wait for it
  // until the deadline.
  ~NcclTransport() override {
    if (interrupted_) return;
    auto over = std::make_shared<std::promise<void>>();  // also where it fails: when the thread lets go of it
    auto future = over->get_future();
    in_background([over = std::move(over)](Nccl& backend) { backend.shutdown(); });
    if (future.wait_for(timeout_) == std::future_status::timeout)
      log(LogLevel::warn, "nccl: operations nobody waited for are still under way after {:.3f} s: left",
          std::chrono::duration<double>(timeout_).count());
  }

  Traits traits() const override {
    return {.avg = true, .keeps_inputs = true, .blocks_host = false, .captures = true, .on_device = true};
  }
  // LibTorch's own watchdog has such copies, too: without the results.
  c10::intrusive_ptr<c10d::Work> watched(c10d::Work& work) override {
    if (const auto* its = dynamic_cast<const Nccl::WorkNCCL*>(&work))
      return c10::make_intrusive<Nccl::WorkNCCL>(*its);
    return Transport::watched(work);
  }
  bool capturing() const override {
    const c10::DeviceGuard here(device_);  // asking must not make a context on another one
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
  c10d::Backend& backend() override { return *backend_; }

  bool reduces(Dtype dtype, ReduceOp op) const override {
    const bool bitwise = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
    // and, or of booleans are min and max of 0 and 1
    const bool boolean = dtype == Dtype::boolean && op != ReduceOp::BXOR;
    return reducible(dtype, op) && dtype != Dtype::int16 && (!bitwise || boolean);
  }

  // ncclCommAbort may take its time: a thread of its own calls it, which keeps the backend alive.
  void interrupt(const std::string&) noexcept override {
    if (!interrupted_.exchange(true)) in_background([](Nccl& backend) { backend.abort(); });
  }

 private:
  template <typename Body>
  void in_background(Body body) noexcept {
    try {
      std::thread([backend = backend_, body = std::move(body)]() mutable {
        try {
          body(*backend);
        } catch (const std::exception& error) {
          log(LogLevel::warn, "nccl: {}", error.what());
        }
        backend.reset();  // before who waits for us hears of it
      }).detach();
    } catch (...) {  // no thread to be had
    }
  }

  const at::Device device_;
  const std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<Nccl> backend_;
  std::atomic<bool> interrupted_ = false;
};

}  // namespace

bool nccl_available() { return c10::cuda::device_count() > 0; }

std::unique_ptr<Transport> make_nccl_transport(const TransportContext& context) {
  return std::make_unique<NcclTransport>(context);
}

}  // namespace lockstep::detail
