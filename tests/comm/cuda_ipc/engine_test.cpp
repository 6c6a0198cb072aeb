// The collectives and messages of ranks that share GPUs, without one: ranks are threads, streams too, and
// dawdle.
#include <lockstep/comm/transports/cuda_ipc/engine.h>

#include <array>
#include <future>
#include <thread>

#include <fmt/format.h>
#include <lockstep/comm/reduce.h>
#include <lockstep/comm/transports/cuda_ipc/mail.h>

#include "comm/cuda_ipc/fake_cuda.h"
#include "comm/shm/threads.h"
#include "support/errors.h"

namespace lockstep::cuda_ipc {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

std::size_t at(int i) { return static_cast<std::size_t>(i); }
shm::Clock::time_point soon() { return shm::Clock::now() + seconds(60); }

enum class Memory { plain, allocated, mixed };

struct Shape {
  int ranks;
  bool one_device;
  Memory memory;
  std::int64_t count;
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (int ranks : {1, 2, 3, 4})
    for (bool one_device : {true, false})
      for (auto memory : {Memory::plain, Memory::allocated, Memory::mixed})
        for (std::int64_t count : {0, 1, 5001}) all.push_back({ranks, one_device, memory, count});
  return all;
}

std::string text(const Shape& shape) {
  return fmt::format("{} ranks, one device: {}, memory {}, {} elements", shape.ranks, shape.one_device,
                     static_cast<int>(shape.memory), shape.count);
}

// A rank as a program has it: a stream on which it computes, and tensors.
class Rank {
 public:
  Rank(int rank, const Shape& shape, std::unique_ptr<shm::Engine> host)
      : rank_(rank),
        shape_(shape),
        device_(shape.one_device ? 0 : rank),
        meeting_(host->meeting()),
        peers_(std::make_shared<Peers>(*host, rank, shape.ranks, device_, soon())),
        engine_(std::make_shared<Engine>(std::move(host), peers_)) {
    stream_ = track_->stream();
  }
  ~Rank() { fake_cuda::synchronize(stream_); }

  int rank() const { return rank_; }
  int ranks() const { return shape_.ranks; }
  Engine& engine() { return *engine_; }
  std::shared_ptr<Peers> peers() { return peers_; }
  shm::Meeting& meeting() { return meeting_; }
  cudaStream_t stream() const { return stream_; }

  float* make(std::int64_t count) {
    const bool allocated =
        shape_.memory == Memory::allocated || (shape_.memory == Memory::mixed && rank_ % 2 == 0);
    const auto bytes = static_cast<std::size_t>(count + 4) * sizeof(float);
    if (allocated) return reinterpret_cast<float*>(Arena::of(device_).allocate(bytes, stream_));
    plain_.push_back(std::make_unique<float[]>(at(static_cast<int>(count) + 4)));
    return plain_.back().get();
  }
  // On the stream, as everything that a program does to its tensors.
  void fill(float* to, const std::vector<float>& values) {
    fake_cuda::enqueue(stream_, [=] { std::copy(values.begin(), values.end(), to); });
  }
  void read(std::vector<float>& to, const float* from) {
    fake_cuda::enqueue(stream_, [&to, from] { std::copy_n(from, to.size(), to.begin()); });
  }
  void spoil(float* to, std::int64_t count) {
    fill(to, std::vector<float>(at(static_cast<int>(count)), -77));
  }

  Part part(Operation operation, std::int64_t count, int root = -1) {
    Part part;
    part.item_size = sizeof(float);
    part.call.operation = operation;
    part.call.dtype = Dtype::float32;
    part.call.rank = rank_;
    part.call.size = shape_.ranks;
    part.call.root = root;
    part.call.count = count;
    part.call.bytes = count * 4;
    part.call.shape = {count};
    part.call.group = "test";
    auto order = std::make_shared<Order>(device_);
    cudaEventRecord(order->ready, stream_);
    part.order = order;
    return part;
  }
  // As Work::wait does.
  void follow(const Part& part) {
    cudaStreamWaitEvent(stream_, static_cast<Order*>(part.order.get())->done, 0);
  }
  void run(Part& part) {
    engine_->begin(part);
    engine_->finish(part, soon());
    follow(part);
  }

 private:
  const int rank_;
  const Shape shape_;
  const int device_;
  shm::Meeting& meeting_;
  const std::shared_ptr<Peers> peers_;
  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Track> track_ = Track::take(device_);  // a stream that is used again
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
        shm::Engine::Tuning tuning;
        auto host = std::make_unique<shm::Engine>(shm::Region(region_, shape_.ranks), r, tuning, memory_);
        ranks[at(r)] = std::make_unique<Rank>(r, shape_, std::move(host));
        body(*ranks[at(r)]);
      });
    for (auto& thread : threads) thread.join();
  }
  shm::ThreadMemory& memory() { return memory_; }

 private:
  const Shape shape_;
  shm::ThreadMemory memory_;
  char* region_ = nullptr;
};

