// Errors thrown by the library. All of them derive from Error; the type says who can fix the problem:
//
//   try { group.all_reduce(t).wait(); }
//   catch (const lockstep::CommError& e) { std::cerr << e.what(); save(); throw; }
//
// ConfigError: the caller can fix it. The text states what was expected and what was given.
// CommError:   a peer, the network or a deadline failed. kind() says which; details() has the text's parts.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace lockstep {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class ConfigError : public Error {
 public:
  using Error::Error;
};

class CommError : public Error {
 public:
  // Why the operation failed. New kinds may be added; existing ones keep their meaning.
  enum class Kind : std::uint8_t {
    deadline,   // The operation did not complete within its deadline.
    peer_died,  // A rank it depends on exited, threw, left the group, gave up, or was on a lost host.
    mismatch,   // The ranks made different calls, or wait for each other in several groups.
    engine,     // Any other error of the transport or of this process.
    device,     // A GPU or its driver reported an error.
    stopped,    // The program ended it (World::fail, leaving the World), or the launcher is gone.
  };

  // Ranks are group ranks, as the caller numbers them.
  struct Details {
    std::string cause;      // What happened: one sentence without a full stop.
    std::string operation;  // "all_reduce"
    std::string group;      // "world"
    int rank = 0;
    int size = 1;
    std::optional<int> peer;     // The rank that failed, or that this rank was waiting for, if known.
    std::uint64_t sequence = 0;  // Counts the group's collectives, or its sends and receives.
    std::string tensor;          // "float32 [10, 4]"
    std::string tag;
    std::string call_site;  // "train.cpp:42"
    std::chrono::duration<double> elapsed{0};
    Kind kind = Kind::engine;
  };

  explicit CommError(Details details);
  Kind kind() const noexcept { return details_.kind; }
  const Details& details() const noexcept { return details_; }

 private:
  Details details_;
};

std::string_view name(CommError::Kind kind);

namespace detail {

// Base of exceptions thrown inside engines that know which kind of CommError they become.
class Kinded {
 public:
  explicit Kinded(CommError::Kind kind) : kind_(kind) {}
  virtual ~Kinded() = default;
  CommError::Kind kind() const noexcept { return kind_; }

 private:
  CommError::Kind kind_;
};

// An engine's error with a known kind.
class KindedError : public Error, public Kinded {
 public:
  KindedError(CommError::Kind kind, const std::string& text) : Error(text), Kinded(kind) {}
};

[[noreturn]] void assertion_failed(const char* condition, const char* file, int line, std::string_view text);

// The error for a bad option, variable or argument: "<what>: expected <expected>, got '<value>'".
ConfigError bad_value(std::string_view what, std::string_view expected, std::string_view value);
}  // namespace detail

}  // namespace lockstep

// Checks an invariant of the library itself. Throws Error; never ends the process.
#define LOCKSTEP_ASSERT(condition, text)                                            \
  do {                                                                              \
    if (!(condition)) [[unlikely]]                                                  \
      ::lockstep::detail::assertion_failed(#condition, __FILE__, __LINE__, (text)); \
  } while (false)
