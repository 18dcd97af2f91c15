# SPDX-License-Identifier: Apache-2.0
# fmoe_flags: what every C file of the project is compiled and linked with.
# Never -ffast-math or -march=native: the first changes the process's floating point state when the library is loaded, the
# second makes a library that dies on the next machine. Errno and traps are not used; contraction (FMA) is wanted.
add_library(fmoe_flags INTERFACE)
target_include_directories(fmoe_flags INTERFACE $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include>
                                                $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/src>)
target_compile_definitions(fmoe_flags INTERFACE _GNU_SOURCE)
target_compile_options(fmoe_flags INTERFACE
  -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wstrict-prototypes -Wvla -Wformat=2
  -fno-math-errno -fno-trapping-math -ffp-contract=fast -fno-strict-overflow
  -fstack-protector-strong
  $<$<C_COMPILER_ID:Clang>:-Wno-enum-float-conversion>) # enumerators are our integer constants, in sums of doubles too
if(CMAKE_C_COMPILER_ID STREQUAL GNU) # false alarms: -1 for a mask in intrinsics, which are macros at -O0; before gcc 11 more
  target_compile_options(fmoe_flags INTERFACE $<$<CONFIG:Debug>:-Wno-sign-conversion>
    $<$<VERSION_LESS:$<C_COMPILER_VERSION>,11>:-Wno-sign-conversion -Wno-missing-field-initializers>)
endif()
target_link_options(fmoe_flags INTERFACE -Wl,-z,relro,-z,now,-z,noexecstack)
if(FMOE_WERROR)
  target_compile_options(fmoe_flags INTERFACE -Werror)
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_compile_options(fmoe_flags INTERFACE -fcf-protection=full)
endif()
if(FMOE_SANITIZE)
  target_compile_options(fmoe_flags INTERFACE -fsanitize=${FMOE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(fmoe_flags INTERFACE -fsanitize=${FMOE_SANITIZE})
else() # gcc has what level 3 takes from version 12 on; with an older one glibc warns in every file
  set(fortify $<IF:$<AND:$<C_COMPILER_ID:GNU>,$<VERSION_LESS:$<C_COMPILER_VERSION>,12>>,2,3>)
  target_compile_options(fmoe_flags INTERFACE $<$<CONFIG:Release>:-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=${fortify}>)
endif()
