# What `cmake --install` installs: the public headers, the library, its modules, the programs and the CMake
# package.
include(CMakePackageConfigHelpers)
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)

# Public headers are at the top of these folders. The headers they include from other folders, mostly template
# internals, are installed too.
set(headers lockstep.h)
foreach(folder comm mesh data nn modules schedule parallel optim train checkpoint profile)
  file(GLOB found RELATIVE ${PROJECT_SOURCE_DIR}/lockstep CONFIGURE_DEPENDS lockstep/${folder}/*.h)
  list(APPEND headers ${found})
endforeach()
set(installed "")
while(headers)
  list(POP_FRONT headers header)
  if(header IN_LIST installed OR NOT EXISTS ${PROJECT_SOURCE_DIR}/lockstep/${header})  # version.h is generated
    continue()
  endif()
  list(APPEND installed ${header})
  file(STRINGS lockstep/${header} includes REGEX "^#include <lockstep/")
  list(TRANSFORM includes REPLACE "^#include <lockstep/(.*)>.*$" "\\1")
  list(APPEND headers ${includes})
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES lockstep/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep/${folder})
endwhile()
set_property(GLOBAL PROPERTY LOCKSTEP_INSTALLED_HEADERS ${installed})
install(FILES ${PROJECT_BINARY_DIR}/include/lockstep/version.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep)

install(TARGETS lockstep EXPORT lockstepTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS lockstep_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS lockstep_probe RUNTIME DESTINATION ${CMAKE_INSTALL_LIBDIR}/lockstep)
foreach(module lockstep_mpi_openmpi lockstep_mpi_mpich)
  if(TARGET ${module})
    install(TARGETS ${module} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/lockstep)
  endif()
endforeach()
install(EXPORT lockstepTargets NAMESPACE lockstep:: DESTINATION ${package})
configure_package_config_file(cmake/lockstepConfig.cmake.in ${PROJECT_BINARY_DIR}/lockstepConfig.cmake
                              INSTALL_DESTINATION ${package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/lockstepConfig.cmake ${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake
              cmake/LockstepTorch.cmake DESTINATION ${package})
