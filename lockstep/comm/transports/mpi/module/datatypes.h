// LibTorch's dtypes and reductions as MPI's, and texts for MPI's error codes.
#pragma once

#include <cstdint>
#include <string>

#include <lockstep/comm/call.h>
#include <lockstep/comm/transports/mpi/module/mpi_api.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace lockstep::detail {

// Throws std::runtime_error with MPI's own text unless code is MPI_SUCCESS.
void check_mpi(int code, const char* what);
std::string mpi_error_text(int code);
bool mpi_is_up();  // false once finalised, by Lockstep or by the program

// Throws c10::Error if MPI cannot do the reduction. avg becomes a sum, divided afterwards.
ReduceOp mpi_reduction(Dtype dtype, const c10d::ReduceOp& op);

struct MpiReduction {
  MPI_Datatype type;
  MPI_Op op;
};
// Creates what MPI lacks at first use and keeps it. Progress thread only.
MpiReduction mpi_reduction_of(Dtype dtype, ReduceOp op);
void free_mpi_reductions() noexcept;  // before MPI_Finalize: MPICH reports leaks

// values[i] /= divisor, for floating dtypes. A plain loop, because ATen would start a thread pool for the
// progress thread.
void divide(Dtype dtype, void* values, std::int64_t count, int divisor);

}  // namespace lockstep::detail
