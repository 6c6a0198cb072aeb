// Values that a checkpoint keeps besides tensors: integers, floating-point numbers and strings.
#pragma once

#include <concepts>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>

namespace lockstep {

struct CheckpointValue : std::variant<std::int64_t, double, std::string> {
  CheckpointValue() = default;
  template <std::integral T>
  CheckpointValue(T value) : variant(static_cast<std::int64_t>(value)) {}
  template <std::floating_point T>
  CheckpointValue(T value) : variant(static_cast<double>(value)) {}
  CheckpointValue(std::string value) : variant(std::move(value)) {}
  CheckpointValue(const char* value) : variant(std::string(value)) {}
};

using CheckpointValues = std::map<std::string, CheckpointValue>;

}  // namespace lockstep
