// SimdLevel: the instruction set that the reductions use. Results are bit-identical on all levels.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace lockstep::detail {

enum class SimdLevel : std::uint8_t { portable, avx2, avx512 };

std::string_view name(SimdLevel level);

// True if this CPU and this build support the level. Portable is always supported.
bool supported(SimdLevel level);

// The level in LOCKSTEP_SIMD, else the widest that is supported. Throws ConfigError if LOCKSTEP_SIMD is
// unknown or not supported.
SimdLevel wanted_simd_level();

// The level in use: wanted_simd_level(), evaluated once.
SimdLevel simd_level();

// For tests, which compare levels in one process. The level must be supported; nullopt restores the default.
void use_simd_level(std::optional<SimdLevel> level);

}  // namespace lockstep::detail
