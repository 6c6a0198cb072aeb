// A caller, a listener and an attacker between them that may delay, change, truncate and inject bytes.
//
// Input: whether the keys match, then two-byte commands, some followed by bytes. Whatever the attacker does,
// the messages that one side accepts must be a prefix of those that the other side sent.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <string>

#include <sodium.h>

#include <lockstep/control/link/secure_link.h>

#include "input.h"

namespace lockstep::fuzz {
namespace {

using namespace control;

// Random bytes depend on the input only, so that findings can be reproduced.
std::uint64_t random_state = 0;

std::uint32_t next_random() {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<std::uint32_t>(random_state >> 32);
}

void fill_random(void* const bytes, const std::size_t size) {
  auto* out = static_cast<unsigned char*>(bytes);
  std::generate_n(out, size, [] { return static_cast<unsigned char>(next_random()); });
}

randombytes_implementation repeatable{.implementation_name = [] { return "repeatable"; },
                                      .random = next_random,
                                      .stir = nullptr,
                                      .uniform = nullptr,
                                      .buf = fill_random,
                                      .close = nullptr};

struct End {
  SecureLink link;
  std::string wire;              // Bytes sent and not yet delivered.
  std::deque<std::string> sent;  // Messages that the other side may still accept, in order.
  bool failed = false;
};

void deliver(End& from, End& to, std::size_t most) {
  const auto piece = from.wire.substr(0, most);
  from.wire.erase(0, piece.size());
  if (to.failed) return;
  try {
    to.link.receive(piece);
  } catch (const FrameError&) {
    to.failed = true;
    require(to.link.take_output().empty(), "a side that failed sends nothing more");
  }
  to.wire += to.link.take_output();
  while (const auto message = to.link.next()) {
    require(!to.failed && !from.sent.empty() && *message == from.sent.front(),
            "only messages that were sent are accepted");
    from.sent.pop_front();
  }
}

void send(End& from, std::string_view message) {
  if (from.failed || !from.link.proven()) return;
  from.link.send(message);
  from.sent.emplace_back(message);
  from.wire += from.link.take_output();
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  ::randombytes_set_implementation(&repeatable);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  random_state = 1;
  Input input(data, size);
  const bool fits = input.byte() % 4 != 3;
  const std::string key(32, 'k'), other(32, 'x');
  End caller{{SecureLink::Side::caller, key, "job"}, {}, {}};
  End listener{{SecureLink::Side::listener, fits ? key : other, "job"}, {}, {}};
  caller.wire = caller.link.take_output();
  std::string heard;  // Recorded by the attacker, to be replayed.
  while (!input.empty()) {
    const auto order = input.byte();
    const std::size_t number = input.byte();
    End& from = order & 1 ? listener : caller;
    End& to = order & 1 ? caller : listener;
    switch (order / 2 % 8) {
      case 0: deliver(from, to, number); break;
      case 1: deliver(from, to, 256 * number); break;
      case 2: send(from, input.bytes(number)); break;
      case 3: from.wire.insert(0, input.bytes(number)); break;
      case 4:
        if (number / 8 < from.wire.size())
          from.wire[number / 8] = static_cast<char>(from.wire[number / 8] ^ (1 << number % 8));
        break;
      case 5: from.wire.erase(0, number); break;
      case 6: heard = from.wire.substr(0, number); break;
      case 7: from.wire.insert(0, heard); break;
    }
    require(fits || (!caller.link.proven() && !listener.link.proven()),
            "no side authenticates without the key");
  }
  return 0;
}

}  // namespace lockstep::fuzz
