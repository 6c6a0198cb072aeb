// Builds the HTML page: a template whose script draws the JSON embedded in it.
#include <algorithm>
#include <fstream>
#include <map>
#include <span>
#include <sstream>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/os/file.h>
#include <lockstep/profile/report/merge.h>
#include <lockstep/profile/report/report_page.h>
#include <lockstep/profile/report/summary.h>
#include <lockstep/schedule/schedule.h>
#include <nlohmann/json.hpp>

namespace lockstep::profile {

namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostEvents = 200'000;   // of all ranks, in the page
constexpr std::size_t kMostTransfers = 5'000;  // in the bandwidth chart
constexpr std::size_t kMostSamples = 1'000;    // of one rank's memory

// Distance between elements to keep so that no more than `most` remain.
template <typename T>
std::size_t stride(const std::vector<T>& all, std::size_t most) {
  return std::max<std::size_t>(1, (all.size() + most - 1) / most);
}

class Timeline {
 public:
  explicit Timeline(const std::vector<RankProfile>& profiles) : profiles_(profiles) {
    zero_ = profiles.front().origin;
    for (const auto& profile : profiles) zero_ = std::min(zero_, profile.origin);
  }

  Json json() {
    // If there are more events than a page can hold, omit those too short to be visible first.
    std::vector<std::int64_t> lengths;
    for (const auto& profile : profiles_) {
      for (const auto& event : profile.events) lengths.push_back(event.end - event.begin);
      for (const auto& event : profile.device) lengths.push_back(event.end - event.begin);
    }
    std::int64_t least = 0;
    if (lengths.size() > kMostEvents) {
      const auto place = lengths.end() - static_cast<std::ptrdiff_t>(kMostEvents);
      std::nth_element(lengths.begin(), place, lengths.end());
      least = *place;
    }
    auto ranks = Json::array();
    for (const auto& profile : profiles_) ranks.push_back(rank(profile, least));
    return {{"kinds",
             {"operator", "communication", "wait", "data", "optimizer", "pipeline", "bucket", "range", "step",
              "kernel", "copy"}},
            {"names", names_},
            {"left_out_shorter_than_us", static_cast<double>(least) / 1e3},
            {"ranks", std::move(ranks)}};
  }

 private:
  static constexpr int kTransfer = 1, kStep = 8, kKernel = 9, kCopy = 10;
  static constexpr int kDevice = 100'000;  // thread number of a device's first stream

  int name(const std::string& text) {
    const auto [place, is_new] = numbers_.try_emplace(text, static_cast<int>(names_.size()));
    if (is_new) names_.push_back(text);
    return place->second;
  }

  Json rank(const RankProfile& profile, std::int64_t least) {
    auto events = Json::array();
    const auto add = [&](int kind, int name, int thread, int depth, std::int64_t begin, std::int64_t end,
                         std::int64_t bytes) {
      events.push_back({kind, name, thread, depth,
                        static_cast<double>((profile.origin - zero_ + begin) / 10) / 100,
                        static_cast<double>((end - begin) / 10) / 100, bytes});
    };
    for (const auto& step : profile.steps)
      add(kStep, name(fmt::format("step {}", step.step)), -2, 0, step.begin, step.end, 0);
    for (const auto& t : profile.transfers) {
      const auto& tag = profile.names[static_cast<std::size_t>(t.tag)];
      add(kTransfer,
          name(tag.empty() ? std::string(lockstep::name(t.operation))
                           : fmt::format("{} ({})", lockstep::name(t.operation), tag)),
          -1, 0, t.begin, t.end, t.bytes);
    }
    for (const auto& event : profile.events)
      if (event.end > event.begin && event.end - event.begin >= least)
        add(static_cast<int>(event.kind), name(profile.names[static_cast<std::size_t>(event.name)]),
            event.thread == profile.main_thread ? 0 : event.thread + 1, event.depth, event.begin, event.end,
            event.bytes);
    for (const auto& event : profile.device) {
      if (event.end - event.begin < least) continue;
      const auto& text = profile.names[static_cast<std::size_t>(event.name)];
      const int kind = event.kind != DeviceKind::kernel ? kCopy
                       : is_communication(text)         ? kTransfer
                                                        : kKernel;
      add(kind, name(text), kDevice + event.row, 0, event.begin, event.end, 0);
    }
    auto streams = Json::object();
    for (std::size_t i = 0; i < profile.device_rows.size(); ++i)
      streams[std::to_string(kDevice + i)] =
          fmt::format("GPU {} stream {}", profile.device_rows[i].device, profile.device_rows[i].stream);
    return {{"rank", profile.rank}, {"events", std::move(events)}, {"streams", std::move(streams)}};
  }

