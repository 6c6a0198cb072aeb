#include "rank.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace lockstep::bench {
namespace {

constexpr std::int64_t kLine = 64;

std::int64_t stride_of(std::int64_t elements, Type type) {
  const auto line = kLine / bytes_of(type);
  return (elements + line - 1) / line * line;
}

std::uint16_t to_bfloat16(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);  // Exact for small integers.
}

float element(const void* memory, std::int64_t place, Type type) {
  if (type == Type::float32) return static_cast<const float*>(memory)[place];
  return std::bit_cast<float>(std::uint32_t{static_cast<const std::uint16_t*>(memory)[place]} << 16);
}

void fill(void* memory, std::int64_t elements, Type type, float value) {
  if (type == Type::float32)
    std::fill_n(static_cast<float*>(memory), elements, value);
  else
    std::fill_n(static_cast<std::uint16_t*>(memory), elements, to_bfloat16(value));
}

// Input of rank r in a batch. The scale alternates between batches, so that a stale result is detected.
float value_of(int rank, int scale) { return static_cast<float>((rank + 1) * scale); }

float expected(Op op, std::int64_t place, std::int64_t elements, int operation, int ranks, int scale) {
  // Rank that this part of the output belongs to.
  const auto part = static_cast<int>(place * ranks / elements);
  switch (op) {
    case Op::all_gather:
    case Op::all_to_all: return value_of(part, scale);
    case Op::broadcast: return value_of(operation % ranks, scale);
    default: return static_cast<float>(ranks * (ranks + 1) / 2 * scale);
  }
}

// Checks a few elements of the last operation: both ends, and the boundaries between ranks' parts.
void check(const Order& order, const Sizes& sizes, const Engine::Memory& memory, int ranks, int scale) {
  const auto elements = sizes.out > 0 ? sizes.out : sizes.in;
  const auto skipped = (order.batch - 1) * (sizes.out > 0 ? sizes.out_stride : sizes.in_stride);
  for (int r = 0; r <= ranks; ++r) {
    const auto place = std::min(elements * r / ranks, elements - 1);
    const float is = element(memory.out != nullptr ? memory.out : memory.in, skipped + place, order.type);
    const float should = expected(order.op, place, elements, order.batch - 1, ranks, scale);
    if (!(std::abs(is - should) <= 0.01F * should))
      throw std::runtime_error("wrong result: element " + std::to_string(place) + ": expected " +
                               std::to_string(should) + ", got " + std::to_string(is));
  }
}

class MemcpyEngine final : public Engine {
 public:
  explicit MemcpyEngine(int rank) : rank_(rank) {}
  int rank() const override { return rank_; }
  Memory prepare(const Order& order, const Sizes&) override {
    bytes_ = order.bytes;
    const auto stride = stride_of(bytes_ / bytes_of(order.type), order.type);
    return memory_.get(order, {.in_stride = stride, .out_stride = stride});
  }
  void run(int i) override {
    std::memcpy(memory_.out(i), memory_.in(i), static_cast<std::size_t>(bytes_));
    asm volatile("" ::: "memory");
  }
  void release() override { memory_.release(); }

 private:
  const int rank_;
  std::int64_t bytes_ = 0;
  PlainMemory memory_;
};

}  // namespace

Sizes sizes_of(const Order& order, int ranks) {
  Sizes sizes;
  const auto all = order.bytes / bytes_of(order.type);
  switch (order.op) {
    case Op::all_reduce:
    case Op::broadcast: sizes = {.in = all}; break;
    case Op::reduce_scatter: sizes = {.in = all, .out = all / ranks}; break;
    case Op::all_gather: sizes = {.in = all / ranks, .out = all}; break;
    case Op::all_to_all: sizes = {.in = all, .out = all}; break;
    case Op::barrier: break;
  }
  sizes.in_stride = stride_of(sizes.in, order.type);
  sizes.out_stride = stride_of(sizes.out, order.type);
  return sizes;
}

void PlainMemory::Free::operator()(std::byte* memory) const { std::free(memory); }

std::unique_ptr<std::byte, PlainMemory::Free> PlainMemory::make(std::int64_t bytes) {
  void* memory = nullptr;
  if (bytes > 0 && ::posix_memalign(&memory, kLine, static_cast<std::size_t>(bytes)) != 0)
    throw std::bad_alloc();
  if (memory != nullptr) std::memset(memory, 0, static_cast<std::size_t>(bytes));  // Faults the pages in.
  return std::unique_ptr<std::byte, Free>(static_cast<std::byte*>(memory));
}

Engine::Memory PlainMemory::get(const Order& order, const Sizes& sizes) {
  release();
  in_stride_ = sizes.in_stride * bytes_of(order.type);
  out_stride_ = sizes.out_stride * bytes_of(order.type);
  in_ = make(in_stride_ * order.batch);
  out_ = make(out_stride_ * order.batch);
  return {in_.get(), out_.get()};
}

std::unique_ptr<Engine> make_memcpy_engine(int rank) { return std::make_unique<MemcpyEngine>(rank); }

void serve(Page& page, Engine& engine) {
  using Clock = std::chrono::steady_clock;
  const bool copies = dynamic_cast<MemcpyEngine*>(&engine) != nullptr;
  std::uint32_t turn = 0;
  Sizes sizes;
  Engine::Memory memory;
  int scale = 1;
  auto finish = [&] {
    page.ready.fetch_add(1);
    wake_all(page.ready);
  };
  for (finish();; finish()) {  // The first call reports that this rank has started.
    const Order order = await_order(page, turn);
    switch (order.kind) {
      case Order::Kind::leave: return;
      case Order::Kind::release: engine.release(); continue;
      case Order::Kind::prepare:
        sizes = sizes_of(order, page.ranks);
        memory = engine.prepare(order, sizes);
        continue;
      case Order::Kind::measure: break;
    }
    for (int sample = 0; sample < order.samples; ++sample) {
      scale = 3 - scale;
      if (memory.in != nullptr)
        fill(memory.in, sizes.in_stride * order.batch, order.type, value_of(engine.rank(), scale));
      meet(page);
      const auto begin = Clock::now();
      for (int i = 0; i < order.batch; ++i) engine.run(i);
      const auto end = Clock::now();
      page.begin[sample][engine.rank()] = begin.time_since_epoch().count();
      page.end[sample][engine.rank()] = end.time_since_epoch().count();
      if (memory.in != nullptr && !copies) check(order, sizes, memory, page.ranks, scale);
    }
  }
}

}  // namespace lockstep::bench
