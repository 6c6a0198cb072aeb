#include <lockstep/comm/reduce/level.h>

#include <atomic>
#include <string>

#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lockstep::detail {
namespace {

constexpr SimdLevel kLevels[] = {SimdLevel::avx512, SimdLevel::avx2, SimdLevel::portable};  // best first
constexpr int kNotForced = -1;
std::atomic<int> forced{kNotForced};

#if defined(__x86_64__)
// Only newer compilers support f16c in __builtin_cpu_supports.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

}  // namespace

std::string_view name(SimdLevel level) {
  switch (level) {
    case SimdLevel::avx512: return "avx512";
    case SimdLevel::avx2: return "avx2";
    case SimdLevel::portable: break;
  }
  return "portable";
}

// __builtin_cpu_supports also checks that the kernel saves the wide registers.
bool supported(SimdLevel level) {
#if defined(__x86_64__)
  switch (level) {
    case SimdLevel::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case SimdLevel::avx2: return __builtin_cpu_supports("avx2") && has_f16c();
    case SimdLevel::portable: break;
  }
#endif
  return level == SimdLevel::portable;
}

SimdLevel wanted_simd_level() {
  const auto asked = env::text("LOCKSTEP_SIMD");
  std::string allowed;
  for (auto level : kLevels) {
    if (!supported(level)) continue;
    if (!asked || *asked == name(level)) return level;
    allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", name(level));
  }
  throw ConfigError(fmt::format("invalid LOCKSTEP_SIMD='{}': this CPU supports {}", *asked, allowed));
}

SimdLevel simd_level() {
  static const SimdLevel chosen = wanted_simd_level();
  const int level = forced.load(std::memory_order_relaxed);
  return level == kNotForced ? chosen : static_cast<SimdLevel>(level);
}

void use_simd_level(std::optional<SimdLevel> level) {
  LOCKSTEP_ASSERT(!level || supported(*level), "this CPU does not support the level");
  forced = level ? static_cast<int>(*level) : kNotForced;
}

}  // namespace lockstep::detail
