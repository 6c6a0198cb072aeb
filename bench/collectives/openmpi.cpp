// A rank of the peer Open MPI: calls MPI directly on plain memory.
#include <cstdio>
#include <exception>

#include <lockstep/comm/transports/mpi/module/mpi_api.h>

#include "rank.h"

namespace lockstep::bench {
namespace {

class MpiEngine final : public Engine {
 public:
  MpiEngine() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
  }
  int rank() const override { return rank_; }

  Memory prepare(const Order& order, const Sizes& sizes) override {
    op_ = order.op;
    in_ = static_cast<int>(sizes.in);
    out_ = static_cast<int>(sizes.out);
    return memory_.get(order, sizes);
  }

  void run(int i) override {
    void* const in = memory_.in(i);
    void* const out = memory_.out(i);
    const MPI_Comm all = MPI_COMM_WORLD;
    switch (op_) {
      case Op::all_reduce: MPI_Allreduce(MPI_IN_PLACE, in, in_, MPI_FLOAT, MPI_SUM, all); break;
      case Op::reduce_scatter: MPI_Reduce_scatter_block(in, out, out_, MPI_FLOAT, MPI_SUM, all); break;
      case Op::all_gather: MPI_Allgather(in, in_, MPI_FLOAT, out, in_, MPI_FLOAT, all); break;
      case Op::broadcast: MPI_Bcast(in, in_, MPI_FLOAT, i % ranks_, all); break;
      case Op::all_to_all:
        MPI_Alltoall(in, in_ / ranks_, MPI_FLOAT, out, out_ / ranks_, MPI_FLOAT, all);
        break;
      case Op::barrier: MPI_Barrier(all); break;
    }
  }

  void release() override { memory_.release(); }

 private:
  int rank_ = 0, ranks_ = 1;
  Op op_ = Op::barrier;
  int in_ = 0, out_ = 0;
  PlainMemory memory_;
};

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) {
  using namespace lockstep::bench;
  if (argc != 2) {
    std::fputs("this program is internal: bench_collectives starts it\n", stderr);
    return 2;
  }
  MPI_Init(&argc, &argv);
  Page* page = open_page(argv[1], false);
  try {
    MpiEngine engine;
    serve(*page, engine);
  } catch (const std::exception& error) {
    report_failure(*page, error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
