// The rows of `lockstep doctor`. Each function checks one aspect of the machine. None of them throws: a
// failure to find something out is a finding too.
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
  std::string hint = {};                                             // What to do about it.
  nlohmann::ordered_json values = nlohmann::ordered_json::object();  // The finding in parts, for --json.
};
using Rows = std::vector<Row>;

// Programs and devices for starting ranks.
struct Installed {
  std::filesystem::path program;              // This program.
  std::filesystem::path probe;                // lockstep-probe; empty if it is missing or does not start.
  std::map<std::string, std::string> mpirun;  // By flavour, if there is also a module for it.
  int gpus = 0;                               // Usable by NCCL.
  // True if there is a GPU, and a transport for ranks that share it.
  bool cuda_ipc = false;
};

// ranks: the value of -n, or 0.
Rows host_rows(int ranks);
Rows limit_rows(int ranks);
Rows network_rows();
Rows software_rows(Installed& installed);
// per_host: the number of ranks on each host of the planned job. Empty: SLURM's, else `ranks` on this host.
Rows sum_rows(int ranks, std::vector<int> per_host);

// The transports that `lockstep doctor -n` can benchmark, as --backend names them, with ranks of
// lockstep-probe.
const std::vector<std::string>& transport_names();
Row memory_copy_row();
// One row, or two for mpi if both flavours are installed. A missing transport gets a row only if it was asked
// for by name.
Rows transport_rows(const std::string& transport, int ranks, bool asked_for, const Installed& installed);

std::string first_line_of(const std::filesystem::path&);  // Empty if the file cannot be read.

}  // namespace lockstep::cli
