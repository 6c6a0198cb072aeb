// How the MPI transport checks and splits tensors. Rejected arguments throw c10::Error.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

namespace lockstep::detail::mpi {

using Tensors = std::vector<at::Tensor>;

inline std::int64_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * tensor.element_size(); }
inline char* data_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

void check_tensor(const at::Tensor& tensor);  // dense, contiguous, on the CPU
void check_same_type(const at::Tensor& a, const at::Tensor& b);
const at::Tensor& one_of(const Tensors& tensors);
const Tensors& list_of(const std::vector<Tensors>& lists, int size, at::ScalarType type);

bool same_memory(const at::Tensor& a, const at::Tensor& b);

// Rows of dimension 0 as one flat tensor per rank. Splits are in rows; if empty, the parts are equal.
Tensors split_rows(const at::Tensor& tensor, const std::vector<std::int64_t>& splits, int size);
// Equal flat parts of a tensor whose number of elements is a multiple of size.
Tensors parts_of(const at::Tensor& tensor, int size);

}  // namespace lockstep::detail::mpi
