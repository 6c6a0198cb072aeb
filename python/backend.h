// The shared-memory transport as PyTorch's programs meet it: init_process_group("lockstep").
#pragma once

#include <lockstep/comm/transports/shm/backend.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace lockstep::python {

class TorchBackend final : public detail::ShmBackend {
 public:
  // Meets the other ranks. An error where they are not all on this host.
  explicit TorchBackend(const c10d::DistributedBackendOptions& options);
  ~TorchBackend() override;

  const std::string getBackendName() const override { return "lockstep"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  void shutdown() override;  // what was posted is done first
  void abort() override;

  // Before the interpreter ends: no thread of ours calls into it afterwards.
  static void leave_all();

 protected:
  std::function<std::exception_ptr(std::exception_ptr)> explanation(const Call& call) override;
  const char* title(const detail::Op& op) const override;
  bool takes_less() const override { return true; }  // as gloo has it
  [[noreturn]] void refuse(Operation operation, std::chrono::milliseconds timeout,
                           const std::exception_ptr& error) override;

 private:
  const c10::intrusive_ptr<Options> options_;
};

// c10d's own ProcessGroup calls every backend that it does not know "custom", and denies it sequence numbers.
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
