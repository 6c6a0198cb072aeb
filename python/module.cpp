// The Python module torch_lockstep._C.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include "backend.h"

namespace lockstep::python {
namespace {

c10::intrusive_ptr<c10d::Backend> create_backend(const c10d::DistributedBackendOptions& options) {
  return c10::make_intrusive<TorchBackend>(options);
}

c10::intrusive_ptr<c10d::ProcessGroup> create_group(const c10d::DistributedBackendOptions& options) {
  return c10::make_intrusive<TorchGroup>(options, c10::make_intrusive<TorchBackend>(options));
}

}  // namespace
}  // namespace lockstep::python

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  py::module_::import("torch.distributed");  // registers the types below
  using lockstep::python::TorchBackend;
  using Release = py::call_guard<py::gil_scoped_release>;
  // c10d's own type lacks both.
  py::class_<TorchBackend, c10::intrusive_ptr<TorchBackend>, c10d::Backend>(module, "Backend")
      .def_property_readonly("options", &TorchBackend::getBackendOptions)
      .def("_set_default_timeout", &TorchBackend::setTimeout, py::arg("timeout"), Release());
  module.def("create_backend", &lockstep::python::create_backend, Release());
  module.def("create_group", &lockstep::python::create_group, Release());
  module.def("leave_all", &TorchBackend::leave_all, Release());
}
