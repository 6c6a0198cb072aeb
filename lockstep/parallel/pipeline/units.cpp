// Cuts a model at its Units.
#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/error.h>
#include <lockstep/modules/unit.h>
#include <lockstep/parallel/pipeline_stage.h>

namespace lockstep {
namespace {

struct Found {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
};

bool is_in(const std::string& name, const std::string& outer) { return name.starts_with(outer + "."); }

std::vector<Found> find_units(torch::nn::Module& model, const std::vector<std::string>& names) {
  const auto modules = model.named_modules("", /*include_self=*/false);
  std::vector<Found> found;
  for (const auto& pattern : names) {
    const auto before = found.size();
    for (const auto& item : modules) {
      if (!detail::name_matches(pattern, item.key())) continue;
      if (!detail::slot_of(item.value().get()))
        throw ConfigError(
            fmt::format("'{}' is not a Unit, so it cannot be a pipeline piece: declare it as "
                        "lockstep::Unit<...>",
                        item.key()));
      for (const auto& other : found)
        if (other.name == item.key() || is_in(other.name, item.key()) || is_in(item.key(), other.name))
          throw ConfigError(fmt::format("'{}' and '{}' cannot both be pipeline pieces, because they overlap",
                                        other.name, item.key()));
      found.push_back({item.key(), item.value()});
    }
    if (found.size() == before)
      throw ConfigError(fmt::format("'{}' matches no module of the model; available modules: {}", pattern,
                                    fmt::join(modules.keys(), ", ")));
  }
  return found;
}

}  // namespace

std::vector<PipelineStage> stages_at(torch::nn::Module& model, const std::vector<std::string>& names) {
  const auto found = find_units(model, names);
  // A shared tensor may also be registered outside.
  std::set<const void*> inside;
  for (const auto& each : found)
    for (const auto& parameter : each.module->parameters()) inside.insert(parameter.unsafeGetTensorImpl());
  for (const auto& item : model.named_parameters())
    if (!inside.contains(item.value().unsafeGetTensorImpl()))
      throw ConfigError(
          fmt::format("weight '{}' is outside the pieces {}: the pieces must hold all weights of the model",
                      item.key(), fmt::join(names, ", ")));
  std::vector<PipelineStage> pieces;
  for (const auto& each : found)
    pieces.emplace_back(
        each.module,
        [module = each.module](const StageValues& values) {
          if (values.size() != 1) detail::refuse_stage_values("one tensor", values.size(), 1);
          return StageValues{detail::slot_of(module.get())->call(values[0])};
        },
        each.name);
  return pieces;
}

}  // namespace lockstep
