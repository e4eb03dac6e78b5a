# Install rules of the library: headers, library, CMake package and pkg-config file.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/headwater)
install(TARGETS headwater EXPORT headwaterTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/headwater DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
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
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
