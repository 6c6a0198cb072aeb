// LibTorch's own NCCL as a transport. CUDA tensors. NCCL refuses two ranks on one GPU.
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
  // until the deadline. Where an abort is under way it has a moment: the process may end after this, and CUDA
  // with it.
  ~NcclTransport() override {
    if (interrupted_) {
      // Since it began: groups are left one after another, and have been interrupted together.
      const auto left = kAbort - (std::chrono::steady_clock::now() - interrupted_at_.load());
      crew_.wait(
          std::chrono::duration_cast<std::chrono::milliseconds>(std::max(left, decltype(left)::zero())));
      return;
    }
    in_background([](Nccl& backend) { backend.shutdown(); });
    if (!crew_.wait(timeout_))
      log(LogLevel::warn, "nccl: operations nobody waited for are still under way after {:.3f} s: left",
          std::chrono::duration<double>(timeout_).count());
  }

  Traits traits() const override { return nccl_traits(); }
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
  // A communicator, of all ranks or of two, is made inside the first call that needs it. That of all is made
  // by open(): later some may have nothing to do in a call, such as a gather of nothing, and not come to it.
  // What it needs is there before ranks meet: nobody may be left alone with it.
  ConnectBarrier* connect_barrier(bool of_all) override {
    if (backend_->getSize() == 1 || (of_all && opened_)) return nullptr;
    if (of_all && !word_.defined() && !capturing())
      word_ = at::zeros({1}, at::TensorOptions(at::kFloat).device(device_));
    return &first_;
  }
  void open() override {
    if (capturing()) return;  // another time
    std::vector<at::Tensor> word{std::exchange(word_, {})};
    backend_->allreduce(word)->wait();
    opened_ = true;
  }

  bool reduces(Dtype dtype, ReduceOp op) const override { return nccl_reduces(dtype, op); }

  // ncclCommAbort may take its time: a thread of its own calls it, which keeps the backend alive.
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
      // Its share of the backend goes with the body, before who waits hears of it.
      crew_.start([backend = backend_, body] {
        try {
          body(*backend);
        } catch (const std::exception& error) {
          log(LogLevel::warn, "nccl: {}", error.what());
        }
      });
    } catch (...) {  // no memory to be had
    }
  }

  const at::Device device_;
  const std::chrono::milliseconds timeout_;
  ConnectBarrier first_;
  c10::intrusive_ptr<Nccl> backend_;
  bool opened_ = false;  // this and the word under the order of collectives
  at::Tensor word_;
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
