#include <lockstep/profile/libtorch/kineto.h>

#include <exception>
#include <set>
#include <utility>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <lockstep/base/log.h>
#include <torch/csrc/autograd/profiler_kineto.h>

namespace lockstep::profile {

namespace {

namespace kineto = torch::autograd::profiler;
namespace impl = torch::profiler::impl;

// libkineto::ActivityType, whose header is not in LibTorch's include path.
constexpr int kOperator = 0, kMemcpy = 3, kMemset = 4, kKernel = 5, kCudaRuntime = 7, kCudaDriver = 8;

void take(const kineto::KinetoEvent& event, Activities& into) {
  const auto begin = static_cast<std::int64_t>(event.startNs()),
             end = begin + static_cast<std::int64_t>(event.durationNs());
  switch (event.activityType()) {
    case kOperator:
      into.operators.push_back({event.name(), event.deviceResourceId(), begin, end, event.correlationId()});
      break;
    case kCudaRuntime:
    case kCudaDriver:
      into.launches.push_back({event.deviceResourceId(), begin, event.correlationId()});
      break;
    case kKernel:
    case kMemcpy:
    case kMemset:
      into.device.push_back({event.activityType() == kKernel   ? DeviceKind::kernel
                             : event.activityType() == kMemcpy ? DeviceKind::copy
                                                               : DeviceKind::set,
                             event.name(), event.deviceIndex(), event.deviceResourceId(), begin, end,
                             event.correlationId(), event.linkedCorrelationId()});
      break;
    default: break;
  }
}

}  // namespace

std::optional<std::string> Kineto::start(Of what) noexcept {
  try {
    if (impl::ProfilerStateBase::get() != nullptr || kineto::isProfilerEnabledInMainThread())
      return "LibTorch's profiler is already running in this process, which can have only one";
    impl::ExperimentalConfig all_threads;
    all_threads.profile_all_threads = true;
    const impl::ProfilerConfig config(impl::ProfilerState::KINETO, false, false, false, false, false,
                                      all_threads);
    // Without CPU activities, Kineto does not report which operator launched a kernel.
    std::set<impl::ActivityType> activities{impl::ActivityType::CPU};
    if (what == Of::operators_and_cuda) activities.insert(impl::ActivityType::CUDA);
    kineto::prepareProfiler(config, activities);
    first_ = clock_pair();
    kineto::enableProfiler(config, activities,
                           {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION});
    running_ = true;
    return std::nullopt;
  } catch (const std::exception& error) {
    return std::string("cannot start LibTorch's profiler: ") + error.what();
  }
}

std::optional<Activities> Kineto::stop() noexcept {
  if (!std::exchange(running_, false)) return std::nullopt;
  try {
    const auto result = kineto::disableProfiler();
    last_ = clock_pair();
    Activities activities;
    for (const auto& event : result->events()) take(event, activities);
    return activities;
  } catch (const std::exception& error) {
    detail::log(LogLevel::warn, "the recording of LibTorch's profiler is lost: {}", error.what());
    return std::nullopt;
  }
}

bool uses_cuda() noexcept {
  try {
    if (!at::hasCUDA()) return false;
    const auto& hooks = at::detail::getCUDAHooks();
    for (c10::DeviceIndex device = 0; device < hooks.deviceCount(); ++device)
      if (hooks.hasPrimaryContext(device)) return true;
  } catch (const std::exception&) {  // the driver cannot be queried
  }
  return false;
}

}  // namespace lockstep::profile
