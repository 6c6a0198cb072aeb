// Secure channel between agents of several hosts, over a connection from an untrusted peer.
//
// Both sides prove the job's key; then every message is encrypted and authenticated, in order:
//
//   caller                                            listener
//   hello: "lockstp1", 32 random bytes (a)     ->
//                                              <-     challenge: "lockstp1", 32 random bytes (b)
//   24 bytes (h), mac("caller", a, b, c, h)    ->                                      c: hash of the context
//                                              <-     24 bytes (h'), mac("listener", a, b, c, h')
//   length, sealed message                    <->     length, sealed message
//
// mac is BLAKE2b with the job's key. The keys of the two directions are derived the same way with other
// purposes, so nothing can be replayed in another connection, in the other direction or under another
// context. h and h' start the two streams (libsodium's secretstream: XChaCha20-Poly1305, with a counter). The
// caller proves first: to a stranger the listener reveals only 40 bytes that mean nothing.
//
// Has no sockets, so that it can be tested and fuzzed.
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
  static constexpr std::size_t kMostBeforeProof = 64;  // Length of the longest message before the proof.

  // context: whatever both sides must agree on besides the key (job, attempt, version). Any length.
  SecureLink(Side side, std::string_view key, std::string_view context);
  SecureLink(SecureLink&&) noexcept;
  SecureLink& operator=(SecureLink&&) noexcept;
  ~SecureLink();

  // Throws FrameError, for example "it did not prove the key", for data that no correct peer sends. After
  // that nothing more is sent, and every further call throws: the connection must be closed.
  void receive(std::span<const char> bytes);
  // Bytes for the peer; the caller must keep what it could not write.
  std::string take_output();

  bool proven() const;  // By both sides.
  void send(std::string_view message);
  std::optional<std::string> next();  // A complete message.

 private:
  struct Secrets;
  enum class Stage { hello, challenge, caller_proof, listener_proof, open, failed };  // The awaited message.

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
