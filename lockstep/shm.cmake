# The transport in shared memory: what the Python module consists of. These sources need no library but libc.
file(GLOB LOCKSTEP_SHM_SOURCES CONFIGURE_DEPENDS
  ${CMAKE_CURRENT_LIST_DIR}/base/*.cpp
  ${CMAKE_CURRENT_LIST_DIR}/comm/engine/*.cpp
  ${CMAKE_CURRENT_LIST_DIR}/comm/reduce/*.cpp
  ${CMAKE_CURRENT_LIST_DIR}/comm/transports/shm/engine/*.cpp)
foreach(source memory/heap.cpp os/host.cpp os/socket.cpp)
  list(APPEND LOCKSTEP_SHM_SOURCES ${CMAKE_CURRENT_LIST_DIR}/${source})
endforeach()
# The part of it that is a c10d::Backend.
set(LOCKSTEP_SHM_BACKEND_SOURCES "")
foreach(source c10d/engine_work.cpp c10d/op_backend.cpp c10d/op_checks.cpp c10d/tensors.cpp transports/shm/backend.cpp)
  list(APPEND LOCKSTEP_SHM_BACKEND_SOURCES ${CMAKE_CURRENT_LIST_DIR}/comm/${source})
endforeach()
