// Saves and resumes a run: model, optimizer, schedulers and random number generators, in one file.
//
//   lockstep::save("run.safetensors", {.model = net, .optimizer = optimizer, .sampler = sampler, .rng = true,
//                                      .values = {{"epoch", epoch}}, .group = world.group()});
//   ...
//   if (std::filesystem::exists("run.safetensors")) {
//     auto loaded = lockstep::load("run.safetensors", {.model = net, .optimizer = optimizer,
//                                                      .sampler = sampler, .rng = true,
//                                                      .group = world.group()});
//     epoch = loaded.integer("epoch");
//   }
//
// The file is safetensors with JSON metadata. It contains no code, and Python's safetensors can open it. The
// model's tensors keep their names; the optimizer's are named optimizer/PARAMETER/exp_avg. Writing is atomic:
// rank 0 writes a temporary file next to the target and renames it, so a failure leaves the previous file
// intact. A run saved with all its parts resumes bit-exactly.
//
// Do not save or load while another thread trains the model. All errors are ConfigErrors that name the file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/checkpoint/parts.h>
#include <lockstep/checkpoint/value.h>
#include <lockstep/comm/group.h>

namespace lockstep {

struct SaveOptions {
  ModelPart model = {};
  OptimizerPart optimizer = {};  // Adam, AdamW, SGD, RMSprop, Adagrad: Lockstep's and LibTorch's
  StatePart scheduler = {};
  StatePart scaler = {};
  StatePart sampler = {};
  bool rng = false;              // the default generators: the CPU's, and those of the model's devices
  CheckpointValues values = {};  // any other values: {"epoch", 3}, {"best", 0.97}, {"note", "..."}
  // The ranks that save together. Every one must call save; rank 0 writes. Each rank has its own sampler and
  // generators.
  std::optional<Group> group = {};
};

struct LoadOptions {
  ModelPart model = {};
  OptimizerPart optimizer = {};
  StatePart scheduler = {};
  StatePart scaler = {};
  StatePart sampler = {};
  bool rng = false;
  // false: tensors and parts missing from the file are left unchanged, and extra ones in the file are
  // ignored.
  bool strict = true;
  std::optional<Group> group = {};
};

struct Loaded {
  CheckpointValues values;
  std::int64_t ranks = 1;                        // number of ranks that saved it
  bool rng = false;                              // true if this rank's generators were restored
  std::vector<std::string> missing, unexpected;  // with strict = false: names

  // Throw ConfigError if there is no such value, or if it has another type.
  std::int64_t integer(const std::string& name) const;
  double number(const std::string& name) const;
  std::string text(const std::string& name) const;
};

void save(const std::string& path, const SaveOptions& options, Site site = Site::current());

// All or nothing: reads and checks the whole file, compares names, shapes and dtypes, and only then changes
// anything. With a group, this happens on all ranks or on none; each rank reads the file itself. Parts that
// are not requested are ignored, so a model can be loaded alone, including from a safetensors file written by
// another program.
//
// On another number of ranks, each rank takes the parts saved by the rank of the same number, unless a part
// is the same for all. A rank without a counterpart keeps its own generators.
Loaded load(const std::string& path, const LoadOptions& options, Site site = Site::current());

}  // namespace lockstep
