// Stubs for a LibTorch without CUDA; otherwise cuda_graph.cpp is built.
#include <lockstep/base/error.h>
#include <lockstep/optim/detail/cuda_graph.h>

namespace lockstep::detail {
namespace {

[[noreturn]] void missing() { throw Error(no_graph_because()); }

}  // namespace

bool capturing(at::Device) { return false; }
std::string no_graph_because() { return "this build of Lockstep uses a LibTorch without CUDA"; }
at::Device current_device() { missing(); }
void on_side_stream(at::Device, const std::function<void()>&) { missing(); }
std::shared_ptr<void> stay_on_side_stream(at::Device) { missing(); }
std::unique_ptr<CudaGraph> capture(at::Device, const std::vector<at::Generator>&,
                                   const std::function<void()>&) {
  missing();
}

}  // namespace lockstep::detail
