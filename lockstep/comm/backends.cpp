#include <lockstep/comm/backends.h>

#include <c10/core/DeviceType.h>
#include <fmt/format.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/transports/threads/threads.h>
#include <torch/cuda.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace lockstep::detail {
namespace {

constexpr const char* kAllowed = "auto, gloo, nccl, mpi, shm, or a list by device such as cpu:gloo,cuda:nccl";

// Resolved later, when the ranks of this host are known.
constexpr const char* kAuto = "auto";

void check_name(const std::string& whole, const std::string& name, bool threads) {
  if (name == kAuto) return;
  if (threads) {
    if (name == "threads") return;
    throw ConfigError(fmt::format(
        "backend '{}' is not allowed where ranks are threads of one process: auto or threads is", whole));
  }
  if (name != "shm" && name != "gloo" && name != "nccl" && name != "mpi")
    throw ConfigError(fmt::format("backend '{}' is not known: {} is", whole, kAllowed));
}

Backends parse(const std::string& text, bool threads) {
  Backends backends;
  if (text.find(':') == std::string::npos) {
    check_name(text, text, threads);
    if (text == kAuto) return {{at::kCPU, kAuto}, {at::kCUDA, kAuto}};
    return {{text == "nccl" ? at::kCUDA : at::kCPU, text}};
  }
  for (std::size_t start = 0; start <= text.size();) {
    const auto end = std::min(text.find(',', start), text.size());
    const auto entry = text.substr(start, end - start);
    const auto colon = entry.find(':');
    const auto device = entry.substr(0, colon),
               name = colon == std::string::npos ? "" : entry.substr(colon + 1);
    const bool cuda = device == "cuda";
    if ((!cuda && device != "cpu") || name.empty() || backends.contains(cuda ? at::kCUDA : at::kCPU))
      throw ConfigError(fmt::format("backend '{}' is not allowed: {} is", text, kAllowed));
    check_name(text, name, threads);
    if (name != kAuto && cuda != (name == "nccl"))
      throw ConfigError(
          fmt::format("backend '{}' is not allowed: nccl serves cuda, shm, gloo and mpi serve cpu", text));
    backends[cuda ? at::kCUDA : at::kCPU] = name;
    start = end + 1;
  }
  return backends;
}

}  // namespace

void check_backend_text(const std::string& text, bool threads) { parse(text, threads); }

Backends choose_backends(const std::string& text, const Identity& identity, bool threads) {
  auto backends = parse(text, threads);
  const bool alone = identity.size == 1;
  if (auto cpu = backends.find(at::kCPU); cpu != backends.end() && cpu->second == kAuto)
    cpu->second = threads                                ? "threads"
                  : alone                                ? "local"
                  : identity.local_size == identity.size ? "shm"
                  : identity.local_size == identity.size ? "shm"
                                                         : "gloo";
  if (auto cuda = backends.find(at::kCUDA); cuda != backends.end() && cuda->second == kAuto) {
    const auto devices = threads || !nccl_available() ? 0 : static_cast<int>(torch::cuda::device_count());
    if (devices > 0 && devices < identity.local_size.value_or(1))
      log(LogLevel::warn,
          "{} ranks on this host share {} GPUs, which NCCL refuses: CUDA tensors cannot be sent",
          *identity.local_size, devices);
    if (devices == 0 || devices < identity.local_size.value_or(1))
      backends.erase(cuda);
    else
      cuda->second = alone ? "local" : "nccl";
  }
  return backends;
}

std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout) {
  using std::chrono::milliseconds;
  if (timeout <= milliseconds(0))
    throw ConfigError(fmt::format("a timeout of {} ms is not allowed: above 0 is", timeout.count()));
  return std::min<milliseconds>(timeout, std::chrono::hours(30 * 24));
}

Transports make_transports(const Backends& backends, const TransportContext& context, ThreadsJob* threads) {
  Transports transports;
  for (const auto& [device, name] : backends) {
    auto own = context;
    own.store = c10::make_intrusive<c10d::PrefixStore>(name, context.store);
    transports[device] = name == "local"     ? make_local_transport(own)
                         : name == "threads" ? make_threads_transport(own, *threads)
                         : name == "shm"     ? make_shm_transport(own)
                         : name == "gloo"    ? make_gloo_transport(own)
                         : name == "mpi"     ? make_mpi_transport(own)
                                             : make_nccl_transport(own);
  }
  return transports;
}

}  // namespace lockstep::detail
