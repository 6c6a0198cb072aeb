# The transport in shared memory, without LibTorch: also what the Python module is made of.
set(LOCKSTEP_SHM_SOURCES
  base/awake_clock.cpp
  base/crew.cpp
  base/environment.cpp
  base/error.cpp
  base/host.cpp
  base/log.cpp
  comm/call.cpp
  comm/reduce.cpp
  comm/reduce_avx2.cpp
  comm/reduce_avx512.cpp
  comm/reduce_level.cpp
  comm/reduce_portable.cpp
  comm/transports/shm/arena.cpp
  comm/transports/shm/engine.cpp
  comm/transports/shm/engine_reduce.cpp
  comm/transports/shm/fork.cpp
  comm/transports/shm/lane.cpp
  comm/transports/shm/meeting.cpp
  comm/transports/shm/messages.cpp
  comm/transports/shm/post.cpp
  comm/transports/shm/region.cpp
  comm/transports/shm/segment.cpp
  comm/transports/shm/stage_copy.cpp
  comm/transports/shm/station.cpp
  control/socket.cpp
  memory/heap.cpp)
list(TRANSFORM LOCKSTEP_SHM_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
# The part of it that is a c10d::Backend.
set(LOCKSTEP_SHM_BACKEND_SOURCES
  comm/engine_work.cpp
  comm/part_backend.cpp
  comm/part_checks.cpp
  comm/tensors.cpp
  comm/transports/shm/backend.cpp)
list(TRANSFORM LOCKSTEP_SHM_BACKEND_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)

# The same sums for every CPU, to the bit: contraction would round once where the others round twice.
set(kernels "-O2;-ffp-contract=off")
set(avx2 "")
set(avx512 "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2 "-mavx2;-mf16c")
  set(avx512 "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl")
endif()
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/comm/reduce_portable.cpp PROPERTIES COMPILE_OPTIONS "${kernels}")
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/comm/reduce_avx2.cpp PROPERTIES COMPILE_OPTIONS "${kernels};${avx2}")
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/comm/reduce_avx512.cpp PROPERTIES COMPILE_OPTIONS "${kernels};${avx512}")
