# Install rules: headers, library, CMake package and pkg-config file; where it was built, the CUDA back end with a component
# (`find_package(headwater COMPONENTS cuda)`) and a pkg-config file (headwater-cuda) of its own, since it needs the CUDA toolkit.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/headwater)
install(TARGETS headwater EXPORT headwaterTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
set(no_cuda PATTERN "cuda.h" EXCLUDE)
if(HEADWATER_WITH_CUDA)
  set(no_cuda "")
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/headwater DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" ${no_cuda})
install(EXPORT headwaterTargets NAMESPACE headwater:: DESTINATION ${package_dir})

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/headwaterConfig.cmake.in
  ${PROJECT_BINARY_DIR}/headwaterConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/headwaterConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/headwaterConfig.cmake ${PROJECT_BINARY_DIR}/headwaterConfigVersion.cmake
  DESTINATION ${package_dir})

# The prefix is given relative to the .pc file, so that an installed tree can be moved. A static C++ library needs the C++
# runtime at the end of the link line, a C program's too.
file(RELATIVE_PATH prefix_from_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" prefix_from_pc "${prefix_from_pc}")
set(static_libs "")
if(NOT BUILD_SHARED_LIBS)
  set(static_libs "-lstdc++ -lm -pthread")
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/headwater.pc.in ${PROJECT_BINARY_DIR}/headwater.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/headwater.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(HEADWATER_WITH_CUDA)
  install(TARGETS headwater_cuda EXPORT headwaterCudaTargets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(EXPORT headwaterCudaTargets NAMESPACE headwater:: DESTINATION ${package_dir})
  # The CUDA runtime, a static library of the toolkit: an archive of ours needs it on the link line.
  set(cuda_libs "")
  if(NOT BUILD_SHARED_LIBS)
    get_target_property(cudart CUDA::cudart_static IMPORTED_LOCATION)
    get_filename_component(cudart_dir "${cudart}" DIRECTORY)
    set(cuda_libs "-L\${cudadir} -lcudart_static -ldl -lrt -pthread")
  endif()
  configure_file(${CMAKE_CURRENT_LIST_DIR}/headwater-cuda.pc.in ${PROJECT_BINARY_DIR}/headwater-cuda.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/headwater-cuda.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
