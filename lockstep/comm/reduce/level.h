// Which instructions the reductions use. Their bits do not depend on it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace lockstep::detail {

enum class SimdLevel : std::uint8_t { portable, avx2, avx512 };

std::string_view name(SimdLevel level);

// Whether this CPU, and this build, has it. Portable always is.
bool supported(SimdLevel level);

// What LOCKSTEP_SIMD asks for, else the widest that is supported. A ConfigError where it asks for what is
// unknown or not supported.
SimdLevel wanted_simd_level();

// What is used: wanted_simd_level(), asked once.
SimdLevel simd_level();

// For tests, which compare levels in one process; nullopt undoes it. The level must be supported.
void use_simd_level(std::optional<SimdLevel> level);

}  // namespace lockstep::detail
