// Checks the installed software: LibTorch, CUDA, NCCL, MPI, SLURM.
#include <unistd.h>

#include <fstream>
#include <sstream>

#include <fmt/format.h>
#include <lockstep/base/environment.h>
#include <lockstep/os/host.h>
#include <lockstep/version.h>

#include "doctor_child.h"
#include "doctor_rows.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using namespace std::chrono_literals;

// Finds a file in lib/lockstep of the build tree or of the installation.
fs::path beside(const fs::path& program, const std::string& file) {
  const auto prefix = program.parent_path().parent_path();
  for (const auto& library : {prefix / LOCKSTEP_LIBDIR, prefix / "lib"})
    if (std::error_code none; fs::exists(library / "lockstep" / file, none))
      return library / "lockstep" / file;
  return {};
}

std::string text_in(const Json& json, const char* key) {
  return json.contains(key) && json[key].is_string() ? json[key].get<std::string>() : "";
}

Row libtorch(Installed& installed, Json& described) {
  Row row{"LibTorch", {}};
  const auto probe = beside(installed.program, "lockstep-probe");
  if (probe.empty()) {
    row.verdict = Verdict::bad;
    row.finding = fmt::format("unknown: lockstep-probe, which queries it, is not in {}",
                              (installed.program.parent_path().parent_path() / "lib/lockstep").string());
    row.hint = "build or install all of Lockstep: ./dev build, cmake --install build";
    return row;
  }
  const auto outcome = run_child({probe.string(), "--describe"}, 60s);
  described = Json::parse(outcome.output.substr(std::min(outcome.output.find('{'), outcome.output.size())),
                          nullptr, false);
  if (outcome.status != 0 || !described.is_object()) {
    described = Json::object();
    row.verdict = Verdict::bad;
    row.finding = outcome.late ? "lockstep-probe, which queries it, did not answer within 60 s"
                               : "lockstep-probe, which queries it, failed: " + outcome.complaint();
    row.hint = "ldd " + probe.string() + " shows which libraries are missing";
    return row;
  }
  installed.probe = probe;
  row.values = described;
  const auto cuda = text_in(described, "cuda"), lockstep = text_in(described, "lockstep");
  row.finding = fmt::format("{} for {}, {}, {} threads, in {}", text_in(described, "version"),
                            cuda.empty() ? "the CPU" : "CUDA " + cuda, text_in(described, "capability"),
                            described.value("threads", 0), text_in(described, "path"));
  if (lockstep != kVersion) {
    row.verdict = Verdict::bad;
    row.finding += fmt::format("; built for lockstep {}, but this program is {}", lockstep, kVersion);
    row.hint = "two installations are mixed: reinstall Lockstep";
  }
  return row;
}

Row cuda(const Json& described) {
  Row row{"CUDA", {}};
  const auto version = text_in(described, "cuda"), driver = text_in(described, "driver");
  const auto gpus = described.value("gpus", Json::array());
  const int usable = described.value("usable_gpus", 0);
  row.values = {{"gpus", gpus}, {"driver", driver}, {"usable_gpus", usable}};
  std::map<std::string, int> models;
  for (const auto& gpu : gpus)
    ++models[fmt::format("{} of {}", text_in(gpu, "name"),
                         host::bytes_text(gpu.value("bytes", std::uint64_t{0})))];
  for (const auto& [model, count] : models) row.finding += fmt::format("{} x {}, ", count, model);
  row.finding += driver.empty() ? "no GPU driver" : fmt::format("driver for CUDA {}", driver);
  if (version.empty()) {
    if (gpus.empty()) return row;
    row.verdict = Verdict::note;
    row.finding += "; this LibTorch is CPU-only and cannot use them";
    row.hint = "build with a LibTorch that has CUDA: LOCKSTEP_TORCH=DIR ./dev build";
  } else if (gpus.empty()) {
    row.verdict = Verdict::note;
    row.finding += "; LibTorch has CUDA but finds no GPU";
    row.hint = driver.empty() ? "install the GPU's driver, or run on the CPU"
                              : "check nvidia-smi -L, CUDA_VISIBLE_DEVICES and the container's options";
  } else if (usable < static_cast<int>(gpus.size())) {
    row.verdict = Verdict::bad;
    row.finding += fmt::format("; LibTorch for CUDA {} can use {} of them", version, usable);
    row.hint = "the driver must be as new as LibTorch's CUDA";
  }
  return row;
}

