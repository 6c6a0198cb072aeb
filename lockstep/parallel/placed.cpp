#include <lockstep/parallel/placed.h>

#include <string>

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {
namespace {

int count_of(at::DeviceType type) {
  if (type == at::kCPU) return 1;
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::getDeviceGuardImpl(type)->deviceCount() : 0;
}

std::string all_devices() {
  std::vector<std::string> names = {"cpu"};
  for (const auto type : {at::kCUDA, at::kXPU, at::kMPS})
    for (int i = 0; i < count_of(type); ++i)
      names.push_back(at::Device(type, static_cast<at::DeviceIndex>(i)).str());
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

at::Device place(torch::nn::Module* module, at::Device device) {
  if (module == nullptr) throw ConfigError("Placed: the module holder is empty (constructed from nullptr)");
  if (device.has_index() ? device.index() >= count_of(device.type()) : count_of(device.type()) == 0)
    throw ConfigError(fmt::format("Placed: no device {} for {}; available devices: {}", device.str(),
                                  module->name(), all_devices()));
  // A CPU tensor's device is "cpu", never "cpu:0"; on other devices it always has an index.
  if (device.is_cpu())
    device = at::kCPU;
  else if (!device.has_index())
    device = c10::impl::getDeviceGuardImpl(device.type())->getDevice();
  module->to(device);
  return device;
}

at::Tensor on_device(const at::Tensor& tensor, at::Device device) {
  if (!tensor.defined() || tensor.device() == device) return tensor;
  // A non-blocking copy to the CPU could be read before it has arrived.
  return tensor.to(device, /*non_blocking=*/device.is_cuda());
}

}  // namespace lockstep::detail
