# lockstep_multicall(TARGET NAME...): the program TARGET, whose sources define NAME... with MULTICALL_MAIN
# (multicall.h), gets a symbolic link per name beside it.
function(lockstep_multicall target)
  target_sources(${target} PRIVATE ${PROJECT_SOURCE_DIR}/cmake/multicall.cpp)
  foreach(name ${ARGN})
    add_custom_command(TARGET ${target} POST_BUILD
      COMMAND ${CMAKE_COMMAND} -E create_symlink ${target} ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${name})
  endforeach()
endfunction()
