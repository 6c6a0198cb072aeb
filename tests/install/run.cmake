# Installs the build into an empty folder, then builds and runs a user's project against it.
# cmake -DBUILD=... -DSOURCE=... -DWORK=... -DCOMPILER=... -P run.cmake
file(REMOVE_RECURSE ${WORK})
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "${command}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
# Neither the source tree nor the build tree may be needed.
step(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK}/prefix
     -DCMAKE_CXX_COMPILER=${COMPILER})
step(${CMAKE_COMMAND} --build ${WORK}/build)
step(${WORK}/prefix/bin/lockstep run -n 2 ${WORK}/build/consumer)
if(NOT output MATCHES "consumer: 2 of 2")
  message(FATAL_ERROR "the consumer printed: ${output}")
endif()
step(sh -c "${WORK}/prefix/bin/lockstep doctor --json || true")
if(NOT output MATCHES "\"name\": \"LibTorch\",\n *\"finding\": \"[0-9]")
  message(FATAL_ERROR "the installed doctor does not find its probe: ${output}")
endif()
file(GLOB_RECURSE headers RELATIVE ${WORK}/prefix/include ${WORK}/prefix/include/*.h)
foreach(header ${headers})
  file(READ ${WORK}/prefix/include/${header} text)
  # Headers about LibTorch's modules and optimizers need LibTorch's headers.
  if(header MATCHES "gloo|transport" OR (text MATCHES "#include <(torch|ATen/ATen)" AND NOT header MATCHES "/(data|nn|modules|parallel|optim|train|checkpoint)/"))
    message(FATAL_ERROR "${header} is installed, but it is internal or includes heavy headers")
  endif()
endforeach()
