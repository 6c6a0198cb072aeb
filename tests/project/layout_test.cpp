// The layout rules in ARCHITECTURE.md: folder order is dependency order, plain folders use no LibTorch, techniques do
// not include one another, and the tests mirror the tree.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = LOCKSTEP_SOURCE;

std::string text_of(const fs::path& file) {
  std::ifstream in(file);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// A folder may include itself and those before it. lockstep/CMakeLists.txt has this order.
std::vector<std::string> folder_order() {
  const auto text = text_of(kRoot / "lockstep/CMakeLists.txt");
  std::smatch match;
  EXPECT_TRUE(std::regex_search(text, match, std::regex("foreach\\(folder ([^)]*)\\)")));
  std::istringstream words(match[1]);
  return {std::istream_iterator<std::string>(words), {}};
}

bool is_source(const fs::path& file) {
  static const std::set<std::string> extensions = {".h", ".cpp", ".cu", ".cuh"};
  return extensions.contains(file.extension());
}

// Targets of the #include directives of each source in lockstep/. Files are relative to the root: "lockstep/base/log.h".
const std::map<std::string, std::vector<std::string>>& includes() {
  static const auto found = [] {
    std::map<std::string, std::vector<std::string>> all;
    const std::regex pattern("^#include [<\"]([^>\"]+)[>\"]");
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / "lockstep")) {
      if (!is_source(entry.path())) continue;
      auto& targets = all[fs::relative(entry.path(), kRoot)];
      std::ifstream in(entry.path());
      std::smatch match;
      for (std::string line; std::getline(in, line);)
        if (std::regex_search(line, match, pattern)) targets.push_back(match[1]);
    }
    return all;
  }();
  return found;
}

std::string part_of(const fs::path& path, int index) { return std::next(path.begin(), index)->string(); }

// True if the file includes LibTorch, itself or through other headers of ours.
bool uses_libtorch(const std::string& file, std::string& how) {
  std::set<std::string> seen;
  std::function<bool(const std::string&)> visit = [&](const std::string& one) {
    if (!seen.insert(one).second || !includes().contains(one)) return false;
    return std::any_of(includes().at(one).begin(), includes().at(one).end(), [&](const std::string& target) {
      how = one + " includes " + target;
      return target.starts_with("torch/") || target.starts_with("ATen/") || target.starts_with("c10/") ||
             visit(target);
    });
  };
  return visit(file);
}

TEST(Layout, every_folder_of_the_library_has_its_place) {
  const auto order = folder_order();
  for (const auto& entry : fs::directory_iterator(kRoot / "lockstep"))
    EXPECT_TRUE(!entry.is_directory() || std::count(order.begin(), order.end(), entry.path().filename()) == 1)
        << entry.path();
}

TEST(Layout, no_folder_includes_one_after_it) {
  const auto order = folder_order();
  const auto place = [&](const std::string& folder) {
    return std::find(order.begin(), order.end(), folder) - order.begin();
  };
  int seen = 0;
  for (const auto& [file, targets] : includes()) {
    if (file == "lockstep/lockstep.h") continue;
    for (const auto& target : targets) {
      if (!target.starts_with("lockstep/") || target == "lockstep/version.h") continue;
      ++seen;
      EXPECT_LE(place(part_of(target, 1)), place(part_of(file, 1))) << file << " includes " << target;
    }
  }
  EXPECT_GT(seen, 500);  // Guards against a broken pattern.
}

TEST(Layout, no_folder_holds_more_than_thirty_files) {
  std::map<fs::path, int> files;
  for (const char* top : {"lockstep", "cli", "tests", "bench", "docs"})
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / top))
      if (entry.is_regular_file() && entry.path().string().find("__pycache__") == std::string::npos) {
        EXPECT_LE(++files[entry.path().parent_path()], 30) << entry.path().parent_path();
      }
}

