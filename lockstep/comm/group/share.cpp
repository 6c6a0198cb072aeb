// Group::share: one tensor in memory that all ranks of a host map.
#include <algorithm>
#include <sstream>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/group.h>
#include <lockstep/comm/group/group_state.h>
#include <lockstep/comm/job/world_state.h>
#include <lockstep/comm/transports/shm/engine/segment_server.h>

namespace lockstep {
namespace {

// A segment published for the other ranks to map.
struct Offer {
  std::uint64_t id = 0;
  ~Offer() {
    if (id != 0) shm::SegmentServer::instance().withdraw(id);
  }
};

}  // namespace

at::Tensor Group::share(at::IntArrayRef sizes, at::ScalarType dtype, Site site) {
  auto bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (auto size : sizes)
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes))
      throw ConfigError(
          fmt::format("Group::share: expected non-negative sizes whose bytes fit into 64 bits, got [{}]",
                      fmt::join(sizes, ", ")));
  if (size() == 1) return at::zeros(sizes, dtype);
  if (backend(at::kCPU) != "shm")
    throw ConfigError(fmt::format(
        "a tensor cannot be shared in group '{}': expected backend 'shm' for CPU tensors, got '{}'; 'shm' "
        "requires that all ranks are processes of one host",
        name(), backend(at::kCPU)));

  // All ranks or none: rank 0 publishes the segment, and the others report whether they could map it.
  const auto wanted = fmt::format("{} [{}]", c10::toString(dtype), fmt::join(sizes, ", "));
  std::shared_ptr<shm::Segment> segment;
  std::string word, failure;
  Offer offer;
  if (rank() == 0) {
    try {
      segment = shm::Segment::make(std::max<std::size_t>(static_cast<std::size_t>(bytes), 1));
      offer.id = shm::SegmentServer::instance().offer(segment);
      word = fmt::format("{} {} {}", shm::SegmentServer::instance().name(), offer.id, wanted);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }
  word = broadcast_value(std::string_view(word), {.tag = "share"}, site);
  if (rank() != 0 && !word.empty()) {
    try {
      std::istringstream in(word);
      std::string name, offered;
      std::uint64_t id = 0;
      std::getline(in >> name >> id >> std::ws, offered);
      if (offered != wanted)
        throw ConfigError(fmt::format("this rank asks for {}, rank 0 for {}", wanted, offered));
      segment = shm::Peer::reach(name)->segment(id, [&] {
        if (state_->world().failed()) throw Error("the job has failed");
      });
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }
  const auto failures = all_gather_values(std::string_view(failure), {.tag = "share"}, site);
  for (int r = 0; r < size(); ++r)
    if (const auto& text = failures[static_cast<std::size_t>(r)]; !text.empty())
      throw ConfigError(fmt::format("a tensor cannot be shared in group '{}': on rank {}: {}", name(),
                                    ranks()[static_cast<std::size_t>(r)], text));
  return at::from_blob(segment->data(), sizes, [segment](void*) {}, at::TensorOptions(dtype));
}

}  // namespace lockstep
