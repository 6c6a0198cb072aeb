// One rank's share of an operation, as the engines of our own take it. No LibTorch.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <vector>

#include <lockstep/comm/call.h>

namespace lockstep::detail {

constexpr int kAnySource = -1;

// One rank's share of an operation. Buffers are dense and live until `done` has been called.
//   all_reduce, reduce, broadcast: outputs[0], in place
//   all_gather: inputs[0], outputs[from each rank]   gather: inputs[0], on the root outputs[from each]
//   scatter: outputs[0], on the root inputs[to each]  reduce_scatter: inputs[to each], outputs[0]
//   all_to_all: inputs[to each], outputs[from each]   send: inputs[0]   recv: outputs[0]
struct Part {
  Call call;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::size_t item_size = 0;  // bytes an element
  // Called exactly once, by any thread, without a lock of the engine's; source is set for a receive.
  std::function<void(std::exception_ptr error, int source)> done;
};

// A thread that calls Part::done, or lets go of it. An interpreter must not end while there is one: what is
// called may want it.
class Settling {
 public:
  Settling() { count_.fetch_add(1); }
  ~Settling() { count_.fetch_sub(1); }
  Settling(const Settling&) = delete;
  Settling& operator=(const Settling&) = delete;
  static int count() { return count_.load(); }

 private:
  static inline std::atomic<int> count_ = 0;
};

}  // namespace lockstep::detail
