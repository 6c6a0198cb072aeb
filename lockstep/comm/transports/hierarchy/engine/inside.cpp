#include <lockstep/comm/transports/hierarchy/engine/inside.h>

#include <cstring>

#include <lockstep/comm/reduce/reduce.h>

namespace lockstep::hierarchy {
namespace {

void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

std::vector<std::int64_t> table(std::span<const std::size_t> sizes) { return {sizes.begin(), sizes.end()}; }

}  // namespace

Inside::Inside(std::unique_ptr<shm::Engine> engine, int place, int ranks)
    : engine_(std::move(engine)), place_(place), ranks_(ranks) {}

Call& Inside::start(Operation operation, Dtype dtype, std::size_t item_size) {
  part_.inputs.clear();
  part_.outputs.clear();
  part_.item_size = item_size;
  part_.call = {};
  part_.call.operation = operation;
  part_.call.dtype = dtype;
  part_.call.rank = place_;
  part_.call.size = ranks_;
  return part_.call;
}

void Inside::run(Clock::time_point deadline) {
  engine_->begin(part_);
  engine_->finish(part_, deadline);
}

void Inside::all_gather(const void* own, std::vector<void*> from_each, std::span<const std::size_t> sizes,
                        Clock::time_point deadline) {
  if (alone()) return copy(from_each[0], own, sizes[0]);
  auto& call = start(Operation::all_gather, Dtype::uint8, 1);
  call.from = table(sizes);
  call.count = call.from[static_cast<std::size_t>(place_)];
  part_.inputs = {own};
  part_.outputs = std::move(from_each);
  run(deadline);
}

void Inside::broadcast(int root, void* data, std::size_t bytes, Clock::time_point deadline) {
  if (alone()) return;
  auto& call = start(Operation::broadcast, Dtype::uint8, 1);
  call.root = root;
  call.count = static_cast<std::int64_t>(bytes);
  part_.outputs = {data};
  run(deadline);
}

void Inside::gather(int root, const void* own, std::size_t bytes, std::vector<void*> from_each,
                    std::span<const std::size_t> sizes, Clock::time_point deadline) {
  if (alone()) return copy(from_each[0], own, bytes);
  auto& call = start(Operation::gather, Dtype::uint8, 1);
  call.root = root;
  call.count = static_cast<std::int64_t>(bytes);
  if (root == place_) call.from = table(sizes);
  part_.inputs = {own};
  part_.outputs = std::move(from_each);
  run(deadline);
}

void Inside::scatter(int root, std::vector<const void*> to_each, std::span<const std::size_t> sizes,
                     void* own, std::size_t bytes, Clock::time_point deadline) {
  if (alone()) return copy(own, to_each[0], bytes);
  auto& call = start(Operation::scatter, Dtype::uint8, 1);
  call.root = root;
  call.count = static_cast<std::int64_t>(bytes);
  if (root == place_) call.to = table(sizes);
  part_.inputs = std::move(to_each);
  part_.outputs = {own};
  run(deadline);
}

void Inside::all_to_all(std::vector<const void*> to_each, std::span<const std::size_t> to,
                        std::vector<void*> from_each, std::span<const std::size_t> from,
                        Clock::time_point deadline) {
  if (alone()) return copy(from_each[0], to_each[0], to[0]);
  auto& call = start(Operation::all_to_all, Dtype::uint8, 1);
  call.to = table(to);
  call.from = table(from);
  part_.inputs = std::move(to_each);
  part_.outputs = std::move(from_each);
  run(deadline);
}

void Inside::reduce_scatter(Dtype dtype, ReduceOp op, std::vector<const void*> to_each,
                            std::span<const std::size_t> counts, void* own, Clock::time_point deadline) {
  const auto item = detail::item_size(dtype);
  if (alone()) return copy(own, to_each[0], counts[0] * item);
  auto& call = start(Operation::reduce_scatter, dtype, item);
  call.reduction = op;
  call.to = table(counts);
  call.count = call.to[static_cast<std::size_t>(place_)];
  part_.inputs = std::move(to_each);
  part_.outputs = {own};
  run(deadline);
}

}  // namespace lockstep::hierarchy