std::vector<float> values_of(int rank, std::int64_t count, int salt) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = 0.1f * static_cast<float>((i * 7 + at(rank) * 31 + at(salt) * 13) % 101) +
                1e-4f * static_cast<float>(rank);
  return values;
}

std::vector<float> sum_of(int ranks, std::int64_t count, int salt) {
  std::vector<std::vector<float>> inputs;
  std::vector<const void*> pointers;
  for (int r = 0; r < ranks; ++r) inputs.push_back(values_of(r, count, salt));
  for (const auto& each : inputs) pointers.push_back(each.data());
  std::vector<float> result(static_cast<std::size_t>(count));
  if (count > 0) detail::reduce_tree(Dtype::float32, ReduceOp::SUM, pointers, result.data(), result.size());
  return result;
}

std::vector<float> slice(const std::vector<float>& of, std::int64_t from, std::int64_t count) {
  return {of.begin() + from, of.begin() + from + count};
}

// Nobody waits on the host between them: what they read and write is spoilt as soon as the stream allows.
TEST(CudaIpcEngine, all_reduce_gives_the_trees_bits_in_the_order_of_streams) {
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(text(shape));
    constexpr int kRounds = 12;
    Job(shape).run([&](Rank& rank) {
      auto* tensor = rank.make(shape.count);
      std::array<std::vector<float>, kRounds> results;
      for (int round = 0; round < kRounds; ++round) {
        results[at(round)].resize(static_cast<std::size_t>(shape.count));
        auto* place = tensor + round % 3;  // not always aligned
        rank.fill(place, values_of(rank.rank(), shape.count, round));
        auto part = rank.part(Operation::all_reduce, shape.count);
        part.outputs = {place};
        rank.run(part);
        rank.read(results[at(round)], place);
        rank.spoil(place, shape.count);
      }
      fake_cuda::synchronize(rank.stream());
      for (int round = 0; round < kRounds; ++round)
        EXPECT_EQ(results[at(round)], sum_of(shape.ranks, shape.count, round))
            << text(shape) << ", round " << round;
    });
  }
}

TEST(CudaIpcEngine, data_goes_where_it_belongs) {
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(text(shape));
    const int p = shape.ranks;
    const auto n = shape.count;
    Job(shape).run([&](Rank& rank) {
      const int me = rank.rank();
      auto *large = rank.make(n * p), *out = rank.make(n * p), *small = rank.make(n);
      std::vector<float> got(static_cast<std::size_t>(n)), all(static_cast<std::size_t>(n * p));
      auto pieces = [&](float* base, auto& list) {
        for (int r = 0; r < p; ++r) list.push_back(base + r * n);
      };
      const std::vector<std::int64_t> each(at(p), n);
      auto finish = [&](Part& part, std::vector<float>& to, float* from) {
        rank.run(part);
        rank.read(to, from);
        rank.spoil(large, n * p), rank.spoil(small, n), rank.spoil(out, n * p);
        fake_cuda::synchronize(rank.stream());
      };
      for (int root = 0; root < p; ++root) {
        rank.fill(small, values_of(me, n, root));
        auto part = rank.part(Operation::broadcast, n, root);
        part.outputs = {small};
        finish(part, got, small);
        EXPECT_EQ(got, values_of(root, n, root));

        rank.fill(small, values_of(me, n, root));
        part = rank.part(Operation::reduce, n, root);
        part.outputs = {small};
        finish(part, got, small);
        EXPECT_EQ(got, me == root ? sum_of(p, n, root) : values_of(me, n, root));

        rank.fill(small, values_of(me, n, root));
        part = rank.part(Operation::gather, n, root);
        part.inputs = {small};
        if (me == root) pieces(out, part.outputs), part.call.from = each;
        finish(part, all, out);
        for (int r = 0; r < p && me == root; ++r) EXPECT_EQ(slice(all, r * n, n), values_of(r, n, root));

        rank.fill(large, values_of(me, n * p, root));
        part = rank.part(Operation::scatter, n, root);
        part.outputs = {small};
        if (me == root) pieces(large, part.inputs), part.call.to = each;
        finish(part, got, small);
        EXPECT_EQ(got, slice(values_of(root, n * p, root), me * n, n));
      }
      rank.fill(small, values_of(me, n, 1));
      auto part = rank.part(Operation::all_gather, n);
      part.inputs = {small};
      pieces(out, part.outputs);
      part.call.from = each;
      finish(part, all, out);
      for (int r = 0; r < p; ++r) EXPECT_EQ(slice(all, r * n, n), values_of(r, n, 1));

      rank.fill(large, values_of(me, n * p, 2));
      part = rank.part(Operation::reduce_scatter, n * p);
      pieces(large, part.inputs);
      part.outputs = {small};
      part.call.to = each;
      finish(part, got, small);
      EXPECT_EQ(got, slice(sum_of(p, n * p, 2), me * n, n));

      rank.fill(large, values_of(me, n * p, 3));
      part = rank.part(Operation::all_to_all, n * p);
      pieces(large, part.inputs);
      pieces(out, part.outputs);
      part.call.to = part.call.from = each;
      finish(part, all, out);
      for (int r = 0; r < p; ++r) EXPECT_EQ(slice(all, r * n, n), slice(values_of(r, n * p, 3), me * n, n));

      part = rank.part(Operation::barrier, 0);
      rank.run(part);
    });
  }
}

