#include <lockstep/optim/detail/cuda_graph.h>

#include <map>
#include <mutex>

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <lockstep/base/log.h>

namespace lockstep::detail {
namespace {

using c10::cuda::CUDAStream;
namespace allocator = c10::cuda::CUDACachingAllocator;

// One stream for all graphs of a device, so that memory freed by one step can be reused by the next.
CUDAStream side_stream(at::Device device) {
  static std::mutex mutex;
  static std::map<int, CUDAStream> streams;
  const std::lock_guard lock(mutex);
  const auto found = streams.find(device.index());
  if (found != streams.end()) return found->second;
  return streams.emplace(device.index(), c10::cuda::getStreamFromPool(false, device.index())).first->second;
}

// Callers on a non-default stream stay on it.
CUDAStream stream_for(at::Device device) {
  const auto current = c10::cuda::getCurrentCUDAStream(device.index());
  return current == c10::cuda::getDefaultCUDAStream(device.index()) ? side_stream(device) : current;
}

// Makes later work on `second` wait for the work enqueued on `first` so far.
void in_order(const CUDAStream& first, const CUDAStream& second) {
  if (first == second) return;
  at::cuda::CUDAEvent event;
  event.record(first);
  event.block(second);
}

class Captured final : public CudaGraph {
 public:
  explicit Captured(at::Device device) : device_(device) {}
  void replay() override {
    const c10::cuda::CUDAGuard guard(device_);
    graph.replay();
  }
  at::cuda::CUDAGraph graph;

 private:
  at::Device device_;
};

// Generators still believe that a capture is in progress. Runs and ends an empty capture to reset them. They
// cannot be replaced, because earlier graphs refer to them.
void end_drawing(at::Device device, const std::vector<at::Generator>& given) {
  const auto written = at::empty({1}, at::TensorOptions(device));
  at::cuda::CUDAGraph graph;
  for (const auto& generator : given) graph.register_generator_state(generator);
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  written.zero_();  // LibTorch warns about empty graphs
  graph.capture_end();
}

// LibTorch leaves the allocator and generators in capture mode if a capture fails to end.
void clean_up(at::Device device, at::cuda::MempoolId_t pool, const std::vector<at::Generator>& generators) {
  try {
    allocator::endAllocateToPool(device.index(), pool);
    allocator::releasePool(device.index(), pool);
  } catch (const c10::Error&) {  // it had already ended
  }
  const auto host_memory = [&](auto& host) {
    if constexpr (requires { host.end_allocate_to_pool(pool); }) {  // older versions have no pools
      host.end_allocate_to_pool(pool);
      host.release_pool(pool);
    }
  };
  try {
    host_memory(*at::getHostAllocator(at::kCUDA));
  } catch (const c10::Error&) {
  }
  (void)cudaGetLastError();
  try {
    end_drawing(device, generators);
  } catch (const c10::Error& error) {
    log(LogLevel::warn, "StepGraph: random number generators may be unusable now: {}",
        error.what_without_backtrace());
  }
}

}  // namespace

bool capturing(at::Device device) {
  if (!device.is_cuda()) return false;
  const c10::cuda::CUDAGuard guard(device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

std::string no_graph_because() { return c10::cuda::device_count() > 0 ? "" : "no CUDA device found"; }

at::Device current_device() { return {at::kCUDA, c10::cuda::current_device()}; }

void on_side_stream(at::Device device, const std::function<void()>& work) {
  const c10::cuda::CUDAGuard device_guard(device);
  const auto current = c10::cuda::getCurrentCUDAStream(), side = stream_for(device);
  in_order(current, side);
  {
    const c10::cuda::CUDAStreamGuard guard(side);
    work();
  }
  in_order(side, current);
}

std::shared_ptr<void> stay_on_side_stream(at::Device device) {
  struct Stay {
    explicit Stay(at::Device device)
        : before(c10::cuda::getCurrentCUDAStream(device.index())), side(stream_for(device)) {
      in_order(before, side);
      c10::cuda::setCurrentCUDAStream(side);
    }
    ~Stay() {
      c10::cuda::setCurrentCUDAStream(before);
      try {
        in_order(side, before);
      } catch (const c10::Error& error) {
        log(LogLevel::warn, "GraphStream: {}", error.what_without_backtrace());
      }
    }
    CUDAStream before, side;
  };
  const c10::cuda::CUDAGuard guard(device);
  return std::make_shared<Stay>(device);
}

std::unique_ptr<CudaGraph> capture(at::Device device, const std::vector<at::Generator>& given,
                                   const std::function<void()>& work) {
  const c10::cuda::CUDAGuard device_guard(device);
  auto captured = std::make_unique<Captured>(device);
  for (const auto& generator : given) captured->graph.register_generator_state(generator);
  const auto pool = at::cuda::graph_pool_handle();
  const auto current = c10::cuda::getCurrentCUDAStream(), side = stream_for(device);
  in_order(current, side);
  const c10::cuda::CUDAStreamGuard guard(side);
  allocator::emptyCache();  // release memory cached from earlier steps; the graph has its own pool
  std::exception_ptr failure;
  try {
    // Restrict capture to this thread, so that others (data loaders that pin memory, NCCL's watchdog) can
    // continue.
    captured->graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    captured->graph.capture_end();
  } catch (...) {
    clean_up(device, pool, given);
    // The step's own exception is more useful than the error about the failed capture.
    if (!failure) failure = std::current_exception();
  }
  if (failure) std::rethrow_exception(failure);
  return captured;
}

}  // namespace lockstep::detail
