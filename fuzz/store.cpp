// The key-value store under arbitrary requests from ranks.
//
// Input: frames. A frame of kind store is a request of its rank; any other kind means that the rank has
// disconnected.
#include <map>
#include <string>

#include <lockstep/control/coordinator/store.h>

#include "input.h"

namespace lockstep::fuzz {
namespace {

using namespace control;

void serve(FrameBuffer& frames) {
  StoreServer server;
  std::map<int, int> owed;  // Number of replies still due, by request.
  int request = 0;
  std::map<int, std::int32_t> askers;
  while (auto frame = frames.next()) {
    if (frame->kind != Kind::store) {
      server.forget(frame->rank);
      for (const auto& [number, rank] : askers)
        if (rank == frame->rank) owed[number] = 0;
      continue;
    }
    auto asked = StoreRequest::decode(frame->payload);
    const int number = request++;
    const bool forgets = asked.call == StoreCall::forget;
    const bool waits = asked.call == StoreCall::get || asked.call == StoreCall::wait;
    if (forgets)  // A request that the rank made earlier.
      for (const auto& [earlier, rank] : askers)
        if (rank == frame->rank && earlier == asked.number) owed[earlier] = 0;
    owed[number] = forgets ? 0 : 1;
    askers[number] = frame->rank;
    server.handle(
        frame->rank, std::move(asked),
        [&owed, number](StoreReply reply) {
          require(owed[number]-- == 1, "a rank that is still connected gets one reply per request");
          require(StoreReply::decode(reply.encode()).values == reply.values, "a reply survives a round trip");
        },
        number);
    require(waits || owed[number] == 0, "only get and wait may block");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FrameBuffer frames;
  frames.append({reinterpret_cast<const char*>(data), size});
  try {
    serve(frames);
  } catch (const FrameError&) {
  }
  return 0;
}

}  // namespace lockstep::fuzz
