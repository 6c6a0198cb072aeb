// Summarises the device activities within a rank's steps.
#include <algorithm>
#include <map>

#include <lockstep/profile/record/intervals.h>
#include <lockstep/profile/report/summary.h>

namespace lockstep::profile {

namespace {

constexpr std::size_t kMostKernels = 10;  // kernels to list, by name, longest first

std::vector<KernelSummary> longest(const std::map<std::string, KernelSummary>& by_name) {
  std::vector<KernelSummary> kernels;
  for (const auto& [name, kernel] : by_name) kernels.push_back(kernel);
  std::stable_sort(kernels.begin(), kernels.end(),
                   [](const auto& a, const auto& b) { return a.total_ms > b.total_ms; });
  if (kernels.size() > kMostKernels) kernels.resize(kMostKernels);
  return kernels;
}

}  // namespace

// NCCL's kernels are named ncclKernel_... up to 2.18, and ncclDevKernel_... since then.
bool is_communication(const std::string& kernel) {
  return kernel.starts_with("ncclKernel") || kernel.starts_with("ncclDev");
}

std::optional<DeviceSummary> device_summary(const RankProfile& profile, const std::vector<StepOf>& steps) {
  if (profile.device.empty() || steps.empty()) return std::nullopt;
  Intervals all, communication, others;
  for (const auto& event : profile.device) {
    all.push_back({event.begin, event.end});
    (is_communication(profile.names[static_cast<std::size_t>(event.name)]) ? communication : others)
        .push_back({event.begin, event.end});
  }
  all = united(std::move(all));
  communication = united(std::move(communication));
  others = united(std::move(others));

  DeviceSummary summary;
  std::map<std::string, KernelSummary> by_name;
  for (const auto& step : steps) {
    const auto inside = clipped(communication, step.begin, step.end);
    const auto length = covered(communication, step.begin, step.end);
    summary.busy_ms += milliseconds(covered(all, step.begin, step.end));
    summary.communication_ms += milliseconds(length);
    summary.exposed_ms += milliseconds(length - covered(others, inside));
    for (const auto& event : profile.device) {
      const auto part = std::min(event.end, step.end) - std::max(event.begin, step.begin);
      if (part <= 0) continue;
      (event.kind == DeviceKind::kernel ? summary.kernel_ms : summary.copy_ms) += milliseconds(part);
      if (event.kind != DeviceKind::kernel || event.begin < step.begin || event.begin >= step.end) continue;
      const auto& name = profile.names[static_cast<std::size_t>(event.name)];
      auto& kernel = by_name[name];
      kernel.name = name;
      ++kernel.count;
      kernel.total_ms += milliseconds(event.end - event.begin);
    }
  }
  const auto count = static_cast<double>(steps.size());
  for (double* each : {&summary.busy_ms, &summary.kernel_ms, &summary.copy_ms, &summary.communication_ms,
                       &summary.exposed_ms})
    *each /= count;
  summary.top = longest(by_name);
  return summary;
}

void sum_up_devices(Summary& summary) {
  DeviceSummary all;
  std::map<std::string, KernelSummary> by_name;
  double count = 0;
  for (const auto& rank : summary.each) {
    if (!rank.device) continue;
    ++count;
    all.busy_ms += rank.device->busy_ms;
    all.kernel_ms += rank.device->kernel_ms;
    all.copy_ms += rank.device->copy_ms;
    all.communication_ms += rank.device->communication_ms;
    all.exposed_ms += rank.device->exposed_ms;
    for (const auto& kernel : rank.device->top) {
      auto& sum = by_name[kernel.name];
      sum.name = kernel.name;
      sum.count += kernel.count;
      sum.total_ms += kernel.total_ms;
    }
  }
  if (count == 0) return;
  for (double* each : {&all.busy_ms, &all.kernel_ms, &all.copy_ms, &all.communication_ms, &all.exposed_ms})
    *each /= count;
  all.top = longest(by_name);
  summary.overall.device = std::move(all);
}

}  // namespace lockstep::profile
