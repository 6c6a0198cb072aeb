// Contents of a checkpoint besides its tensors, stored as JSON text in the file's metadata. Does not use
// LibTorch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/checkpoint/value.h>

namespace lockstep::detail {

struct OptimizerManifest {
  struct Group {
    std::map<std::string, std::vector<double>> options;  // "lr": one number, "betas": two; true: 1
    std::vector<std::string> parameters;
    bool operator==(const Group&) const = default;
  };
  std::string kind;  // "Adam"
  std::vector<Group> groups;
  std::map<std::string, std::map<std::string, std::int64_t>> counts;  // counts such as "step", by parameter
  bool operator==(const OptimizerManifest&) const = default;
};

struct Manifest {
  static constexpr std::int64_t kVersion = 1;

  std::int64_t ranks = 1;
  std::optional<OptimizerManifest> optimizer;
  // By part ("sampler", "scheduler"): one state per rank, or one for all.
  std::map<std::string, std::vector<CheckpointValues>> states;
  CheckpointValues values;
  bool operator==(const Manifest&) const = default;

  std::string encode() const;                     // throws FormatError for strings that are not UTF-8
  static Manifest decode(std::string_view text);  // throws FormatError for malformed text

  // The state of one part, for sending it to another rank.
  static std::string encode_state(const CheckpointValues& state);
  static CheckpointValues decode_state(std::string_view text);
};

}  // namespace lockstep::detail
