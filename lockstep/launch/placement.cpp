#include <lockstep/base/text.h>
#include <lockstep/launch/placement.h>

#include <hwloc.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/os/host.h>

namespace lockstep::detail {
namespace {

struct Free {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
  void operator()(hwloc_bitmap_s* bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Topology = std::unique_ptr<hwloc_topology, Free>;
using Bitmap = std::unique_ptr<hwloc_bitmap_s, Free>;

Topology load(const std::string& description) {
  hwloc_topology_t made = nullptr;
  if (hwloc_topology_init(&made) != 0) throw Error("cannot initialise hwloc");
  Topology topology(made);
  if (!description.empty() && hwloc_topology_set_synthetic(made, description.c_str()) != 0)
    throw Error(fmt::format("hwloc cannot parse the topology '{}'", description));
  if (hwloc_topology_load(made) != 0) throw Error("hwloc cannot read this machine's topology");
  if (description.empty()) {
    // Only the processors this process may use.
    const Bitmap mine(hwloc_bitmap_alloc());
    if (hwloc_get_cpubind(made, mine.get(), HWLOC_CPUBIND_PROCESS) == 0)
      hwloc_topology_restrict(made, mine.get(), 0);
  }
  return topology;
}

CpuMask mask_of(const hwloc_bitmap_s* set) {
  CpuMask mask(static_cast<std::size_t>(hwloc_bitmap_nr_ulongs(set)));
  hwloc_bitmap_to_ulongs(set, static_cast<unsigned>(mask.size()), mask.data());
  return mask;
}

std::string list_of(const hwloc_bitmap_s* set) {
  char text[256];
  hwloc_bitmap_list_snprintf(text, sizeof text, set);
  return text;
}

// Parses the variable as OpenMP does: spaces are allowed, and the value may be a list whose first number
// applies to the outermost level.
int threads_from(const char* variable, const std::string& text) {
  constexpr const char* kSpaces = " \t\n";
  const auto begin = std::min(text.find_first_not_of(kSpaces), text.size());
  int threads = 0;
  const auto* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data() + begin, end, threads);
  stop = std::find_if(stop, end, [&](char c) { return std::strchr(kSpaces, c) == nullptr; });
  if (error != std::errc{} || (stop != end && *stop != ',') || threads < 1 || threads > kMostThreads)
    throw ConfigError(fmt::format("{}: expected an integer from 1 to {}, got '{}'; --threads overrides it",
                                  variable, kMostThreads, text));
  return threads;
}

// --threads, else the variables, in the order used by a program that runs without this launcher.
int threads_of(const LaunchOptions& options) {
  if (options.threads > 0) return options.threads;
  for (const char* variable : {"LOCKSTEP_THREADS", "OMP_NUM_THREADS"})
    if (const auto text = env::text(variable)) return threads_from(variable, *text);
  return std::max(1, host::available_cores() / options.num_ranks);
}

}  // namespace

Cores share_out_cores(int ranks, int threads, const std::string& description) {
  const Topology topology = load(description);
  const auto count = static_cast<std::size_t>(ranks);
  std::vector<Bitmap> sets;
  std::vector<hwloc_cpuset_t> raw(count);
  hwloc_obj_t machine = hwloc_get_root_obj(topology.get());
  if (hwloc_distrib(topology.get(), &machine, 1, raw.data(), static_cast<unsigned>(ranks), INT_MAX, 0) != 0)
    throw Error("hwloc cannot distribute the ranks");
  for (hwloc_cpuset_t set : raw) sets.emplace_back(set);
  // Where ranks do not divide evenly among packages, one of them may have too few processors: then assign
  // them in order.
  if (std::any_of(sets.begin(), sets.end(),
                  [&](const Bitmap& set) { return hwloc_bitmap_weight(set.get()) < threads; })) {
    hwloc_obj_t core = nullptr;
    for (const Bitmap& set : sets) {
      hwloc_bitmap_zero(set.get());
      for (int i = 0; i < threads; ++i) {
        core = hwloc_get_next_obj_by_type(topology.get(), HWLOC_OBJ_PU, core);
        if (core == nullptr) throw Error(fmt::format("expected at least {} x {} cores", ranks, threads));
        hwloc_bitmap_or(set.get(), set.get(), core->cpuset);
      }
    }
  }
  Cores cores;
  for (const Bitmap& set : sets) {
    cores.masks.push_back(mask_of(set.get()));
    cores.lists.push_back(list_of(set.get()));
  }
  return cores;
}

Placement place_ranks(const LaunchOptions& options) {
  Placement placement;
  const int cores = host::affinity_cores();
  const auto quota = host::cpu_quota();
  placement.threads = threads_of(options);
  const auto needed = static_cast<long>(options.num_ranks) * placement.threads;
  const std::string cores_text = counted(cores, "core");
  if (options.bind == Bind::cores && needed > cores)
    throw ConfigError(
        fmt::format("--bind cores: expected at least {} cores for {} ranks with {} threads each, got {}; "
                    "allow more cores, start fewer ranks or threads, or use --bind none",
                    needed, options.num_ranks, placement.threads, cores_text));
  if (options.bind == Bind::none) {
    placement.text = "not bound (--bind none)";
  } else if (options.bind == Bind::automatic && quota && *quota < cores) {
    placement.text = fmt::format("not bound (a quota of {:.3g} of {})", *quota, cores_text);
  } else if (needed > cores) {
    placement.text = fmt::format("not bound ({})", cores_text);
  } else {
    Cores shares = share_out_cores(options.num_ranks, placement.threads);
    placement.masks = std::move(shares.masks);
    constexpr std::size_t kMostShown = 8;
    const bool all = shares.lists.size() <= kMostShown;
    if (!all) shares.lists.resize(kMostShown);
    placement.text = fmt::format("bound to cores {}{}", fmt::join(shares.lists, " | "), all ? "" : " | ...");
  }
  return placement;
}

}  // namespace lockstep::detail
