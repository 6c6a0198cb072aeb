// TorchBackend: the shared-memory transport as a PyTorch backend: init_process_group("lockstep").
#pragma once

#include <lockstep/comm/transports/shm/backend.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace lockstep::python {

class TorchBackend final : public detail::ShmBackend {
 public:
  // Waits for the other ranks. Throws c10::Error unless all of them are on this host.
  explicit TorchBackend(const c10d::DistributedBackendOptions& options);
  ~TorchBackend() override;

  const std::string getBackendName() const override { return "lockstep"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  void shutdown() override;  // completes the posted operations first
  void abort() override;

  // Call it before the interpreter shuts down: afterwards no thread of a backend calls into it.
  static void leave_all();

 protected:
  std::function<std::exception_ptr(std::exception_ptr)> explanation(const Call& call) override;
  const char* title(const detail::Op& op) const override;
  bool takes_less() const override { return true; }  // like gloo
  [[noreturn]] void refuse(Operation operation, std::chrono::milliseconds timeout,
                           const std::exception_ptr& error) override;

 private:
  const c10::intrusive_ptr<Options> options_;
};

// c10d's own ProcessGroup names every backend that it does not know "custom" and gives it no sequence numbers.
class TorchGroup final : public c10d::ProcessGroup {
 public:
  TorchGroup(const c10d::DistributedBackendOptions& options, const c10::intrusive_ptr<TorchBackend>& backend);
  const std::string getBackendName() const override { return "lockstep"; }
  void setSequenceNumberForGroup() override { getBackend(c10::DeviceType::CPU)->setSequenceNumberForGroup(); }
  std::uint64_t getSequenceNumberForGroup() override {
    return getBackend(c10::DeviceType::CPU)->getSequenceNumberForGroup();
  }
};

}  // namespace lockstep::python
