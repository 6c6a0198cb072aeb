#include <lockstep/comm/transports/cuda_ipc/engine/peers.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/transports/cuda_ipc/engine/fold.h>

namespace lockstep::cuda_ipc {
namespace {

struct Introduction {
  DeviceId device;
  Handle events[2 * Track::kEvents];
};
static_assert(std::is_trivially_copyable_v<Introduction>);

}  // namespace

void Exchange::start(Operation operation) {
  const auto bytes = operation == Operation::all_gather ? own_.size() : 0;
  part_ = {};
  part_.item_size = 1;
  part_.call.operation = operation;
  part_.call.dtype = Dtype::uint8;
  part_.call.rank = rank_;
  part_.call.size = ranks_;
  part_.call.count = part_.call.bytes = static_cast<std::int64_t>(bytes);
}

void Exchange::begin(std::vector<char> own) {
  own_ = std::move(own);
  all_.resize(own_.size() * static_cast<std::size_t>(ranks_));
  start(Operation::all_gather);
  part_.call.from.assign(static_cast<std::size_t>(ranks_), part_.call.count);
  part_.inputs = {own_.data()};
  for (int r = 0; r < ranks_; ++r)
    part_.outputs.push_back(all_.data() + own_.size() * static_cast<std::size_t>(r));
  host_.begin(part_);
}

void Exchange::finish(Clock::time_point deadline) { host_.finish(part_, deadline); }

void Exchange::meet(Clock::time_point deadline) {
  start(Operation::barrier);
  host_.begin(part_);
  host_.finish(part_, deadline);
}

Peers::Peers(shm::Engine& host, int its_rank, int its_ranks, int its_device, Clock::time_point deadline)
    : rank(its_rank),
      ranks(its_ranks),
      device(its_device),
      collectives(Track::take(its_device)),
      messages(Track::take(its_device)) {
  if (ranks > kernels::kMostFolded)
    throw ConfigError(fmt::format("backend 'cuda_ipc': expected a group of at most {} ranks, got {}",
                                  kernels::kMostFolded, ranks));
  const OnDevice here(device);
  Introduction own{.device = device_id(device), .events = {}};
  for (int i = 0; i < Track::kEvents; ++i) {
    own.events[i] = collectives->handle(i);
    own.events[Track::kEvents + i] = messages->handle(i);
  }
  std::vector<char> word(sizeof own);
  std::memcpy(word.data(), &own, sizeof own);
  Exchange exchange(host, rank, ranks);
  exchange.begin(std::move(word));
  exchange.finish(deadline);
  events_.resize(index(ranks));
  for (int r = 0; r < ranks; ++r) {
    Introduction other;
    std::memcpy(&other, exchange.of(r), sizeof other);
    one_device = one_device && other.device == own.device;
    if (r == rank) continue;
    if (!is_visible(other.device))
      throw ConfigError(
          fmt::format("backend 'cuda_ipc': rank {} uses {}, which rank {} of the group, on {}, does not see; "
                      "make all GPUs visible to all ranks of the host, or use cuda:nccl if each rank has its "
                      "own GPU",
                      r, text(other.device), rank, text(own.device)));
    for (const auto& handle : other.events) events_[index(r)].push_back(open_event(handle));
  }
  exchange.meet(deadline);  // no rank leaves before all have opened what it shared
}

bool Peers::finish(const shm::Barrier& barrier, Clock::time_point deadline, const std::atomic<bool>& stop) {
  // A rank that left in order has waited for its own device.
  auto is_broken = [&](int r) {
    return r != rank && barrier.lost(r) && barrier.region().line(r).presence != shm::Line::kLeft;
  };
  auto wait_is_over = [&] {
    if (stop || Clock::now() >= deadline) return true;
    for (int r = 0; r < ranks; ++r)
      if (is_broken(r)) return true;
    return false;
  };
  while (!collectives->is_idle() || !messages->is_idle()) {
    if (wait_is_over()) {
      collectives->lose();
      messages->lose();
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

}  // namespace lockstep::cuda_ipc