Row nccl(const Json& described, Installed& installed) {
  Row row{"NCCL", {}};
  const auto version = text_in(described, "nccl");
  const int usable = described.value("usable_gpus", 0);
  const bool transport = described.value("nccl_transport", false);
  row.values = {{"version", version}, {"transport", transport}};
  if (text_in(described, "cuda").empty()) {
    row.finding = "absent: this LibTorch is CPU-only";
  } else {
    row.finding = version.empty() ? "unknown version, inside LibTorch" : version;
    if (usable > 0 && !transport) {
      row.verdict = Verdict::note;
      row.finding += "; Lockstep was built without the NCCL transport";
      row.hint = "install the CUDA and NCCL headers and rebuild Lockstep";
    }
  }
  installed.gpus = transport ? usable : 0;
  installed.cuda_ipc = described.value("cuda_ipc_transport", false);
  return row;
}

// "openmpi" or "mpich", from the output of --version; empty if it is neither.
std::string flavour_of(const std::string& version) {
  return version.find("Open MPI") != std::string::npos || version.find("OpenRTE") != std::string::npos
             ? "openmpi"
         : version.find("HYDRA") != std::string::npos ? "mpich"
                                                      : "";
}

// The version number from a line such as "mpirun (Open MPI) 4.1.4" or "Version: 4.0.2".
std::string version_in(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto digit = line.find_first_of("0123456789");
    if (digit == std::string::npos) continue;
    return line.substr(digit, line.find_first_of(" \t", digit) - digit);
  }
  return {};
}

Row mpi(const std::string& flavour, const char* name, Installed& installed) {
  Row row{name, {}};
  const auto module = beside(installed.program, "liblockstep_mpi_" + flavour + ".so");
  std::string mpirun, version;
  // Debian's names first: there mpirun may be either of them.
  for (const auto& each : {"mpirun." + flavour, std::string("mpirun"), std::string("mpiexec")}) {
    const auto path = find_in_path(each);
    if (path.empty() || !mpirun.empty()) continue;
    const auto outcome = run_child({path, "--version"}, 10s);
    if (flavour_of(outcome.output) == flavour) mpirun = path, version = version_in(outcome.output);
  }
  row.values = {{"module", module.string()}, {"mpirun", mpirun}, {"version", version}};
  const auto launcher = mpirun.empty() ? "no mpirun in PATH" : fmt::format("{} {}", mpirun, version);
  row.finding = fmt::format("{}, {}", launcher, module.empty() ? "no module in Lockstep" : "module found");
  if (mpirun.empty() && module.empty()) row.finding = "absent";
  if (!mpirun.empty() && !module.empty()) installed.mpirun[flavour] = mpirun;
  if (!mpirun.empty() && module.empty()) {
    row.verdict = Verdict::note;
    row.hint =
        fmt::format("for the backend mpi, install its development files (lib{}-dev) and rebuild", flavour);
  } else if (mpirun.empty() && !module.empty()) {
    row.verdict = Verdict::note;
    row.hint = fmt::format("for the backend mpi, install its programs ({})",
                           flavour == "openmpi" ? "openmpi-bin" : "mpich");
  }
  return row;
}

Row slurm() {
  Row row{"SLURM", {}};
  const auto srun = find_in_path("srun"), job = env::text("SLURM_JOB_ID").value_or("");
  row.values = {{"srun", srun}, {"job", job}};
  if (srun.empty()) {
    row.finding = "absent";
  } else {
    const auto outcome = run_child({srun, "--version"}, 10s);
    if (outcome.status == 0) {
      row.finding = fmt::format("{} ({})", srun, outcome.output.substr(0, outcome.output.find('\n')));
    } else {
      row.verdict = Verdict::note;
      row.finding = fmt::format("{} does not work: {}", srun,
                                outcome.late ? "no answer within 10 s" : outcome.complaint());
      row.hint = "if you intend to use it, check slurm.conf or SLURM_CONF";
    }
  }
  if (!job.empty())
    row.finding +=
        fmt::format("; inside job {}: {} tasks on {}", job, env::text("SLURM_NTASKS").value_or("?"),
                    env::text("SLURM_JOB_NODELIST").value_or("unknown hosts"));
  else if (row.verdict == Verdict::ok && !srun.empty())
    row.finding += ", outside an allocation";
  return row;
}

}  // namespace

Rows software_rows(Installed& installed) {
  Json described = Json::object();
  Rows rows = {libtorch(installed, described)};
  if (!described.empty()) {
    rows.push_back(cuda(described));
    rows.push_back(nccl(described, installed));
  }
  rows.push_back(mpi("openmpi", "Open MPI", installed));
  rows.push_back(mpi("mpich", "MPICH", installed));
  rows.push_back(slurm());
  return rows;
}

}  // namespace lockstep::cli
