// Built if LibTorch has no CUDA or there is no nvcc; otherwise backend.cpp is built.
#include <lockstep/base/error.h>
#include <lockstep/comm/c10d/transport.h>
#include <lockstep/comm/transports/cuda_ipc/engine/gpu.h>

namespace lockstep::detail {

bool cuda_ipc_available() { return false; }

std::string gpu_of(int) { return {}; }

std::unique_ptr<Transport> make_cuda_ipc_transport(const TransportContext&) {
  throw ConfigError(
      "backend 'cuda_ipc' is not in this build, because it requires a LibTorch with CUDA and a CUDA compiler "
      "(nvcc); build with nvcc in PATH and LOCKSTEP_TORCH=DIR set to such a LibTorch, or use backend 'gloo' "
      "or 'auto'");
}

}  // namespace lockstep::detail
