#include <lockstep/comm/c10d/backends.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <sstream>

#include <c10/core/DeviceType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/c10d/store.h>
#include <lockstep/comm/transports/cuda_ipc/engine/gpu.h>
#include <lockstep/comm/transports/threads/threads.h>
#include <torch/cuda.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace lockstep::detail {
namespace {

constexpr const char* kAllowed =
    "auto, shm, shm+gloo, shm+mpi, gloo, mpi, nccl, cuda_ipc, or a list by device such as cpu:gloo,cuda:nccl";

// Resolved for each group, once the hosts of its ranks are known.
constexpr const char* kAuto = "auto";
constexpr std::array kOfCpu = {"shm", "gloo", "mpi", "shm+gloo", "shm+mpi"};
constexpr std::array kOfCuda = {"nccl", "cuda_ipc"};

bool is_one_of(const auto& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void check_name(const std::string& whole, const std::string& name, bool threads) {
  if (name == kAuto) return;
  if (threads) {
    if (name == "threads") return;
    throw ConfigError(fmt::format(
        "backend '{}' does not work with ranks that are threads of one process; expected auto or threads",
        whole));
  }
  if (!is_one_of(kOfCuda, name) && !is_one_of(kOfCpu, name))
    throw ConfigError(fmt::format("unknown backend '{}'; expected {}", whole, kAllowed));
}

Backends parse(const std::string& text, bool threads) {
  Backends backends;
  if (text.find(':') == std::string::npos) {
    check_name(text, text, threads);
    if (text == kAuto) return {{at::kCPU, kAuto}, {at::kCUDA, kAuto}};
    return {{is_one_of(kOfCuda, text) ? at::kCUDA : at::kCPU, text}};
  }
  for (std::size_t start = 0; start <= text.size();) {
    const auto end = std::min(text.find(',', start), text.size());
    const auto entry = text.substr(start, end - start);
    const auto colon = entry.find(':');
    const auto device = entry.substr(0, colon),
               name = colon == std::string::npos ? "" : entry.substr(colon + 1);
    const bool cuda = device == "cuda";
    if ((!cuda && device != "cpu") || name.empty() || backends.contains(cuda ? at::kCUDA : at::kCPU))
      throw ConfigError(fmt::format("invalid backend '{}'; expected {}", text, kAllowed));
    check_name(text, name, threads);
    if (name != kAuto && cuda != is_one_of(kOfCuda, name))
      throw ConfigError(fmt::format("invalid backend '{}': for cuda use one of {}; for cpu one of {}", text,
                                    fmt::join(kOfCuda, ", "), fmt::join(kOfCpu, ", ")));
    backends[cuda ? at::kCUDA : at::kCPU] = name;
    start = end + 1;
  }
  return backends;
}

}  // namespace

void check_backend_text(const std::string& text, bool threads) { parse(text, threads); }

namespace {

bool on_one_host(const std::vector<int>& nodes) {
  return std::all_of(nodes.begin(), nodes.end(), [&](int node) { return node == nodes[0]; });
}

// Null if none serves CUDA.
const char* choose_for_cuda(const Identity& identity, const std::vector<int>& nodes) {
  const auto devices = static_cast<int>(torch::cuda::device_count());
  const int ranks = identity.local_size.value_or(1);
  if (devices == 0) return nullptr;
  if (identity.size == 1) return "local";
  // A launcher may show each rank only its own GPU, so the number of visible GPUs proves little.
  if (on_one_host(nodes) && cuda_ipc_available()) return kAuto;
  if (devices >= ranks && nccl_available()) return "nccl";
  log(LogLevel::warn,
      "{} ranks on this host see {} GPUs. NCCL cannot share a GPU between ranks, and cuda_ipc {}, so CUDA "
      "tensors cannot be sent. If each rank sees its own GPU, set LOCKSTEP_BACKEND=cpu:auto,cuda:nccl",
      ranks, devices, cuda_ipc_available() ? "works within one host only" : "is not in this build");
  return nullptr;
}

}  // namespace

Backends choose_backends(const std::string& text, const Identity& identity, const std::vector<int>& nodes,
                         bool threads) {
  auto backends = parse(text, threads);
  const bool alone = identity.size == 1;
  if (auto cpu = backends.find(at::kCPU); cpu != backends.end() && cpu->second == kAuto)
    cpu->second = threads ? "threads" : alone ? "local" : kAuto;
  if (auto cuda = backends.find(at::kCUDA); cuda != backends.end() && cuda->second == kAuto) {
    if (const char* name = threads ? nullptr : choose_for_cuda(identity, nodes))
      cuda->second = name;
    else
      backends.erase(cuda);
  }
  return backends;
}

std::optional<int> choose_device(const Backends& backends, const Identity& identity) {
  const auto cuda = backends.find(at::kCUDA);
  if (cuda == backends.end()) return std::nullopt;
  const int rank = identity.local_rank.value_or(0);
  const auto devices = std::max(1, static_cast<int>(torch::cuda::device_count()));
  // If a rank sees only one GPU, that one is its own. If it sees several, NCCL requires one per rank.
  if (cuda->second == "nccl" && devices > 1) return rank;
  return rank % devices;
}

std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout) {
  using std::chrono::milliseconds;
  if (timeout <= milliseconds(0))
    throw ConfigError(fmt::format("timeout: expected more than 0 ms, got {} ms", timeout.count()));
  return std::min<milliseconds>(timeout, std::chrono::hours(30 * 24));
}

