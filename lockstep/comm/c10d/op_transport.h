// OpTransport: common base of the Transports of Lockstep's own engines.
#pragma once

#include <lockstep/comm/c10d/transport.h>
#include <lockstep/comm/reduce/reduce.h>

namespace lockstep::detail {

// Own: an OpBackend with leave() and interrupt(cause) or interrupt(cause, kind).
template <typename Own>
class OpTransport : public Transport {
 public:
  explicit OpTransport(c10::intrusive_ptr<Own> backend) : backend_(std::move(backend)) {}

  Traits traits() const override {
    return {.avg = true, .unequal = true, .any_dtype = true, .compares_calls = true, .keeps_inputs = true};
  }
  c10d::Backend& backend() override { return *backend_; }
  bool reduces(Dtype dtype, ReduceOp op) const override { return reducible(dtype, op); }
  void interrupt(const std::string& cause, CommError::Kind kind) noexcept override {
    try {
      if constexpr (requires { backend_->interrupt(cause, kind); })
        backend_->interrupt(cause, kind);
      else
        backend_->interrupt(cause);
    } catch (...) {  // out of memory while waking: the deadline still ends the waits
    }
  }
  void leave() noexcept override { backend_->leave(); }

 protected:
  Own& own() { return *backend_; }

 private:
  const c10::intrusive_ptr<Own> backend_;
};

}  // namespace lockstep::detail
