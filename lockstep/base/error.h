// Errors of the library. Every error is an Error; what kind says who can mend it:
//
//   try { group.all_reduce(t).wait(); }
//   catch (const lockstep::CommError& e) { std::cerr << e.what(); save(); throw; }
//
// ConfigError: the caller can fix it; the text says what was given and what is allowed.
// CommError:   a peer, the network or a deadline; kind() says which, details() has the parts of the text.
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
  // Why the operation failed. Kinds may be added; none changes its meaning.
  enum class Kind : std::uint8_t {
    deadline,   // It was not complete within its deadline.
    peer_died,  // A rank that it needs ended, threw, left, gave it up, or is on a host that is lost.
    mismatch,   // The ranks' calls differ, or wait for one another in several groups.
    engine,     // Any other error of the transport or of this process.
    device,     // A GPU or its driver reported an error.
    stopped,    // The program ended it (World::fail, leaving the World), or the launcher has gone.
  };

  // Ranks are those of the group, as the caller numbers them.
  struct Details {
    std::string cause;      // what happened, one sentence without a full stop
    std::string operation;  // "all_reduce"
    std::string group;      // "world"
    int rank = 0;
    int size = 1;
    std::optional<int> peer;     // the rank that failed, or that we waited for, where known
    std::uint64_t sequence = 0;  // counts the collectives of the group, or its sends and receives
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

// Base of exceptions inside engines that know which kind of CommError they become.
class Kinded {
 public:
  explicit Kinded(CommError::Kind kind) : kind_(kind) {}
  virtual ~Kinded() = default;
  CommError::Kind kind() const noexcept { return kind_; }

 private:
  CommError::Kind kind_;
};

// An engine's error of that kind.
class KindedError : public Error, public Kinded {
 public:
  KindedError(CommError::Kind kind, const std::string& text) : Error(text), Kinded(kind) {}
};

[[noreturn]] void assertion_failed(const char* condition, const char* file, int line, std::string_view text);
}  // namespace detail

}  // namespace lockstep

// A broken invariant of the library itself: throws Error, never ends the process.
#define LOCKSTEP_ASSERT(condition, text)                                            \
  do {                                                                              \
    if (!(condition)) [[unlikely]]                                                  \
      ::lockstep::detail::assertion_failed(#condition, __FILE__, __LINE__, (text)); \
  } while (false)
