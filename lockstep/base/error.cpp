#include <lockstep/base/error.h>

#include <array>

#include <fmt/format.h>

namespace lockstep {
namespace {

std::string text_of(const CommError::Details& d) {
  std::string text =
      fmt::format("{} #{} on group '{}' failed on rank {} of {} after {:.3f} s: {}", d.operation, d.sequence,
                  d.group, d.rank, d.size, d.elapsed.count(), d.cause);
  if (d.peer) text += fmt::format(" (peer: rank {})", *d.peer);
  if (!d.tensor.empty()) text += "\n  tensor: " + d.tensor;
  if (!d.tag.empty()) text += "\n  tag: " + d.tag;
  if (!d.call_site.empty()) text += "\n  called at " + d.call_site;
  return text;
}

}  // namespace

std::string_view name(CommError::Kind kind) {
  constexpr std::array names = {"deadline", "peer_died", "mismatch", "engine", "device", "stopped"};
  return names.at(static_cast<std::size_t>(kind));
}

CommError::CommError(Details details) : Error(text_of(details)), details_(std::move(details)) {}

namespace detail {

void assertion_failed(const char* condition, const char* file, int line, std::string_view text) {
  throw Error(fmt::format("internal error: {} ({} is false at {}:{}); this is a bug in lockstep", text,
                          condition, file, line));
}

ConfigError bad_value(std::string_view what, std::string_view expected, std::string_view value) {
  return ConfigError(fmt::format("{}: expected {}, got '{}'", what, expected, value));
}

}  // namespace detail
}  // namespace lockstep
