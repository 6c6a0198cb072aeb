# What `cmake --install` puts where: the public headers, the library, its modules, the program, the CMake package.
include(CMakePackageConfigHelpers)
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)

# Everything else in lockstep/ is internal; some of it includes what LibTorch does not ship.
foreach(header
    lockstep.h
    base/error.h
    base/log.h
    base/span.h
    checkpoint/checkpoint.h
    checkpoint/parts.h
    checkpoint/value.h
    comm/call.h
    comm/cpu_memory.h
    comm/group.h
    comm/observer.h
    comm/work.h
    comm/world.h
    data/collate.h
    data/dataset.h
    data/dataset_traits.h
    data/distributed_sampler.h
    data/feed.h
    data/fetch.h
    data/fields.h
    data/files.h
    data/loader.h
    data/loader_options.h
    data/loader_pass.h
    data/sampler.h
    data/subset.h
    data/torch_sampler.h
    data/workers.h
    mesh/device_mesh.h
    nn/attention.h
    nn/cross_entropy.h
    nn/dropout.h
    nn/layer_norm.h
    nn/linear.h
    nn/rms_norm.h
    parallel/data_parallel.h
    parallel/data_parallel_tensors.h
    parallel/ddp.h
    parallel/ddp_bucket.h
    parallel/ddp_hooks.h
    parallel/module_call.h
    parallel/pipeline.h
    parallel/pipeline_schedule.h
    parallel/pipeline_stage.h
    parallel/placed.h
    parallel/replicas.h
    parallel/script_module.h
    parallel/sync_batch_norm.h
    parallel/tensor_parallel.h
    parallel/tensor_parallel_layers.h
    parallel/tensor_parallel_loss.h
    parallel/tensor_parallel_regions.h
    parallel/tensors_in.h
    parallel/unit.h
    profile/profiler.h
    train/adam.h
    train/autocast.h
    train/clip_grad.h
    train/distributed_optimizer.h
    train/elementwise.h
    train/grad_scaler.h
    train/lr_schedule.h
    train/lr_scheduler.h
    train/optimizer.h
    train/sgd.h
    train/step_graph.h)
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES lockstep/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep/${folder})
endforeach()
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
