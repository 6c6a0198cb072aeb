# CUDA kernels of our own. They include CUDA's headers and nothing of LibTorch, so that every machine with nvcc compiles
# them, with a GPU or without; they are linked where LibTorch has CUDA. Elsewhere no_kernels.cpp says that there are none,
# and LibTorch's own operators do the work.
#
# Sets LOCKSTEP_KERNELS, what the library is made of, and LOCKSTEP_CUDA_RUNTIME, what it then links.
set(LOCKSTEP_KERNEL_SOURCES
  kernels/adam.cu
  kernels/columns.cu
  kernels/cross_entropy.cu
  comm/transports/cuda_ipc/fold.cu
  kernels/gelu.cu
  kernels/layer_norm.cu
  kernels/pack_heads.cu)

set(LOCKSTEP_KERNELS kernels/no_kernels.cpp)
if(CMAKE_CUDA_COMPILER)
  add_library(lockstep_kernels OBJECT ${LOCKSTEP_KERNEL_SOURCES})
  target_include_directories(lockstep_kernels PRIVATE ${PROJECT_SOURCE_DIR})
  # kernels/architectures.h tells from it which GPUs can run it. What a name (native, all) stands for, CMake knows.
  set(architectures ${CMAKE_CUDA_ARCHITECTURES})
  if("${architectures}" MATCHES "^[a-z-]+$")
    string(TOUPPER "${architectures}" name)
    string(REPLACE "-" "_" name "${name}")
    if(CMAKE_CUDA_ARCHITECTURES_${name})
      set(architectures ${CMAKE_CUDA_ARCHITECTURES_${name}})
    endif()
  endif()
  list(JOIN architectures "," architectures)
  target_compile_definitions(lockstep_kernels PRIVATE LOCKSTEP_CUDA_ARCHITECTURES="${architectures}")
  target_compile_options(lockstep_kernels PRIVATE "-Xcompiler=-Wall,-Wextra"
                         $<$<BOOL:${LOCKSTEP_WERROR}>:-Werror=all-warnings>)
  set_target_properties(lockstep_kernels PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
                        POSITION_INDEPENDENT_CODE ON)
  if(LOCKSTEP_CUDA_INCLUDES)
    set(LOCKSTEP_KERNELS $<TARGET_OBJECTS:lockstep_kernels>)
    find_package(CUDAToolkit REQUIRED)
    set(LOCKSTEP_CUDA_RUNTIME CUDA::cudart_static)
  endif()
endif()
