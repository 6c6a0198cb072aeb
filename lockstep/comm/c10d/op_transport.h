// The engines of our own as Group's transports: what they have in common.
#pragma once

#include <lockstep/comm/c10d/transport.h>
#include <lockstep/comm/reduce/reduce.h>

namespace lockstep::detail {

// Own: a OpBackend with interrupt(cause), or with (cause, kind), and leave().
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
    } catch (...) {  // out of memory while waking: the deadline remains
    }
  }
  void leave() noexcept override { backend_->leave(); }

 protected:
  Own& own() { return *backend_; }

 private:
  const c10::intrusive_ptr<Own> backend_;
};

}  // namespace lockstep::detail
