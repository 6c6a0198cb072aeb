// Ranks that are threads, on simulated GPUs.
#pragma once

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <lockstep/comm/reduce/reduce.h>
#include <lockstep/comm/transports/cuda_ipc/engine/engine.h>

#include "comm/transports/cuda_ipc/engine/fake_cuda.h"
#include "comm/transports/shm/engine/threads.h"

namespace lockstep::cuda_ipc {

inline std::size_t at(int i) { return static_cast<std::size_t>(i); }
inline shm::Clock::time_point soon() { return shm::Clock::now() + std::chrono::seconds(60); }

enum class Memory { plain, allocated, mixed };

struct Shape {
  int ranks;
  bool one_device;
  Memory memory;
  std::int64_t count;
};

inline std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (int ranks : {1, 2, 3, 4})
    for (bool one_device : {true, false})
      for (auto memory : {Memory::plain, Memory::allocated, Memory::mixed})
        for (std::int64_t count : {0, 1, 5001}) all.push_back({ranks, one_device, memory, count});
  return all;
}

inline std::string text(const Shape& shape) {
  return fmt::format("{} ranks, one device: {}, memory {}, {} elements", shape.ranks, shape.one_device,
                     static_cast<int>(shape.memory), shape.count);
}

// A rank as a program sees it: a stream on which it computes, and tensors.
class Rank {
 public:
  Rank(int rank, const Shape& shape, std::unique_ptr<shm::Engine> host)
      : rank_(rank),
        shape_(shape),
        device_(shape.one_device ? 0 : rank),
        barrier_(host->barrier()),
        peers_(std::make_shared<Peers>(*host, rank, shape.ranks, device_, soon())),
        engine_(std::make_shared<Engine>(std::move(host), peers_)) {
    stream_ = track_->stream();
  }
  ~Rank() { fake_cuda::synchronize(stream_); }

  int rank() const { return rank_; }
  int ranks() const { return shape_.ranks; }
  Engine& engine() { return *engine_; }
  std::shared_ptr<Peers> peers() { return peers_; }
  shm::Barrier& barrier() { return barrier_; }
  cudaStream_t stream() const { return stream_; }

  float* make(std::int64_t count) {
    const bool allocated =
        shape_.memory == Memory::allocated || (shape_.memory == Memory::mixed && rank_ % 2 == 0);
    const auto bytes = static_cast<std::size_t>(count + 4) * sizeof(float);
    if (allocated) return reinterpret_cast<float*>(Arena::of(device_).allocate(bytes, stream_));
    plain_.push_back(std::make_unique<float[]>(at(static_cast<int>(count) + 4)));
    return plain_.back().get();
  }
  // On the stream, like all work that a program does on its tensors.
  void fill(float* to, const std::vector<float>& values) {
    fake_cuda::enqueue(stream_, [=] { std::copy(values.begin(), values.end(), to); });
  }
  void read(std::vector<float>& to, const float* from) {
    fake_cuda::enqueue(stream_, [&to, from] { std::copy_n(from, to.size(), to.begin()); });
  }
  void spoil(float* to, std::int64_t count) {
    fill(to, std::vector<float>(at(static_cast<int>(count)), -77));
  }

  Op op(Operation operation, std::int64_t count, int root = -1) {
    Op op;
    op.item_size = sizeof(float);
    op.call.operation = operation;
    op.call.dtype = Dtype::float32;
    op.call.rank = rank_;
    op.call.size = shape_.ranks;
    op.call.root = root;
    op.call.count = count;
    op.call.bytes = count * 4;
    op.call.shape = {count};
    op.call.group = "test";
    auto order = std::make_shared<Order>(device_);
    cudaEventRecord(order->ready, stream_);
    op.order = order;
    return op;
  }
  // Like Work::wait.
  void follow(const Op& op) { cudaStreamWaitEvent(stream_, static_cast<Order*>(op.order.get())->done, 0); }
  void run(Op& op) {
    engine_->begin(op);
    engine_->finish(op, soon());
    follow(op);
  }

 private:
  const int rank_;
  const Shape shape_;
  const int device_;
  shm::Barrier& barrier_;
  const std::shared_ptr<Peers> peers_;
  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Track> track_ = Track::take(device_);  // a stream that is reused
  cudaStream_t stream_ = nullptr;
  std::vector<std::unique_ptr<float[]>> plain_;
};

class Job {
 public:
  explicit Job(const Shape& shape) : shape_(shape) {
    const auto size = shm::Region::size_for(shape.ranks);
    region_ = static_cast<char*>(std::aligned_alloc(128, (size + 127) / 128 * 128));
    shm::Region(region_, shape.ranks).prepare();
  }
  ~Job() { std::free(region_); }
  void run(const std::function<void(Rank& rank)>& body) {
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<Rank>> ranks(at(shape_.ranks));
    for (int r = 0; r < shape_.ranks; ++r)
      threads.emplace_back([&, r] {
        ranks[at(r)] = std::make_unique<Rank>(r, shape_, host(r));
        body(*ranks[at(r)]);
      });
    for (auto& thread : threads) thread.join();
  }
  std::unique_ptr<shm::Engine> host(int rank) {
    return std::make_unique<shm::Engine>(shm::Region(region_, shape_.ranks), rank, shm::Engine::Tuning(),
                                         memory_);
  }
  shm::ThreadMemory& memory() { return memory_; }

 private:
  const Shape shape_;
  shm::ThreadMemory memory_;
  char* region_ = nullptr;
};

inline std::vector<float> values_of(int rank, std::int64_t count, int salt) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = 0.1f * static_cast<float>((i * 7 + at(rank) * 31 + at(salt) * 13) % 101) +
                1e-4f * static_cast<float>(rank);
  return values;
}

inline std::vector<float> sum_of(int ranks, std::int64_t count, int salt) {
  std::vector<std::vector<float>> inputs;
  std::vector<const void*> pointers;
  for (int r = 0; r < ranks; ++r) inputs.push_back(values_of(r, count, salt));
  for (const auto& each : inputs) pointers.push_back(each.data());
  std::vector<float> result(static_cast<std::size_t>(count));
  if (count > 0) detail::reduce_tree(Dtype::float32, ReduceOp::SUM, pointers, result.data(), result.size());
  return result;
}

inline std::vector<float> slice(const std::vector<float>& of, std::int64_t from, std::int64_t count) {
  return {of.begin() + from, of.begin() + from + count};
}

}  // namespace lockstep::cuda_ipc
