// Puts all ranks' profiles on one clock and writes the outputs made from them.
#pragma once

#include <filesystem>
#include <vector>

#include <lockstep/profile/record/rank_profile.h>
#include <lockstep/profile/report/summary.h>

namespace lockstep::profile {

// Shifts each rank's origin to rank 0's clock. Ranks on one kernel share a clock. Between hosts, the offset
// is measured with their common collectives: one cannot end on any rank before it has begun on all ranks,
// which bounds the offset on both sides; the middle is used.
void align_clocks(std::vector<RankProfile>& profiles);

// Bounds of the offset between two hosts' clocks, and the number of collectives used.
struct ClockBounds {
  std::int64_t least = 0, most = 0;
  std::size_t arrivals_of = 0;
};
ClockBounds clock_bounds(const std::vector<RankProfile>& profiles, const std::string& boot,
                         const std::string& reference);

// Writes a compressed trace for chrome://tracing and Perfetto.
void write_trace(const std::vector<RankProfile>& profiles, const std::filesystem::path& file);

// Writes DIR/report.html.
std::filesystem::path write_report(const Summary& summary, const std::vector<RankProfile>& profiles,
                                   const std::filesystem::path& directory);

// Summarises a directory of rank profiles. Uses its doctor.json if present: see add_doctor.
Summary summarize_folder(const std::filesystem::path& directory, std::vector<RankProfile>& profiles);

// Writes trace.json.gz, summary.json and report.html to a directory of rank profiles.
Summary put_together(const std::filesystem::path& directory);

}  // namespace lockstep::profile
