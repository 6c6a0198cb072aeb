// What agents of several hosts say to each other, over a connection that anybody may have opened.
//
// Both sides prove the job's key, then every message is encrypted and authenticated, in its order:
//
//   caller                                            listener
//   hello: "lockstp1", 32 random bytes (a)     ->
//                                              <-     challenge: "lockstp1", 32 random bytes (b)
//   24 bytes (h), mac("caller", a, b, c, h)    ->                                      c: hash of the context
//                                              <-     24 bytes (h'), mac("listener", a, b, c, h')
//   length, sealed message                    <->     length, sealed message
//
// mac is BLAKE2b with the job's key. The keys of the two directions are made the same way with other words,
// so none of it is of use in another connection, in the other direction, or under another context. h and h'
// begin the two streams (libsodium's secretstream: XChaCha20-Poly1305, with a counter). The caller proves
// first: to a stranger the listener says 40 bytes that mean nothing.
//
// Without sockets of its own, so that it can be tested and fuzzed.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <lockstep/control/wire/frame.h>

namespace lockstep::control {

class SecureLink {
 public:
  enum class Side { caller, listener };
  static constexpr std::size_t kMostMessage = kHeaderSize + kMostPayload;
  static constexpr std::size_t kMostBeforeProof = 64;  // bytes of the longest message before the proof

  // context: what both sides must agree on beside the key: job, attempt, version. Any length.
  SecureLink(Side side, std::string_view key, std::string_view context);
  SecureLink(SecureLink&&) noexcept;
  SecureLink& operator=(SecureLink&&) noexcept;
  ~SecureLink();

  // FrameError, as in "it did not prove the key", where no peer of ours would have sent this. Then nothing
  // more is said, and every further call is an error: the connection is to be closed.
  void receive(std::span<const char> bytes);
  // Bytes for the other side; what is not written must be kept by the caller.
  std::string take_output();

  bool proven() const;  // by both sides
  void send(std::string_view message);
  std::optional<std::string> next();  // a message that came whole

 private:
  struct Secrets;
  enum class Stage { hello, challenge, caller_proof, listener_proof, open, failed };  // what is awaited

  bool advance(std::string_view& input);
  void greet();
  void prove();
  void check_proof(std::string_view proof);
  [[noreturn]] void fail(const std::string& why);

  Side side_;
  Stage stage_;
  std::unique_ptr<Secrets> secrets_;
  std::string input_, output_;
  std::deque<std::string> messages_;
};

}  // namespace lockstep::control
