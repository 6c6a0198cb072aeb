# lockstep_find_torch(PROBLEM): finds LibTorch and creates two targets from its folder: lockstep::torch, and
# lockstep::torch_headers for code that must not link LibTorch (fmt, number formats).
#
# Does not use LibTorch's own TorchConfig.cmake, which requires a CUDA toolkit whenever LibTorch was built
# with CUDA, even for a program that compiles no CUDA. A wheel would be unusable on a machine without the
# toolkit.
#
# Searches LOCKSTEP_TORCH, then Torch_DIR and CMAKE_PREFIX_PATH. Sets in the caller's scope LOCKSTEP_TORCH,
# LOCKSTEP_TORCH_VERSION, LOCKSTEP_TORCH_HAS_CUDA, LOCKSTEP_CUDA_INCLUDES (empty without CUDA or its headers),
# and PROBLEM (a description of the problem; empty on success).

function(lockstep_find_torch problem)
  set(${problem} "" PARENT_SCOPE)
  if(TARGET lockstep::torch)
    return()
  endif()

  set(header include/torch/csrc/api/include/torch/torch.h)
  set(torch "${LOCKSTEP_TORCH}")
  if(NOT torch)
    foreach(place ${Torch_DIR}/../../.. ${CMAKE_PREFIX_PATH} ${CMAKE_PREFIX_PATH}/../..)
      if(NOT torch AND EXISTS "${place}/${header}")
        set(torch "${place}")
      endif()
    endforeach()
  endif()
  get_filename_component(torch "${torch}" ABSOLUTE BASE_DIR "${CMAKE_BINARY_DIR}")
  if(NOT EXISTS "${torch}/${header}" OR NOT EXISTS "${torch}/lib/libtorch.so")
    set(${problem} "LibTorch not found in LOCKSTEP_TORCH='${LOCKSTEP_TORCH}': set it to a folder with include/torch \
and lib/libtorch.so (an unpacked LibTorch, or the folder of Python's torch package)" PARENT_SCOPE)
    return()
  endif()

  set(version_file "${torch}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${version_file}")
    set(version_file "${torch}/include/torch/version.h")
  endif()
  file(READ "${version_file}" text)
  set(version "")
  foreach(part MAJOR MINOR PATCH)
    string(REGEX MATCH "TORCH_VERSION_${part} ([0-9]+)" _ "${text}")
    list(APPEND version ${CMAKE_MATCH_1})
  endforeach()
  list(JOIN version . version)
  if(version VERSION_LESS 2.11)
    set(${problem} "LibTorch ${version} in ${torch} is too old: expected 2.11 or newer" PARENT_SCOPE)
    return()
  endif()

  # CUDA and NCCL headers, used only by nccl.cpp: from a toolkit, or from the packages that a wheel depends
  # on, which are installed next to it and may lack crt/.
  set(cuda OFF)
  set(includes "")
  if(EXISTS "${torch}/lib/libtorch_cuda.so")
    set(cuda ON)
    file(GLOB beside "${torch}/../nvidia/*/include")
    find_path(LOCKSTEP_CUDA_INCLUDE crt/host_config.h
              HINTS $ENV{CUDA_HOME}/include $ENV{CUDA_PATH}/include /usr/local/cuda/include ${beside})
    find_path(LOCKSTEP_NCCL_INCLUDE nccl.h HINTS ${beside} /usr/local/cuda/include)
    mark_as_advanced(LOCKSTEP_CUDA_INCLUDE LOCKSTEP_NCCL_INCLUDE)
    if(LOCKSTEP_CUDA_INCLUDE AND LOCKSTEP_NCCL_INCLUDE)
      set(includes "${LOCKSTEP_NCCL_INCLUDE}" "${LOCKSTEP_CUDA_INCLUDE}")
    endif()
  endif()

  add_library(lockstep::torch_headers INTERFACE IMPORTED)
  target_include_directories(lockstep::torch_headers SYSTEM INTERFACE
    "${torch}/include" "${torch}/include/torch/csrc/api/include")
  target_compile_definitions(lockstep::torch_headers INTERFACE FMT_HEADER_ONLY=1)

  add_library(lockstep::torch INTERFACE IMPORTED)
  set(libraries "${torch}/lib/libtorch.so" "${torch}/lib/libtorch_cpu.so" "${torch}/lib/libc10.so")
  if(cuda)
    list(APPEND libraries "${torch}/lib/libtorch_cuda.so" "${torch}/lib/libc10_cuda.so")
  endif()
  # Some of them only register themselves, so --as-needed would drop them.
  target_link_libraries(lockstep::torch INTERFACE
    "-Wl,--push-state,--no-as-needed" ${libraries} "-Wl,--pop-state" lockstep::torch_headers)
  target_link_options(lockstep::torch INTERFACE "-Wl,-rpath,${torch}/lib")
  target_compile_definitions(lockstep::torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)

  set(LOCKSTEP_TORCH "${torch}" PARENT_SCOPE)
  set(LOCKSTEP_TORCH_VERSION "${version}" PARENT_SCOPE)
  set(LOCKSTEP_TORCH_HAS_CUDA "${cuda}" PARENT_SCOPE)
  set(LOCKSTEP_CUDA_INCLUDES "${includes}" PARENT_SCOPE)
endfunction()
