// Built where LibTorch has no CUDA, or there is no nvcc; backend.cpp is built where both are.
#include <lockstep/base/error.h>
#include <lockstep/comm/c10d/transport.h>
#include <lockstep/comm/transports/cuda_ipc/engine/gpu.h>

namespace lockstep::detail {

bool cuda_ipc_available() { return false; }

std::string gpu_of(int) { return {}; }

std::unique_ptr<Transport> make_cuda_ipc_transport(const TransportContext&) {
  throw ConfigError(
      "backend 'cuda_ipc' is not in this build: it needs a LibTorch with CUDA and a CUDA compiler (nvcc); "
      "build with "
      "LOCKSTEP_TORCH=DIR set to such a LibTorch and nvcc in PATH, or use backend 'gloo' or 'auto'");
}

}  // namespace lockstep::detail
