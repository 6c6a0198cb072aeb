// A rank of any peer: carries out what its page says. No LibTorch.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "page.h"

namespace lockstep::bench {

// Of one operation on one rank, in elements. all_reduce and broadcast are in place: they have no output.
struct Sizes {
  std::int64_t in = 0, out = 0;
  // From one operation of a batch to the next: each has memory of its own, on a cache line of its own.
  std::int64_t in_stride = 0, out_stride = 0;
};
Sizes sizes_of(const Order& order, int ranks);

// One way of doing the operations.
class Engine {
 public:
  struct Memory {
    void* in = nullptr;
    void* out = nullptr;  // where there is no output: null
  };

  virtual ~Engine() = default;
  virtual int rank() const = 0;
  // Memory for order.batch operations.
  virtual Memory prepare(const Order& order, const Sizes& sizes) = 0;
  // Operation i of the batch, from start to end. Its root, where it has one, is i % ranks: were it always
  // the same, it could run ahead, and what is measured would not be how long an operation takes.
  virtual void run(int i) = 0;
  virtual void release() = 0;
};

// Plain memory as at::empty aligns it.
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

// The floor: every rank copies as many bytes from its own memory to its own memory.
std::unique_ptr<Engine> make_memcpy_engine(int rank);

// Until the order to leave comes. Throws when a result is wrong.
void serve(Page& page, Engine& engine);

}  // namespace lockstep::bench
