// Built where LibTorch has no CUDA; nccl.cpp is built where it has.
#include <lockstep/base/error.h>
#include <lockstep/comm/c10d/transport.h>

namespace lockstep::detail {

bool nccl_available() { return false; }

std::unique_ptr<Transport> make_nccl_transport(const TransportContext&) {
  throw ConfigError(
      "backend 'nccl' is not in this build: it was built with a LibTorch without CUDA; build with "
      "LOCKSTEP_TORCH=DIR "
      "set to one that has it, or use backend 'gloo' or 'auto'");
}

}  // namespace lockstep::detail