// Folders that their CMakeLists.txt assign to lockstep_plain or lockstep_launcher.
TEST(Layout, plain_folders_use_no_libtorch) {
  int folders = 0;
  for (const auto& entry : fs::recursive_directory_iterator(kRoot / "lockstep")) {
    if (entry.path().filename() != "CMakeLists.txt") continue;
    const auto text = text_of(entry.path());
    const auto folder = fs::relative(entry.path().parent_path(), kRoot).string();
    if (text.find("lockstep_sources(plain)") == std::string::npos &&
        text.find("lockstep_sources(launcher)") == std::string::npos && folder != "lockstep/kernels" &&
        folder != "lockstep/comm/transports/cuda_ipc/engine")
      continue;
    ++folders;
    std::string how;
    for (const auto& [file, targets] : includes())
      if (fs::path(file).parent_path() == folder) {
        EXPECT_FALSE(uses_libtorch(file, how)) << file << ": " << how;
      }
  }
  EXPECT_GT(folders, 15);
}

// "lockstep/parallel/ddp/bucket.h" and "lockstep/parallel/ddp_hooks.h" belong to ddp.
std::string technique_of(const fs::path& file) {
  auto name = fs::path(part_of(file, 2)).stem().string();
  for (const char* technique : {"data_parallel", "ddp", "pipeline", "placed", "tensor"})
    if (name.starts_with(technique)) return technique;
  ADD_FAILURE() << file << " belongs to no technique";
  return name;
}

TEST(Layout, techniques_do_not_include_one_another) {
  int seen = 0;
  for (const auto& [file, targets] : includes()) {
    if (!file.starts_with("lockstep/parallel/")) continue;
    for (const auto& target : targets) {
      if (!target.starts_with("lockstep/parallel/")) continue;
      ++seen;
      EXPECT_EQ(technique_of(target), technique_of(file)) << file << " includes " << target;
    }
  }
  EXPECT_GT(seen, 10);
}

TEST(Layout, public_headers_of_the_light_folders_include_at_most_tensor_h) {
  for (const auto& [file, targets] : includes()) {
    const auto folder = fs::path(file).parent_path();
    if (!file.ends_with(".h") || (folder != "lockstep/comm" && folder != "lockstep/mesh")) continue;
    for (const auto& target : targets)
      EXPECT_FALSE(target.starts_with("torch/") ||
                   (target.starts_with("ATen/") && target != "ATen/core/Tensor.h"))
          << file << " includes " << target;
  }
}

TEST(Layout, the_tests_mirror_the_tree) {
  const std::set<std::string> others = {"bench",     "cli",    "docs",    "examples", "faults", "install",
                                        "launchers", "parity", "project", "python",   "support"};
  for (const auto& entry : fs::recursive_directory_iterator(kRoot / "tests")) {
    const auto path = fs::relative(entry.path(), kRoot / "tests").parent_path();
    if (is_source(entry.path()) && !path.empty() && !others.contains(part_of(path, 0))) {
      EXPECT_TRUE(fs::is_directory(kRoot / "lockstep" / path))
          << "tests/" << path.string() << " mirrors no folder of lockstep/";
    }
  }
}

// Python programs read their variables by other means.
TEST(Layout, every_variable_that_the_code_reads_is_documented) {
  std::string docs;
  for (const auto& entry : fs::recursive_directory_iterator(kRoot / "docs"))
    if (entry.path().extension() == ".md") docs += text_of(entry.path());
  const std::regex pattern("\"((LOCKSTEP|GLOO|MASTER|LOCAL)_[A-Z_]+)\"");
  std::set<std::string> seen;
  for (const char* folder : {"lockstep", "cli", "python"})
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) {
      if (!is_source(entry.path()) && entry.path().extension() != ".py") continue;
      const auto text = text_of(entry.path());
      for (std::sregex_iterator match(text.begin(), text.end(), pattern), end; match != end; ++match)
        if (seen.insert((*match)[1]).second) {
          EXPECT_TRUE(std::regex_search(docs, std::regex("\\b" + (*match)[1].str() + "\\b")))
              << entry.path() << ": " << (*match)[1];
        }
    }
  EXPECT_GT(seen.size(), 25u);
}

}  // namespace
}  // namespace lockstep::testing
