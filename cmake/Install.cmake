# SPDX-License-Identifier: Apache-2.0
# make install: the library, the header, the command, pkg-config and find_package(fusedmoe).
include(CMakePackageConfigHelpers)
install(TARGETS fusedmoe fusedmoe_static EXPORT fusedmoe-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET fusedmoe_cuda) # found beside the library at run time
  install(TARGETS fusedmoe_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cuda)
endif()
install(TARGETS fusedmoe_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES include/fusedmoe.h include/fusedmoe_ep.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT fusedmoe-targets NAMESPACE fusedmoe:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fusedmoe)
configure_package_config_file(cmake/fusedmoe-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/fusedmoe-config.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fusedmoe)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/fusedmoe-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/fusedmoe-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/fusedmoe-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fusedmoe)
# The prefix from where the file lies: `cmake --install --prefix` may choose another place than was configured.
file(RELATIVE_PATH FMOE_PC_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
foreach(dir LIBDIR INCLUDEDIR)
  file(RELATIVE_PATH FMOE_PC_${dir} ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_${dir}})
endforeach()
string(REGEX REPLACE "/$" "" FMOE_PC_PREFIX "${FMOE_PC_PREFIX}")
configure_file(cmake/fusedmoe.pc.in ${CMAKE_CURRENT_BINARY_DIR}/fusedmoe.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/fusedmoe.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
