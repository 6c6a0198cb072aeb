# Finds LibTorch and makes the target lockstep::torch from its folder: headers and libraries, nothing more.
# LibTorch's own TorchConfig.cmake asks for a CUDA toolkit whenever it was built with CUDA, also from a program
# that compiles no CUDA; a wheel on a machine without the toolkit would then be of no use.
#
# Looked for in LOCKSTEP_TORCH, then Torch_DIR and CMAKE_PREFIX_PATH. Sets LOCKSTEP_TORCH_VERSION,
# LOCKSTEP_TORCH_HAS_CUDA, LOCKSTEP_CUDA_INCLUDES (empty: no CUDA, or its headers are missing).

set(LOCKSTEP_TORCH "" CACHE PATH "LibTorch: an unpacked one, or the folder of Python's torch package")
if(NOT LOCKSTEP_TORCH)
  find_path(LOCKSTEP_TORCH_FOUND include/torch/csrc/api/include/torch/torch.h
            HINTS ${Torch_DIR}/../../.. ${CMAKE_PREFIX_PATH} PATH_SUFFIXES ../.. NO_DEFAULT_PATH)
  if(LOCKSTEP_TORCH_FOUND)
    get_filename_component(LOCKSTEP_TORCH ${LOCKSTEP_TORCH_FOUND} ABSOLUTE)
  endif()
endif()
if(NOT EXISTS "${LOCKSTEP_TORCH}/include/torch/csrc/api/include/torch/torch.h" OR
   NOT EXISTS "${LOCKSTEP_TORCH}/lib/libtorch.so")
  message(FATAL_ERROR "LibTorch is not in LOCKSTEP_TORCH='${LOCKSTEP_TORCH}': set it to a folder that has "
                      "include/torch and lib/libtorch.so (an unpacked LibTorch, or the folder of Python's torch package)")
endif()

set(_version_file "${LOCKSTEP_TORCH}/include/torch/headeronly/version.h")
if(NOT EXISTS "${_version_file}")
  set(_version_file "${LOCKSTEP_TORCH}/include/torch/version.h")
endif()
file(READ "${_version_file}" _version_text)
foreach(part MAJOR MINOR PATCH)
  string(REGEX MATCH "TORCH_VERSION_${part} ([0-9]+)" _ "${_version_text}")
  list(APPEND _version ${CMAKE_MATCH_1})
endforeach()
list(JOIN _version . LOCKSTEP_TORCH_VERSION)
unset(_version)
if(LOCKSTEP_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "LibTorch ${LOCKSTEP_TORCH_VERSION} in ${LOCKSTEP_TORCH} is too old: 2.11 or newer is needed")
endif()

set(LOCKSTEP_TORCH_HAS_CUDA OFF)
if(EXISTS "${LOCKSTEP_TORCH}/lib/libtorch_cuda.so")
  set(LOCKSTEP_TORCH_HAS_CUDA ON)
endif()

# Headers of CUDA and NCCL, for nccl.cpp alone. A toolkit's, or those that a wheel's dependencies bring, which stand
# beside it and may lack crt/.
set(LOCKSTEP_CUDA_INCLUDES "")
if(LOCKSTEP_TORCH_HAS_CUDA)
  file(GLOB _beside "${LOCKSTEP_TORCH}/../nvidia/*/include")
  find_path(LOCKSTEP_CUDA_INCLUDE crt/host_config.h
            HINTS $ENV{CUDA_HOME}/include $ENV{CUDA_PATH}/include /usr/local/cuda/include ${_beside})
  find_path(LOCKSTEP_NCCL_INCLUDE nccl.h HINTS ${_beside} /usr/local/cuda/include)
  mark_as_advanced(LOCKSTEP_CUDA_INCLUDE LOCKSTEP_NCCL_INCLUDE)
  if(LOCKSTEP_CUDA_INCLUDE AND LOCKSTEP_NCCL_INCLUDE)
    set(LOCKSTEP_CUDA_INCLUDES "${LOCKSTEP_NCCL_INCLUDE};${LOCKSTEP_CUDA_INCLUDE}")
  else()
    message(STATUS "LibTorch has CUDA, but the headers of a CUDA toolkit (${LOCKSTEP_CUDA_INCLUDE}) or of NCCL "
                   "(${LOCKSTEP_NCCL_INCLUDE}) are not found: the NCCL transport is not built")
  endif()
endif()

# Headers alone: fmt and the number formats, for code that must not link LibTorch.
add_library(lockstep::torch_headers INTERFACE IMPORTED)
target_include_directories(lockstep::torch_headers SYSTEM INTERFACE
  "${LOCKSTEP_TORCH}/include" "${LOCKSTEP_TORCH}/include/torch/csrc/api/include")
target_compile_definitions(lockstep::torch_headers INTERFACE FMT_HEADER_ONLY=1)

add_library(lockstep::torch INTERFACE IMPORTED)
set(_libraries torch torch_cpu c10)
if(LOCKSTEP_TORCH_HAS_CUDA)
  list(APPEND _libraries torch_cuda c10_cuda)
endif()
foreach(library ${_libraries})
  # Some of them only register themselves: --as-needed would drop them.
  target_link_libraries(lockstep::torch INTERFACE
    "-Wl,--push-state,--no-as-needed,${LOCKSTEP_TORCH}/lib/lib${library}.so,--pop-state")
endforeach()
target_link_libraries(lockstep::torch INTERFACE lockstep::torch_headers)
target_link_options(lockstep::torch INTERFACE "-Wl,-rpath,${LOCKSTEP_TORCH}/lib")
target_compile_definitions(lockstep::torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
unset(_libraries)
