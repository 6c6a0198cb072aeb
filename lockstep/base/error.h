// Errors of the library. Every error is an Error; what kind says who can mend it:
//
//   try { group.all_reduce(t).wait(); }
//   catch (const lockstep::CommError& e) { std::cerr << e.what(); save(); throw; }
//
// ConfigError: the caller can fix it; the text says what was given and what is allowed.
// CommError:   a peer, the network or a deadline; details() has the parts of the text.
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
  };

  explicit CommError(Details details);
  const Details& details() const noexcept { return details_; }

 private:
  Details details_;
};

namespace detail {
[[noreturn]] void assertion_failed(const char* condition, const char* file, int line, std::string_view text);
}  // namespace detail

}  // namespace lockstep

// A broken invariant of the library itself: throws Error, never ends the process.
#define LOCKSTEP_ASSERT(condition, text)                                            \
  do {                                                                              \
    if (!(condition)) [[unlikely]]                                                  \
      ::lockstep::detail::assertion_failed(#condition, __FILE__, __LINE__, (text)); \
  } while (false)
