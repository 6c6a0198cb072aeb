// The collectives and messages of ranks that share GPUs, on a simulated GPU: ranks and streams are threads,
// and streams are slow at random.
#include <array>
#include <future>
#include <thread>

#include <lockstep/comm/transports/cuda_ipc/engine/mail.h>

#include "comm/transports/cuda_ipc/engine/fake_ranks.h"
#include "support/errors.h"

namespace lockstep::cuda_ipc {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

// Without waits on the host in between: inputs and outputs are overwritten as soon as the stream allows.
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
        auto op = rank.op(Operation::all_reduce, shape.count);
        op.outputs = {place};
        rank.run(op);
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
      auto finish = [&](Op& op, std::vector<float>& to, float* from) {
        rank.run(op);
        rank.read(to, from);
        rank.spoil(large, n * p), rank.spoil(small, n), rank.spoil(out, n * p);
        fake_cuda::synchronize(rank.stream());
      };
      for (int root = 0; root < p; ++root) {
        rank.fill(small, values_of(me, n, root));
        auto op = rank.op(Operation::broadcast, n, root);
        op.outputs = {small};
        finish(op, got, small);
        EXPECT_EQ(got, values_of(root, n, root));

        rank.fill(small, values_of(me, n, root));
        op = rank.op(Operation::reduce, n, root);
        op.outputs = {small};
        finish(op, got, small);
        EXPECT_EQ(got, me == root ? sum_of(p, n, root) : values_of(me, n, root));

        rank.fill(small, values_of(me, n, root));
        op = rank.op(Operation::gather, n, root);
        op.inputs = {small};
        if (me == root) pieces(out, op.outputs), op.call.from = each;
        finish(op, all, out);
        for (int r = 0; r < p && me == root; ++r) EXPECT_EQ(slice(all, r * n, n), values_of(r, n, root));

        rank.fill(large, values_of(me, n * p, root));
        op = rank.op(Operation::scatter, n, root);
        op.outputs = {small};
        if (me == root) pieces(large, op.inputs), op.call.to = each;
        finish(op, got, small);
        EXPECT_EQ(got, slice(values_of(root, n * p, root), me * n, n));
      }
      rank.fill(small, values_of(me, n, 1));
      auto op = rank.op(Operation::all_gather, n);
      op.inputs = {small};
      pieces(out, op.outputs);
      op.call.from = each;
      finish(op, all, out);
      for (int r = 0; r < p; ++r) EXPECT_EQ(slice(all, r * n, n), values_of(r, n, 1));

      rank.fill(large, values_of(me, n * p, 2));
      op = rank.op(Operation::reduce_scatter, n * p);
      pieces(large, op.inputs);
      op.outputs = {small};
      op.call.to = each;
      finish(op, got, small);
      EXPECT_EQ(got, slice(sum_of(p, n * p, 2), me * n, n));

      rank.fill(large, values_of(me, n * p, 3));
      op = rank.op(Operation::all_to_all, n * p);
      pieces(large, op.inputs);
      pieces(out, op.outputs);
      op.call.to = op.call.from = each;
      finish(op, all, out);
      for (int r = 0; r < p; ++r) EXPECT_EQ(slice(all, r * n, n), slice(values_of(r, n * p, 3), me * n, n));

      op = rank.op(Operation::barrier, 0);
      rank.run(op);
    });
  }
}

TEST(CudaIpcEngine, calls_that_differ_are_named_on_every_rank) {
  const Shape shape{3, true, Memory::plain, 10};
  Job(shape).run([&](Rank& rank) {
    auto op = rank.op(Operation::all_reduce, rank.rank() == 1 ? 20 : 10);
    op.outputs = {rank.make(20)};
    EXPECT_THAT(testing::error_of<shm::Mismatch>([&] { rank.run(op); }), HasSubstr("[20]"));
  });
}

TEST(CudaIpcEngine, who_waits_for_a_rank_is_woken) {
  const Shape shape{2, true, Memory::plain, 10};
  Job(shape).run([&](Rank& rank) {
    if (rank.rank() == 1) return;
    auto op = rank.op(Operation::all_reduce, 10);
    op.outputs = {rank.make(10)};
    std::thread teller([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      rank.engine().interrupt("the test says so");
    });
    EXPECT_THAT(testing::error_of<shm::Interrupted>([&] { rank.run(op); }), HasSubstr("the test says so"));
    rank.engine().give_up();
    teller.join();
  });
}

// ---- messages ---------------------------------------------------------------------------------------------

class Message {
 public:
  Message(Rank& rank, Mail& mail, Operation operation, int peer, float* data, std::int64_t count, int tag)
      : rank_(rank), mail_(mail) {
    auto op = rank.op(operation, count, peer);
    if (operation == Operation::send)
      op.inputs = {data};
    else
      op.outputs = {data};
    order_ = op.order;
    op.done = [this](const std::exception_ptr& error, int source) {
      source_ = source;
      if (error)
        outcome_.set_exception(error);
      else
        outcome_.set_value();
    };
    item_ = mail.post(std::move(op), peer, tag, seconds(60));
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
          std::make_shared<shm::Messages>(rank.barrier(), job.memory(), std::chrono::nanoseconds(0), nullptr);
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
      // Completes in order only when every rank has its data.
      auto op = rank.op(Operation::barrier, 0);
      rank.run(op);
      mail->close();
    });
  }
}

TEST(CudaIpcMail, messages_of_different_sizes_fail_on_both_sides) {
  const Shape shape{2, true, Memory::plain, 10};
  Job job(shape);
  job.run([&](Rank& rank) {
    auto messages =
        std::make_shared<shm::Messages>(rank.barrier(), job.memory(), std::chrono::nanoseconds(0), nullptr);
    auto mail = std::make_shared<Mail>(messages, rank.peers());
    const bool sends = rank.rank() == 0;
    Message message(rank, *mail, sends ? Operation::send : Operation::recv, 1 - rank.rank(), rank.make(20),
                    sends ? 10 : 20, 1);
    EXPECT_THAT(testing::error_of<shm::Mismatch>([&] { message.wait(); }), HasSubstr("size"));
    auto op = rank.op(Operation::barrier, 0);
    rank.run(op);
    mail->close();
  });
}

}  // namespace
}  // namespace lockstep::cuda_ipc
