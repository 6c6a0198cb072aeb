// Writes the backends of this job's groups and the bits of their sums to DIR/rank-R.
// tests/faults/order_of_sums.py compares them with those of other layouts.
//
//   order_probe DIR
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <limits>
#include <random>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <lockstep/lockstep.h>
#include "cmake/multicall.h"

namespace lockstep::testing::order_probe {

namespace {

using lockstep::ReduceOp;

// Numbers of very different magnitudes, so that the order of a sum shows, with an occasional NaN or infinity.
at::Tensor numbers(int rank, std::int64_t count, at::ScalarType type, int salt) {
  std::mt19937_64 random(static_cast<std::uint64_t>(1000 * rank + salt));
  auto tensor = at::empty({count}, at::kDouble);
  auto* data = tensor.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < count; ++i) {
    data[i] = std::ldexp(static_cast<double>(random() % 2'000'001) - 1'000'000,
                         static_cast<int>(random() % 24) - 30);
    switch (random() % 97) {
      case 0: data[i] = std::numeric_limits<double>::infinity(); break;
      case 1: data[i] = -std::numeric_limits<double>::infinity(); break;
      case 2: data[i] = std::nan(""); break;
      case 3: data[i] = -std::nan(""); break;
      default: break;
    }
  }
  if (at::isFloatingType(type)) return tensor.to(type);
  return at::remainder(at::nan_to_num(tensor), 100).to(type);
}

class Results {
 public:
  explicit Results(const std::string& path) : file_(path, std::ios::binary) {}
  void add(const std::string& title, const at::Tensor& tensor) {
    const auto bytes = static_cast<std::uint64_t>(tensor.nbytes());
    file_ << title << '\n' << bytes << '\n';
    file_.write(static_cast<const char*>(tensor.const_data_ptr()), static_cast<std::streamsize>(bytes));
  }

 private:
  std::ofstream file_;
};

}  // namespace

MULTICALL_MAIN(order_probe) {
  if (argc != 2) return 2;
  auto world = lockstep::World::from_environment();
  auto group = world.group();
  const int rank = group.rank(), size = group.size();
  auto neighbours = group.split(rank - world.local_rank(), 0, {.name = "neighbours"});
  auto across = group.split(world.local_rank(), 0, {.name = "across"});
  std::cout << fmt::format("rank {}: world {}, neighbours {}, across {}\n", rank, group.backend(),
                           neighbours.backend(), across.backend())
            << std::flush;

  Results results(fmt::format("{}/rank-{}", argv[1], rank));
  int salt = 0;
  for (auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt, at::kShort, at::kByte})
    for (auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MIN, ReduceOp::MAX, ReduceOp::PRODUCT}) {
      if (op == ReduceOp::AVG && !at::isFloatingType(type)) continue;
      for (std::int64_t count : {1, 300, 5003, 700'001}) {
        if (count > 100'000 && (op != ReduceOp::AVG || (type != at::kFloat && type != at::kBFloat16)))
          continue;
        const auto title = fmt::format("{} {} {}", at::toString(type), name(op), count);
        const auto input = numbers(rank, count, type, ++salt);
        for (bool allocated : {false, true}) {
          auto tensor = allocated ? group.allocate({count}, type) : at::empty({count}, type);
          tensor.copy_(input);
          group.all_reduce(tensor, {.op = op}).wait();
          results.add("all_reduce " + title, tensor);
        }
        auto tensor = input.clone();
        group.reduce(tensor, {.op = op, .root = size - 1}).wait();
        if (rank == size - 1) results.add("reduce " + title, tensor);
        if (count > 100'000) continue;
        auto part = at::empty({count}, type);
        group.reduce_scatter(part, numbers(rank, count * size, type, ++salt), {.op = op}).wait();
        results.add("reduce_scatter " + title, part);
      }
    }
  group.barrier().wait();
  return 0;
}

}  // namespace lockstep::testing::order_probe
