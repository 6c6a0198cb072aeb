// The nccl transport: LibTorch's own NCCL. CUDA tensors. NCCL rejects two ranks on one GPU.
#include <cstdlib>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <fmt/format.h>
#include <lockstep/base/crew.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/group/connect_barrier.h>
#include <lockstep/comm/transports/nccl/rules.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace lockstep::detail {
namespace {

using Nccl = c10d::ProcessGroupNCCL;

class NcclTransport final : public Transport {
 public:
  explicit NcclTransport(const TransportContext& context)
      : device_(at::kCUDA, static_cast<c10::DeviceIndex>(context.device_index)),
        timeout_(context.timeout),
        first_(context.store, context.rank, context.size()) {
    const int devices = c10::cuda::device_count();
    if (context.device_index >= devices)
      throw ConfigError(
          fmt::format("backend 'nccl' requires a separate GPU for each rank of a host: local rank {} has "
                      "none, because this process sees {}",
                      context.device_index, devices));
    // By default LibTorch's watchdog terminates the process on an error, and a monitor terminates it when the
    // watchdog is slow. Lockstep reports errors and deadlines itself. Variables that are already set are
    // kept.
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

  // NCCL waits for operations in flight, however long they take: a separate thread does that, and we wait for
  // it until the deadline. An abort in progress gets a moment, because the process may exit after this, and
  // CUDA with it.
  ~NcclTransport() override {
    if (interrupted_) {
      // Counts from the start of the abort: groups are left one after another, but were interrupted together.
      const auto left = kAbort - (std::chrono::steady_clock::now() - interrupted_at_.load());
      crew_.wait(
          std::chrono::duration_cast<std::chrono::milliseconds>(std::max(left, decltype(left)::zero())));
      return;
    }
    in_background([](Nccl& backend) { backend.shutdown(); });
    if (!crew_.wait(timeout_))
      log(LogLevel::warn, "nccl: abandoning operations that are still in flight after {:.3f} s",
          std::chrono::duration<double>(timeout_).count());
  }

  Traits traits() const override { return nccl_traits(); }
  // LibTorch's own watchdog keeps such copies too, without the results.
  c10::intrusive_ptr<c10d::Work> watched(c10d::Work& work) override {
    if (const auto* its = dynamic_cast<const Nccl::WorkNCCL*>(&work))
      return c10::make_intrusive<Nccl::WorkNCCL>(*its);
    return Transport::watched(work);
  }
  bool capturing() const override {
    const c10::DeviceGuard here(device_);  // the query must not create a context on another device
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
  c10d::Backend& backend() override { return *backend_; }
  // NCCL creates a communicator, of all ranks or of two, inside the first call that needs it. open() creates
  // the one of all ranks, because later some ranks may have nothing to do in a call, such as a gather of
  // nothing, and skip it. What it needs is prepared before the ranks meet, so that no rank is left alone in
  // it.
  ConnectBarrier* connect_barrier(bool of_all) override {
    if (backend_->getSize() == 1 || (of_all && opened_)) return nullptr;
    if (of_all && !word_.defined() && !capturing())
      word_ = at::zeros({1}, at::TensorOptions(at::kFloat).device(device_));
    return &first_;
  }
  void open() override {
    if (capturing()) return;  // at a later operation
    std::vector<at::Tensor> word{std::exchange(word_, {})};
    backend_->allreduce(word)->wait();
    opened_ = true;
  }

  bool reduces(Dtype dtype, ReduceOp op) const override { return nccl_reduces(dtype, op); }

  // ncclCommAbort may take long, so a separate thread calls it. The thread keeps the backend alive.
  void interrupt(const std::string&, CommError::Kind) noexcept override {
    if (interrupted_.exchange(true)) return;
    interrupted_at_ = std::chrono::steady_clock::now();
    in_background([](Nccl& backend) { backend.abort(); });
  }

 private:
  static constexpr std::chrono::milliseconds kAbort{500};

  template <typename Body>
  void in_background(Body body) noexcept {
    try {
      // The thread's reference to the backend goes with the body, before waiters are notified.
      crew_.start([backend = backend_, body] {
        try {
          body(*backend);
        } catch (const std::exception& error) {
          log(LogLevel::warn, "nccl: {}", error.what());
        }
      });
    } catch (...) {  // out of memory
    }
  }

  const at::Device device_;
  const std::chrono::milliseconds timeout_;
  ConnectBarrier first_;
  c10::intrusive_ptr<Nccl> backend_;
  bool opened_ = false;  // this and word_ are guarded by the order of collectives
  at::Tensor word_;      // input of the all-reduce in open()
  std::atomic<bool> interrupted_ = false;
  std::atomic<std::chrono::steady_clock::time_point> interrupted_at_ = {};
  Crew crew_;
};

}  // namespace

bool nccl_available() { return c10::cuda::device_count() > 0; }

std::unique_ptr<Transport> make_nccl_transport(const TransportContext& context) {
  return std::make_unique<NcclTransport>(context);
}

}  // namespace lockstep::detail
