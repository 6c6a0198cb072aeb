// The benchmarks of `lockstep doctor -n`: each transport with ranks of lockstep-probe, started like a user's.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "doctor_child.h"
#include "doctor_rows.h"

namespace lockstep::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

Json figures_in(const std::string& output) {
  const auto begin = output.find("{\"transport\":");
  if (begin == std::string::npos) return Json::object();
  return Json::parse(output.substr(begin, output.find('\n', begin) - begin), nullptr, false);
}

// Starts ranks of the probe with a launcher's command line; without one, the probe runs them as threads.
Row measured(const std::string& name, const std::string& transport, int ranks,
             std::vector<std::string> command, const Installed& installed) {
  for (const auto& word : {installed.probe.string(), std::string("--measure"), transport,
                           std::string("--ranks"), std::to_string(ranks)})
    command.push_back(word);
  // The measurement takes about 2 s; starting many ranks on few cores takes longer. The probe's own deadlines
  // are shorter, and its errors say more.
  const auto limit = std::chrono::seconds(40) + std::chrono::milliseconds(500) * ranks;
  const auto outcome = run_child(command, limit);
  Row row{"transport " + name, {}};
  row.values = figures_in(outcome.output);
  // An MPI run that was measured counts, even if it then ends badly.
  if (row.values.is_object() && row.values.contains("all_reduce_25MiB_GBps")) {
    row.finding = fmt::format(
        "barrier {:.1f} us; all_reduce of 4 B {:.1f} us, 4 KiB {:.1f} us, 1 MiB {:.2f} "
        "GB/s, 25 MiB {:.2f} GB/s",
        row.values["barrier_us"].get<double>(), row.values["all_reduce_4B_us"].get<double>(),
        row.values["all_reduce_4KiB_us"].get<double>(), row.values["all_reduce_1MiB_GBps"].get<double>(),
        row.values["all_reduce_25MiB_GBps"].get<double>());
    return row;
  }
  row.values = {{"transport", name}, {"ranks", ranks}, {"status", outcome.status}};
  row.verdict = Verdict::bad;
  row.finding = outcome.late ? fmt::format("{} ranks did not finish within {} s", ranks, limit.count() / 1000)
                             : "failed: " + outcome.complaint();
  row.hint = fmt::format("to reproduce: {}", fmt::join(command, " "));
  return row;
}

Row absent(const std::string& name, const std::string& finding) {
  return {"transport " + name, finding, Verdict::bad, "omit it from --backend, or see its row above"};
}

std::vector<std::string> mpi_launcher(const std::string& flavour, const std::string& mpirun, int ranks) {
  std::vector<std::string> words = {mpirun, "-n", std::to_string(ranks)};
  // Open MPI refuses root and more ranks than cores, and would bind each of two ranks to one core.
  if (flavour == "openmpi") {
    for (const char* option : {"--oversubscribe", "--bind-to", "none"}) words.emplace_back(option);
    if (::geteuid() == 0) words.emplace_back("--allow-run-as-root");
  }
  return words;
}

}  // namespace

const std::vector<std::string>& transport_names() {
  static const std::vector<std::string> names = {"threads", "shm", "gloo", "mpi", "nccl", "cuda_ipc"};
  return names;
}

Row memory_copy_row() {
  Row row{"memory copy", {}};
  for (const auto& [key, bytes] :
       {std::pair<const char*, std::size_t>{"1MiB_GBps", 1 << 20}, {"25MiB_GBps", 25 << 20}}) {
    std::vector<char> from(bytes, 1), to(bytes, 2);
    std::vector<double> times;
    for (int i = 0; i < 32; ++i) {
      from[static_cast<std::size_t>(i)] = static_cast<char>(i);
      const auto begin = Clock::now();
      std::memcpy(to.data(), from.data(), bytes);
      asm volatile("" : : "r"(to.data()) : "memory");  // Keeps the compiler from removing the copy.
      times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    }
    std::nth_element(times.begin(), times.begin() + 16, times.end());
    row.values[key] = static_cast<double>(bytes) / 1e9 / times[16];
  }
  row.finding = fmt::format("1 MiB {:.2f} GB/s, 25 MiB {:.2f} GB/s by one core",
                            row.values["1MiB_GBps"].get<double>(), row.values["25MiB_GBps"].get<double>());
  return row;
}

Rows transport_rows(const std::string& transport, int ranks, bool asked_for, const Installed& installed) {
  if (installed.probe.empty())
    return {absent(transport, "not measured: lockstep-probe is missing or broken")};
  if (transport == "threads") return {measured(transport, transport, ranks, {}, installed)};
  Rows rows;
  if (transport == "mpi") {
    for (const auto& [flavour, mpirun] : installed.mpirun)
      rows.push_back(measured(flavour, transport, ranks, mpi_launcher(flavour, mpirun, ranks), installed));
    if (rows.empty() && asked_for)
      rows.push_back(absent(transport, "no MPI with both its mpirun and its Lockstep module"));
  } else if (transport == "nccl" && installed.gpus < ranks) {
    if (asked_for)
      rows.push_back(absent(
          transport, fmt::format("{} ranks need {} usable GPUs, found {}", ranks, ranks, installed.gpus)));
  } else if (transport == "cuda_ipc" && !installed.cuda_ipc) {
    if (asked_for) rows.push_back(absent(transport, "no GPU, or the library was built without CUDA"));
  } else {
    rows.push_back(measured(
        transport, transport, ranks,
        {installed.program.string(), "run", "--quiet", "--prefix", "never", "-n", std::to_string(ranks)},
        installed));
  }
  return rows;
}

}  // namespace lockstep::cli
