// The dependency law: folder order is dependency order, and light folders stay light.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;

// A folder may include itself and those before it.
const std::vector<std::string> kOrder = {"base",  "memory",     "control", "launch", "kernels",
                                         "comm",  "mesh",       "data",    "nn",     "parallel",
                                         "train", "checkpoint", "profile", "plan"};

struct Include {
  fs::path file;
  std::string target;  // as written between the brackets
};

std::vector<Include> includes_of(const fs::path& folder, bool headers_only) {
  const std::regex pattern("^#include [<\"]([^>\"]+)[>\"]");
  std::vector<Include> found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const auto extension = entry.path().extension();
    const bool source = extension == ".cpp" || extension == ".cu" || extension == ".cuh";
    if (extension != ".h" && (headers_only || !source)) continue;
    std::ifstream in(entry.path());
    std::smatch match;
    for (std::string line; std::getline(in, line);)
      if (std::regex_search(line, match, pattern)) found.push_back({entry.path(), match[1]});
  }
  return found;
}

std::size_t place_of(const std::string& folder) {
  return static_cast<std::size_t>(std::find(kOrder.begin(), kOrder.end(), folder) - kOrder.begin());
}

TEST(Layout, every_folder_of_the_library_has_its_place) {
  for (const auto& entry : fs::directory_iterator(fs::path(LOCKSTEP_SOURCE) / "lockstep"))
    EXPECT_TRUE(!entry.is_directory() || place_of(entry.path().filename()) < kOrder.size()) << entry.path();
}

TEST(Layout, no_folder_includes_one_below_it) {
  const fs::path library = fs::path(LOCKSTEP_SOURCE) / "lockstep";
  int seen = 0;
  for (const auto& folder : kOrder) {
    if (!fs::exists(library / folder)) continue;
    for (const auto& [file, target] : includes_of(library / folder, false)) {
      if (!target.starts_with("lockstep/")) continue;
      const auto parts = fs::path(target);
      const auto into = std::next(parts.begin())->string();
      if (into == "version.h") continue;
      ++seen;
      EXPECT_LE(place_of(into), place_of(folder)) << file << " includes " << target;
    }
  }
  EXPECT_GT(seen, 50);  // the pattern still finds them
}

// A technique is a file and those named after it: ddp, ddp_hooks.
std::string technique_of(const fs::path& folder, const std::string& stem) {
  for (auto end = stem.find('_'); end != std::string::npos; end = stem.find('_', end + 1))
    if (fs::exists(folder / (stem.substr(0, end) + ".h"))) return stem.substr(0, end);
  return stem;
}

TEST(Layout, techniques_do_not_include_one_another) {
  const fs::path parallel = fs::path(LOCKSTEP_SOURCE) / "lockstep/parallel";
  int seen = 0;
  for (const auto& [file, target] : includes_of(parallel, false)) {
    if (!target.starts_with("lockstep/parallel/")) continue;
    ++seen;
    const auto other = fs::path(target).stem().string();
    // What they share: where a call can be intercepted, what is a model and how it is called, tensors inside
    // values, replicas made equal, many tensors in one piece of memory, gradients that must not be read.
    const bool shared = other == "unit" || other == "module_call" || other == "script_module" ||
                        other == "tensors_in" || other == "replicas" || other == "flat_views" ||
                        other == "held_group" || other == "unready_gradient";
    EXPECT_TRUE(shared || technique_of(parallel, other) == technique_of(parallel, file.stem()))
        << file << " includes " << target;
  }
  EXPECT_GT(seen, 10);
}

TEST(Layout, public_headers_of_the_light_folders_include_at_most_tensor_h) {
  const fs::path library = fs::path(LOCKSTEP_SOURCE) / "lockstep";
  for (const char* folder : {"base", "launch", "comm", "mesh"})
    for (const auto& [file, target] : includes_of(library / folder, true)) {
      const auto name = file.filename().string();
      const bool heavy =
          target.starts_with("torch/") || (target.starts_with("ATen/") && target != "ATen/core/Tensor.h");
      // Internal headers that name c10d's types are not installed; tests/install checks that.
      static const std::set<std::string> internal = {"transport.h",    "store.h",        "engine_work.h",
                                                     "part_backend.h", "device_watch.h", "first_meeting.h"};
      const bool module = file.string().find("/transports/") != std::string::npos;
      EXPECT_TRUE(!heavy || internal.contains(name) || module) << file << " includes " << target;
    }
}

TEST(Layout, base_and_launch_and_the_cores_need_no_libtorch) {
  const fs::path library = fs::path(LOCKSTEP_SOURCE) / "lockstep";
  for (const char* folder : {"base", "launch", "kernels"})
    for (const auto& [file, target] : includes_of(library / folder, false))
      EXPECT_FALSE(target.starts_with("torch/") || target.starts_with("ATen/") || target.starts_with("c10/"))
          << file << " includes " << target;
}

}  // namespace
}  // namespace lockstep::testing
