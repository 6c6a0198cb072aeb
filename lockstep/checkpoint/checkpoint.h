// Saves a run and goes on with it: model, optimizer, schedules, random numbers, in one file.
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
// The file is safetensors with JSON in its metadata: nothing in it is code, and Python's safetensors opens
// it. The model's tensors have their own names, the optimizer's are named optimizer/PARAMETER/exp_avg. It is
// there whole or not at all: rank 0 writes it beside its name and renames it; a failure leaves the earlier
// file. A run that was saved with all its parts goes on with the bits that it would have had without the
// interruption.
//
// Not while another thread trains the model. Every error is a ConfigError that names the file.
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
  OptimizerPart optimizer = {};  // Adam, AdamW, SGD, RMSprop, Adagrad: ours and LibTorch's
  StatePart scheduler = {};
  StatePart scaler = {};
  StatePart sampler = {};
  bool rng = false;  // the default generators: the CPU's, and those of the devices that the model is on
  CheckpointValues values = {};  // whatever else: {"epoch", 3}, {"best", 0.97}, {"note", "..."}
  // The ranks that save together: every one calls, rank 0 writes; sampler and generators are each rank's own.
  std::optional<Group> group = {};
};

struct LoadOptions {
  ModelPart model = {};
  OptimizerPart optimizer = {};
  StatePart scheduler = {};
  StatePart scaler = {};
  StatePart sampler = {};
  bool rng = false;
  // false: tensors and parts that the file lacks are left as they are, and what only the file has is passed
  // over.
  bool strict = true;
  std::optional<Group> group = {};
};

struct Loaded {
  CheckpointValues values;
  std::int64_t ranks = 1;                        // how many saved it
  bool rng = false;                              // whether this rank's generators are as they were
  std::vector<std::string> missing, unexpected;  // with strict = false: names

  // ConfigError where there is no such value, or one of another kind.
  std::int64_t integer(const std::string& name) const;
  double number(const std::string& name) const;
  std::string text(const std::string& name) const;
};

void save(const std::string& path, const SaveOptions& options, Site site = Site::current());

// All or nothing: the file is read and checked to its last byte, names, shapes and dtypes are compared, and
// only then is anything changed; with a group on all ranks or on none, each reading the file itself. Parts
// that are not asked for are passed over, so a model alone can be loaded, also from a safetensors file that
// another program wrote.
//
// On another number of ranks each takes what the rank of its number had, where a part is not the same for
// all; who has none keeps its own generators.
Loaded load(const std::string& path, const LoadOptions& options, Site site = Site::current());

}  // namespace lockstep