  const std::vector<RankProfile>& profiles_;
  std::int64_t zero_ = 0;
  std::map<std::string, int> numbers_;
  std::vector<std::string> names_;
};

// Shows the last batch of rank 0's pipeline as measured, and as simulated with the measured times.
class PipelinePicture {
 public:
  explicit PipelinePicture(const std::vector<RankProfile>& profiles) : profiles_(profiles) {}

  Json json() const {
    const auto note = [&](const char* what) {
      const auto found = profiles_.front().notes.find(what);
      return found == profiles_.front().notes.end() ? std::string() : found->second;
    };
    if (note("pipeline").empty()) return nullptr;
    PipelineSchedule schedule;
    try {
      schedule = schedule_from_csv(note("pipeline"), note("pipeline.name"));
    } catch (const ConfigError&) {
      return nullptr;
    }
    std::vector<int> ranks;
    std::istringstream list(note("pipeline.ranks"));
    for (int rank = 0; list >> rank;) ranks.push_back(rank);
    if (static_cast<int>(ranks.size()) != schedule.num_ranks()) return nullptr;

    auto planned = Json::array(), measured = Json::array();
    std::map<std::string, std::vector<double>> times;
    double zero = 0;
    for (std::size_t place = 0; place < ranks.size(); ++place) {
      auto actions = last_batch(ranks[place], schedule.ranks[place].size());
      if (actions.empty()) return nullptr;
      for (const auto& [name, begin, end] : actions) times[kind_of(name)].push_back(end - begin);
      if (place == 0) zero = std::get<1>(actions.front());
      auto row = Json::array();
      for (const auto& [name, begin, end] : actions)
        if (!is_transfer(name)) row.push_back({name, begin - zero, end - zero});
      measured.push_back({{"rank", ranks[place]}, {"actions", std::move(row)}});
    }
    SimulatedSchedule simulated;
    try {
      simulated = simulate_schedule(schedule, times_of(times));
    } catch (const Error&) {  // the file's schedule is invalid
      return nullptr;
    }
    for (std::size_t place = 0; place < ranks.size(); ++place) {
      auto row = Json::array();
      for (std::size_t i = 0; i < schedule.ranks[place].size(); ++i)
        if (const auto name = to_string(schedule.ranks[place][i]); !is_transfer(name))
          row.push_back({name, simulated.begins[place][i], simulated.ends[place][i]});
      planned.push_back({{"rank", ranks[place]}, {"actions", std::move(row)}});
    }
    return {{"schedule", schedule.name}, {"planned", planned}, {"measured", measured}};
  }

 private:
  using Action = std::tuple<std::string, double, double>;  // name, begin and end in ms on the common clock

  static std::string kind_of(const std::string& name) {
    const auto letter = name.find_first_not_of("0123456789");
    if (letter == std::string::npos) return {};
    const auto end = name.find_first_of("0123456789", letter);
    return name.substr(letter, end - letter);
  }
  static bool is_transfer(const std::string& name) {
    return name.find("SEND") != std::string::npos || name.find("RECV") != std::string::npos;
  }

  std::vector<Action> last_batch(int rank, std::size_t count) const {
    const auto profile =
        std::find_if(profiles_.begin(), profiles_.end(), [&](const auto& each) { return each.rank == rank; });
    std::vector<Action> actions;
    if (profile == profiles_.end() || profile->steps.empty()) return actions;
    const auto end = profile->steps.back().end;
    for (const auto& event : profile->events)
      if (event.kind == SpanKind::pipeline && event.end <= end)
        actions.emplace_back(profile->names[static_cast<std::size_t>(event.name)],
                             static_cast<double>(profile->origin + event.begin) / 1e6,
                             static_cast<double>(profile->origin + event.end) / 1e6);
    std::sort(actions.begin(), actions.end(),
              [](const auto& a, const auto& b) { return std::get<1>(a) < std::get<1>(b); });
    if (actions.size() < count) return {};
    actions.erase(actions.begin(), actions.end() - static_cast<std::ptrdiff_t>(count));
    return actions;
  }