TEST(CudaIpcEngine, calls_that_differ_are_named_on_every_rank) {
  const Shape shape{3, true, Memory::plain, 10};
  Job(shape).run([&](Rank& rank) {
    auto part = rank.part(Operation::all_reduce, rank.rank() == 1 ? 20 : 10);
    part.outputs = {rank.make(20)};
    EXPECT_THAT(testing::error_of<shm::Mismatch>([&] { rank.run(part); }), HasSubstr("[20]"));
  });
}

TEST(CudaIpcEngine, who_waits_for_a_rank_is_woken) {
  const Shape shape{2, true, Memory::plain, 10};
  Job(shape).run([&](Rank& rank) {
    if (rank.rank() == 1) return;
    auto part = rank.part(Operation::all_reduce, 10);
    part.outputs = {rank.make(10)};
    std::thread teller([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      rank.engine().interrupt("the test says so");
    });
    EXPECT_THAT(testing::error_of<shm::Interrupted>([&] { rank.run(part); }), HasSubstr("the test says so"));
    rank.engine().give_up();
    teller.join();
  });
}

// ---- messages ---------------------------------------------------------------------------------------------

class Message {
 public:
  Message(Rank& rank, Mail& mail, Operation operation, int peer, float* data, std::int64_t count, int tag)
      : rank_(rank), mail_(mail) {
    auto part = rank.part(operation, count, peer);
    if (operation == Operation::send)
      part.inputs = {data};
    else
      part.outputs = {data};
    order_ = part.order;
    part.done = [this](const std::exception_ptr& error, int source) {
      source_ = source;
      if (error)
        outcome_.set_exception(error);
      else
        outcome_.set_value();
    };
    item_ = mail.post(std::move(part), peer, tag, seconds(60));
  }
  int wait() {
    mail_.wait(*item_, soon());
    outcome_.get_future().get();
    cudaStreamWaitEvent(rank_.stream(), static_cast<Order*>(order_.get())->done, 0);
    return source_;
  }

 private:
  Rank& rank_;
  Mail& mail_;
  std::shared_ptr<void> order_;
  std::promise<void> outcome_;
  int source_ = -1;
  Mail::ItemPtr item_;
};

TEST(CudaIpcMail, messages_come_by_peer_and_tag_in_the_order_of_streams) {
  for (auto memory : {Memory::plain, Memory::allocated, Memory::mixed}) {
    const Shape shape{3, true, memory, 5000};
    Job job(shape);
    job.run([&](Rank& rank) {
      const int p = shape.ranks, me = rank.rank(), next = (me + 1) % p, previous = (me + p - 1) % p;
      auto messages =
          std::make_shared<shm::Messages>(rank.meeting(), job.memory(), std::chrono::nanoseconds(0), nullptr);
      auto mail = std::make_shared<Mail>(messages, rank.peers());
      auto *out = rank.make(shape.count), *in = rank.make(shape.count);
      for (int round = 0; round < 40; ++round) {
        std::vector<float> got(static_cast<std::size_t>(shape.count));
        const int from = round % 2 == 0 ? previous : detail::kAnySource;
        rank.fill(out, values_of(me, shape.count, round));
        Message received(rank, *mail, Operation::recv, from, in, shape.count, round);
        Message sent(rank, *mail, Operation::send, next, out, shape.count, round);
        EXPECT_EQ(received.wait(), previous);
        rank.read(got, in);
        sent.wait();
        rank.spoil(out, shape.count), rank.spoil(in, shape.count);
        fake_cuda::synchronize(rank.stream());
        EXPECT_EQ(got, values_of(previous, shape.count, round)) << round;
      }
      // Ends in order only when all have theirs.
      auto part = rank.part(Operation::barrier, 0);
      rank.run(part);
      mail->close();
    });
  }
}

TEST(CudaIpcMail, messages_of_different_sizes_fail_on_both_sides) {
  const Shape shape{2, true, Memory::plain, 10};
  Job job(shape);
  job.run([&](Rank& rank) {
    auto messages =
        std::make_shared<shm::Messages>(rank.meeting(), job.memory(), std::chrono::nanoseconds(0), nullptr);
    auto mail = std::make_shared<Mail>(messages, rank.peers());
    const bool sends = rank.rank() == 0;
    Message message(rank, *mail, sends ? Operation::send : Operation::recv, 1 - rank.rank(), rank.make(20),
                    sends ? 10 : 20, 1);
    EXPECT_THAT(testing::error_of<shm::Mismatch>([&] { message.wait(); }), HasSubstr("size"));
    auto part = rank.part(Operation::barrier, 0);
    rank.run(part);
    mail->close();
  });
}

}  // namespace
}  // namespace lockstep::cuda_ipc
