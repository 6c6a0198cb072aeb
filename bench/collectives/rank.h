// A rank of any peer: carries out the orders on its page. No LibTorch.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "page.h"

namespace lockstep::bench {

// Sizes of one operation on one rank, in elements. all_reduce and broadcast are in place and have no output.
struct Sizes {
  std::int64_t in = 0, out = 0;
  // Distance between the operations of a batch: each has its own memory, aligned to cache lines.
  std::int64_t in_stride = 0, out_stride = 0;
};
Sizes sizes_of(const Order& order, int ranks);

// Performs the operations with one backend.
class Engine {
 public:
  struct Memory {
    void* in = nullptr;
    void* out = nullptr;  // Null if there is no output.
  };

  virtual ~Engine() = default;
  virtual int rank() const = 0;
  // Memory for order.batch operations.
  virtual Memory prepare(const Order& order, const Sizes& sizes) = 0;
  // Runs operation i of the batch to completion. Its root, if it has one, is i % ranks: a fixed root could
  // run ahead, and the time would not be that of an operation.
  virtual void run(int i) = 0;
  virtual void release() = 0;
};

// Plain memory, aligned like at::empty's.
class PlainMemory {
 public:
  Engine::Memory get(const Order& order, const Sizes& sizes);
  void release() { in_.reset(), out_.reset(); }
  std::byte* in(int i) const { return in_.get() + i * in_stride_; }
  std::byte* out(int i) const { return out_.get() + i * out_stride_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  static std::unique_ptr<std::byte, Free> make(std::int64_t bytes);
  std::unique_ptr<std::byte, Free> in_, out_;
  std::int64_t in_stride_ = 0, out_stride_ = 0;
};

// The lower bound: every rank copies as many bytes within its own memory.
std::unique_ptr<Engine> make_memcpy_engine(int rank);

// Runs until the order to leave. Throws if a result is wrong.
void serve(Page& page, Engine& engine);

}  // namespace lockstep::bench
