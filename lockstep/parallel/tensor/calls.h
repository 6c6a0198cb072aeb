// The computations of tensor-parallel layers, shared by lockstep's own modules and LibTorch's modules with an
// attachment. weight and bias are this rank's slices; bias may be undefined.
#pragma once

#include <lockstep/parallel/tensor_parallel_layers.h>

namespace lockstep::detail {

at::Tensor column_parallel_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                                  const Group& group, const ColumnParallelOptions& options);
// Gathers slices into whole tensors. If the tensor consists of several parts, each part is gathered
// separately.
at::Tensor gather_parts(const at::Tensor& slices, int parts, const Group& group);
at::Tensor row_parallel_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                               const Group& group, const RowParallelOptions& options);
at::Tensor vocab_parallel_embedding(const at::Tensor& indices, const at::Tensor& weight, const Group& group,
                                    const VocabParallelOptions& options);

}  // namespace lockstep::detail
