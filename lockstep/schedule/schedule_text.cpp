// The text form of schedules: one line per rank, as PyTorch writes them.
#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/schedule/schedule.h>

namespace lockstep {
namespace {

constexpr std::array<std::string_view, 8> kNames = {"F",      "B",      "I",      "W",
                                                    "SEND_F", "RECV_F", "SEND_B", "RECV_B"};

std::string_view name_of(PipelineOp op) { return kNames[static_cast<std::size_t>(op)]; }

std::string_view trimmed(std::string_view word) {
  constexpr std::string_view kSpace = " \t\r";
  word.remove_prefix(std::min(word.find_first_not_of(kSpace), word.size()));
  return word.substr(0, word.find_last_not_of(kSpace) + 1);
}

// Removes and returns the text up to the next separator.
std::string_view next_of(std::string_view& text, char separator) {
  const auto end = std::min(text.find(separator), text.size());
  const auto word = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return word;
}

std::optional<PipelineAction> read_action(std::string_view word) {
  PipelineAction action;
  const char* stop = word.data() + word.size();
  const auto stage = std::from_chars(word.data(), stop, action.stage);
  const std::string_view rest(stage.ptr, static_cast<std::size_t>(stop - stage.ptr));
  const auto letters = std::min(rest.find_first_of("0123456789-"), rest.size());
  const auto op = std::find(kNames.begin(), kNames.end(), rest.substr(0, letters));
  const auto number = std::from_chars(rest.data() + letters, stop, action.microbatch);
  if (stage.ec != std::errc() || op == kNames.end() || number.ec != std::errc() || number.ptr != stop ||
      action.stage < 0 || action.microbatch < 0)
    return std::nullopt;
  action.op = static_cast<PipelineOp>(op - kNames.begin());
  return action;
}

// Actions that PyTorch writes for sharded parameters; a pipeline ignores them.
bool is_about_parameters(std::string_view word) {
  word.remove_prefix(std::min(word.find_first_not_of("0123456789"), word.size()));
  return word == "UNSHARD" || word == "RESHARD" || word == "REDUCE_GRAD";
}

// Reads one action, such as "0F3", or two that PyTorch overlaps, such as "(0F7;7B3)OVERLAP_F_B", which run
// one after the other here. Returns nothing if the cell cannot be parsed.
std::optional<std::vector<PipelineAction>> read_cell(std::string_view word) {
  std::vector<PipelineAction> actions;
  if (word.empty() || is_about_parameters(word)) return actions;
  constexpr std::string_view kOverlap = ")OVERLAP_F_B";
  if (word.starts_with('(') && word.ends_with(kOverlap)) {
    word.remove_prefix(1);
    word.remove_suffix(kOverlap.size());
  }
  while (!word.empty()) {
    const auto action = read_action(trimmed(next_of(word, ';')));
    if (!action) return std::nullopt;
    actions.push_back(*action);
  }
  return actions;
}

}  // namespace

std::string to_string(PipelineAction action) {
  return fmt::format("{}{}{}", action.stage, name_of(action.op), action.microbatch);
}

std::string to_csv(const PipelineSchedule& schedule) {
  std::string text;
  for (const auto& actions : schedule.ranks) {
    for (const auto& action : actions) {
      if (&action != actions.data()) text += ',';
      text += to_string(action);
    }
    text += '\n';
  }
  return text;
}

PipelineSchedule schedule_from_csv(std::string_view text, std::string name) {
  PipelineSchedule schedule{.name = std::move(name), .microbatches = 0, .rank_of_stage = {}, .ranks = {}};
  std::map<int, int> rank_of;
  while (!text.empty()) {
    auto line = next_of(text, '\n');
    const int rank = schedule.num_ranks();
    auto& actions = schedule.ranks.emplace_back();
    for (int cell = 1; !line.empty(); ++cell) {
      const auto word = trimmed(next_of(line, ','));
      const auto found = read_cell(word);
      if (!found)
        throw ConfigError(fmt::format(
            "schedule '{}', line {}, cell {}: cannot parse '{}'; expected a stage, one of F, B, I, W, "
            "SEND_F, RECV_F, SEND_B, RECV_B, and a micro-batch, such as 0F3",
            schedule.name, rank + 1, cell, word));
      for (const auto& action : *found) {
        actions.push_back(action);
        const auto [place, is_new] = rank_of.emplace(action.stage, rank);
        if (!is_new && place->second != rank)
          throw ConfigError(
              fmt::format("schedule '{}', line {}, cell {} is '{}', but stage {} is also on line {}",
                          schedule.name, rank + 1, cell, word, action.stage, place->second + 1));
        schedule.microbatches = std::max(schedule.microbatches, action.microbatch + 1);
      }
    }
  }
  for (const auto& [stage, rank] : rank_of) {
    if (stage != schedule.num_stages())
      throw ConfigError(fmt::format("schedule '{}' has stage {} but no stage {}", schedule.name, stage,
                                    schedule.num_stages()));
    schedule.rank_of_stage.push_back(rank);
  }
  if (schedule.rank_of_stage.empty())
    throw ConfigError(fmt::format("schedule '{}' has no actions", schedule.name));
  return schedule;
}

}  // namespace lockstep
