# lockstep_multicall(TARGET NAME...): creates a symbolic link per NAME next to the program TARGET, whose
# sources define them with MULTICALL_MAIN (multicall.h).
function(lockstep_multicall target)
  target_sources(${target} PRIVATE ${PROJECT_SOURCE_DIR}/cmake/multicall.cpp)
  foreach(name ${ARGN})
    add_custom_command(TARGET ${target} POST_BUILD
      COMMAND ${CMAKE_COMMAND} -E create_symlink ${target} ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${name})
  endforeach()
endfunction()
