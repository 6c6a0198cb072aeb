#include <fstream>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/profile/report/summary.h>
#include <nlohmann/json.hpp>

namespace lockstep::profile {

void add_doctor(Summary& summary, const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (!stream) return;
  const auto text = nlohmann::json::parse(stream, nullptr, false);
  if (!text.is_object() || !text.contains("rows") || !text["rows"].is_array())
    throw ConfigError(fmt::format("{} is not the output of `lockstep doctor --json`", file.string()));
  for (const auto& row : text["rows"]) {
    if (!row.is_object() || !row.contains("values")) continue;
    const auto& values = row["values"];
    if (!values.is_object() || !values.contains("transport") || values["transport"] != summary.backend)
      continue;
    for (auto& each : summary.collectives) {
      if (each.operation != Operation::all_reduce) continue;
      // Compare with the nearest size that doctor measures.
      const char* key = each.bytes >= 5 << 20     ? "all_reduce_25MiB_GBps"
                        : each.bytes >= 256 << 10 ? "all_reduce_1MiB_GBps"
                                                  : nullptr;
      if (key != nullptr && values.contains(key) && values[key].is_number())
        each.doctor_gb_per_s = values[key].get<double>();
    }
  }
}

}  // namespace lockstep::profile
