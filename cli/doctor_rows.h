// What `lockstep doctor` finds, one row for each thing. Each function looks at one part of what a run here
// would meet, and none of them fails: what cannot be found out is a finding too.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace lockstep::cli {

enum class Verdict { ok, note, bad };

struct Row {
  std::string name;
  std::string finding;
  Verdict verdict = Verdict::ok;
  std::string hint = {};                                             // what can be done about it
  nlohmann::ordered_json values = nlohmann::ordered_json::object();  // the finding in parts, for --json
};
using Rows = std::vector<Row>;

// What there is to start ranks with.
struct Installed {
  std::filesystem::path program;              // this one
  std::filesystem::path probe;                // lockstep-probe; empty: not there, or it does not start
  std::map<std::string, std::string> mpirun;  // by flavour, where there is a module for it too
  int gpus = 0;                               // that NCCL could use
  bool cuda_ipc = false;                      // there is a GPU, and a transport for ranks that share it
};

// ranks: as many as -n says, 0 where it was not given.
Rows host_rows(int ranks);
Rows limit_rows(int ranks);
Rows network_rows();
Rows software_rows(Installed& installed);
// per_host: the ranks on each host of the job that is meant; none: what SLURM says, or `ranks` on this one.
Rows sum_rows(int ranks, std::vector<int> per_host);

// The transports of `lockstep doctor -n`, as --backend names them. Each is measured by ranks of
// lockstep-probe.
const std::vector<std::string>& transport_names();
Row memory_copy_row();
// One row; two for mpi where both flavours are there. Asked for by name, a transport that is not there is a
// row too.
Rows transport_rows(const std::string& transport, int ranks, bool asked_for, const Installed& installed);

std::string first_line_of(const std::filesystem::path&);  // empty where it cannot be read

}  // namespace lockstep::cli
