# SPDX-License-Identifier: Apache-2.0
# The tests. A plain build makes none of them but the checks that are a part of the command: 108 steps instead of 194.
if(FMOE_TESTS STREQUAL "AUTO")
  add_subdirectory(tests EXCLUDE_FROM_ALL)
else()
  add_subdirectory(tests)
endif()

function(fmoe_targets_below folder out)
  get_property(found DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
  get_property(below DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
  foreach(sub ${below})
    fmoe_targets_below(${sub} more)
    list(APPEND found ${more})
  endforeach()
  set(${out} ${found} PARENT_SCOPE)
endfunction()
fmoe_targets_below(${CMAKE_CURRENT_SOURCE_DIR}/tests tests)
add_custom_target(fmoe_tests DEPENDS ${tests})
