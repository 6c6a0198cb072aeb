// All ranks' profiles on one clock, and what is made of them.
#pragma once

#include <filesystem>
#include <vector>

#include <lockstep/profile/record/rank_profile.h>
#include <lockstep/profile/report/summary.h>

namespace lockstep::profile {

// Adds to each rank's origin what its host's clock is behind rank 0's. Ranks of one kernel have one clock.
// Between others it is measured by the collectives they have in common: nobody sees the end of one before
// everybody has begun it, which bounds the difference on both sides; the middle is taken.
void align_clocks(std::vector<RankProfile>& profiles);

// The difference that two hosts' clocks can have at most and at least, and how often they met.
struct ClockBounds {
  std::int64_t least = 0, most = 0;
  std::size_t arrivals_of = 0;
};
ClockBounds clock_bounds(const std::vector<RankProfile>& profiles, const std::string& boot,
                         const std::string& reference);

// In the form of chrome://tracing and Perfetto, compressed.
void write_trace(const std::vector<RankProfile>& profiles, const std::filesystem::path& file);

// DIR/report.html.
std::filesystem::path write_report(const Summary& summary, const std::vector<RankProfile>& profiles,
                                   const std::filesystem::path& directory);

// Of a folder with ranks' profiles. Where it has a doctor.json, with that: see add_doctor.
Summary summarize_folder(const std::filesystem::path& directory, std::vector<RankProfile>& profiles);

// Of a folder with ranks' profiles: writes trace.json.gz, summary.json and report.html there.
Summary put_together(const std::filesystem::path& directory);

}  // namespace lockstep::profile
