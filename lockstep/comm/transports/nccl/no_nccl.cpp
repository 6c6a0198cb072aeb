// Built if LibTorch has no CUDA; otherwise nccl.cpp is built.
#include <lockstep/base/error.h>
#include <lockstep/comm/c10d/transport.h>

namespace lockstep::detail {

bool nccl_available() { return false; }

std::unique_ptr<Transport> make_nccl_transport(const TransportContext&) {
  throw ConfigError(
      "backend 'nccl' is not in this build, because its LibTorch has no CUDA; build with LOCKSTEP_TORCH=DIR "
      "set to one with CUDA, or use backend 'gloo' or 'auto'");
}

}  // namespace lockstep::detail