  static ActionTimes times_of(const std::map<std::string, std::vector<double>>& times) {
    const auto median = [&](const char* kind) {
      const auto found = times.find(kind);
      if (found == times.end()) return 0.0;
      auto sorted = found->second;
      std::sort(sorted.begin(), sorted.end());
      return sorted[sorted.size() / 2];
    };
    const double whole = median("B");
    ActionTimes result{median("F"), median("I"), median("W"), 0};
    if (whole > 0 && result.input_backward == 0) result.input_backward = result.weight_backward = whole / 2;
    return result;
  }

  const std::vector<RankProfile>& profiles_;
};

}  // namespace

Json report_of(const Summary& summary, const std::vector<RankProfile>& profiles) {
  auto report = json_of(summary);
  report["format"] = "lockstep.report/1";
  auto operations = Json::array();
  for (const auto& profile : profiles) {
    const auto every = stride(profile.transfers, kMostTransfers / profiles.size() + 1);
    for (std::size_t i = 0; i < profile.transfers.size(); i += every) {
      const auto& t = profile.transfers[i];
      operations.push_back({name(t.operation), t.bytes, static_cast<double>(t.end - t.begin) / 1e6});
    }
  }
  report["operations"] = std::move(operations);
  auto zero = profiles.front().origin;
  for (const auto& profile : profiles) zero = std::min(zero, profile.origin);
  auto memory = Json::array();
  for (const auto& profile : profiles) {
    if (profile.memory.empty()) continue;
    auto samples = Json::array();
    const auto every = stride(profile.memory, kMostSamples);
    for (std::size_t i = 0; i < profile.memory.size(); i += every)
      samples.push_back({static_cast<double>(profile.origin - zero + profile.memory[i].time) / 1e6,
                         profile.memory[i].bytes});
    memory.push_back({{"rank", profile.rank}, {"samples", std::move(samples)}});
  }
  report["memory"] = std::move(memory);
  if (auto pipeline = PipelinePicture(profiles).json(); !pipeline.is_null())
    report["pipeline"] = std::move(pipeline);
  report["timeline"] = Timeline(profiles).json();
  return report;
}

namespace {

void write_file(const std::filesystem::path& path, std::string_view text) {
  detail::PartialFile file(path.string());
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

std::string dump(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

// Escapes '<', because "</script>" would end the surrounding script element.
std::string in_page(const Json& value) {
  std::string escaped;
  for (const char c : dump(value, -1)) {
    if (c == '<')
      escaped += "\\u003c";
    else
      escaped += c;
  }
  return escaped;
}

}  // namespace

std::string page_of(const Json& report) {
  constexpr std::string_view kPlace = "@LOCKSTEP_REPORT_DATA@";
  std::string page(kReportPage);
  const auto place = page.find(kPlace);
  if (place == std::string::npos) throw Error("the report template has no placeholder for its data");
  return page.replace(place, kPlace.size(), in_page(report));
}

std::filesystem::path write_report(const Summary& summary, const std::vector<RankProfile>& profiles,
                                   const std::filesystem::path& directory) {
  const auto path = directory / "report.html";
  write_file(path, page_of(report_of(summary, profiles)));
  return path;
}

Summary summarize_folder(const std::filesystem::path& directory, std::vector<RankProfile>& profiles) {
  profiles = read_all(directory);
  align_clocks(profiles);
  auto summary = summarize(profiles);
  add_doctor(summary, directory / "doctor.json");
  return summary;
}

Summary put_together(const std::filesystem::path& directory) {
  std::vector<RankProfile> profiles;
  auto summary = summarize_folder(directory, profiles);
  write_trace(profiles, directory / "trace.json.gz");
  write_file(directory / "summary.json", dump(json_of(summary), 1) + "\n");
  write_report(summary, profiles, directory);
  return summary;
}

}  // namespace lockstep::profile