std::vector<int> choose_nodes(std::vector<int> found) {
  const auto text = env::text("LOCKSTEP_NODES");
  if (!text) return found;
  auto refuse = [&](const std::string& why) {
    return ConfigError(
        fmt::format("invalid LOCKSTEP_NODES={}: {}; expected a number for each rank, such as 0,0,1,1, where "
                    "ranks with the same number share a host",
                    *text, why));
  };
  std::vector<int> nodes;
  std::istringstream in(*text + ',');
  for (std::string word; std::getline(in, word, ',');) {
    int node = -1;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), node);
    if (error != std::errc() || end != word.data() + word.size() || node < 0)
      throw refuse(fmt::format("'{}' is not an integer of 0 or more", word));
    nodes.push_back(node);
  }
  if (nodes.size() != found.size())
    throw refuse(fmt::format("it has {} numbers, but the job has {} ranks", nodes.size(), found.size()));
  for (std::size_t a = 0; a < nodes.size(); ++a)
    for (std::size_t b = 0; b < a; ++b)
      if (nodes[a] == nodes[b] && found[a] != found[b])
        throw refuse(fmt::format("ranks {} and {} are on different hosts", b, a));
  return nodes;
}

namespace {

constexpr const char* kNoGpu = "none";  // also if this build cannot identify GPUs

// The world's store, for every group.
c10::intrusive_ptr<c10d::Store> whole_store(const TransportContext& context) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(context.store.get());
  return prefixed ? prefixed->getUnderlyingNonPrefixStore() : context.store;
}
std::string gpu_key(int rank) { return fmt::format("gpu/{}", rank); }

// Every rank publishes its GPU when it makes its first group, that of all ranks, even if it sees no GPU: its
// peers may read it.
void announce_gpu(const TransportContext& context) {
  const bool has_one = context.device_index < static_cast<int>(torch::cuda::device_count());
  const auto gpu = has_one ? gpu_of(context.device_index) : std::string();
  put(*whole_store(context), gpu_key(context.ranks[static_cast<std::size_t>(context.rank)]),
      gpu.empty() ? kNoGpu : gpu);
}

std::vector<std::string> gpus_of_all(const TransportContext& context) {
  std::vector<std::string> gpus;
  for (int r = 0; r < context.world_size; ++r) gpus.push_back(take(*whole_store(context), gpu_key(r)));
  return gpus;
}

// The engine for CUDA tensors is the same for all groups of a world and depends on which GPUs its ranks have.
std::string resolve_by_gpus(const std::string& name, const TransportContext& context) {
  if ((name != kAuto && name != "nccl") || context.world_size == 1) return name;
  const auto gpus = gpus_of_all(context);
  for (std::size_t a = 0; a < gpus.size(); ++a)
    for (std::size_t b = a + 1; b < gpus.size(); ++b) {
      if (gpus[a] != gpus[b] || gpus[a] == kNoGpu) continue;
      if (name == kAuto) return "cuda_ipc";
      throw ConfigError(fmt::format(
          "backend 'nccl' requires a separate GPU for each rank, but ranks {} and {} both have {}; "
          "use cuda_ipc if ranks of one host share GPUs",
          a, b, gpus[a]));
    }
  return name == kAuto && !nccl_available() ? "cuda_ipc" : "nccl";
}

// The engine that serves this group.
std::string resolve(const std::string& name, const TransportContext& context) {
  if (on_one_host(context.nodes)) return name == kAuto || name.starts_with("shm+") ? "shm" : name;
  if (name == "shm")
    throw ConfigError(
        "backend 'shm' works within one host, but the group's ranks are on several hosts; use auto, "
        "shm+gloo, shm+mpi, gloo or mpi");
  if (name == "cuda_ipc")
    throw ConfigError(
        "backend 'cuda_ipc' works within one host, but the group's ranks are on several hosts; use nccl, "
        "which requires a GPU for each rank");
  return name == kAuto ? "shm+gloo" : name;
}

}  // namespace

Transports make_transports(const Backends& backends, const TransportContext& context, ThreadsJob* threads) {
  Transports transports;
  if (threads == nullptr && context.world_size > 1 && context.size() == context.world_size)
    announce_gpu(context);
  for (const auto& [device, given] : backends) {
    const auto name = resolve(device == at::kCUDA ? resolve_by_gpus(given, context) : given, context);
    auto own = context;
    own.store = c10::make_intrusive<c10d::PrefixStore>(name, context.store);
    transports[device] = name == "local"      ? make_local_transport(own)
                         : name == "threads"  ? make_threads_transport(own, *threads)
                         : name == "shm"      ? make_shm_transport(own)
                         : name == "gloo"     ? make_gloo_transport(own)
                         : name == "mpi"      ? make_mpi_transport(own)
                         : name == "shm+gloo" ? make_hierarchy_transport(own, name, make_gloo_transport)
                         : name == "shm+mpi"  ? make_hierarchy_transport(own, name, make_mpi_transport)
                         : name == "cuda_ipc" ? make_cuda_ipc_transport(own)
                                              : make_nccl_transport(own);
  }
  return transports;
}

}  // namespace lockstep::detail
