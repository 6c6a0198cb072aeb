// lockstep trace merge, summary, html: merges the ranks' profiles.
#include <filesystem>
#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/profile/report/merge.h>
#include <nlohmann/json.hpp>

#include "verbs.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

struct Request {
  std::string directory;
  bool json = false;
};

}  // namespace

int show_profile(const std::string& directory) {
  const auto summary = profile::put_together(directory);
  std::cout << '\n'
            << profile::text_of(summary)
            << fmt::format(
                   "\nopen {0}/report.html in a browser, {0}/trace.json.gz in chrome://tracing or Perfetto\n",
                   fs::path(directory).string());
  return 0;
}

void add_trace_profile(CLI::App& trace, Action& action) {
  auto request = std::make_shared<Request>();
  const auto add = [&](const char* name, const char* text, auto what) {
    auto* verb = trace.add_subcommand(name, text);
    verb->add_option("DIR", request->directory, "Directory with the ranks' profiles: rank-0.json, ...")
        ->required();
    verb->callback([&action, request, what] { action = [request, what] { return what(*request); }; });
    return verb;
  };
  add("merge", "Merge the ranks' profiles into trace.json.gz, summary.json and report.html",
      [](const Request& r) {
        profile::put_together(r.directory);
        std::cout << fmt::format("{0}/trace.json.gz, {0}/summary.json, {0}/report.html\n", r.directory);
        return 0;
      });
  auto* summary =
      add("summary", "Show where the time of the steps went, with suggestions", [](const Request& r) {
        std::vector<profile::RankProfile> profiles;
        const auto found = profile::summarize_folder(r.directory, profiles);
        std::cout << (r.json ? profile::json_of(found).dump(1) + "\n" : profile::text_of(found));
        return 0;
      });
  summary->add_flag("--json", request->json, "Print JSON");
  add("html", "Write only report.html", [](const Request& r) {
    std::vector<profile::RankProfile> profiles;
    const auto found = profile::summarize_folder(r.directory, profiles);
    const auto file = profile::write_report(found, profiles, r.directory);
    std::cout << file.string() << '\n';
    return 0;
  });
}

}  // namespace lockstep::cli
