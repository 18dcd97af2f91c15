#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# install.sh BUILD: install a build to a place it was not configured for and use it as other projects do: pkg-config
# (shared and static), find_package, and the sources as a part of a project around them.
set -uo pipefail
build=$1 passed=0 failed=0 skipped=0
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
example=$root/examples/train_layer.c at=$work/prefix

try() { # name command ...
    local name=$1
    shift
    if "$@" >"$work/log" 2>&1; then
        passed=$((passed + 1)) && echo "ok      $name"
    else
        failed=$((failed + 1)) && cat "$work/log" && echo "FAILED  $name"
    fi
}

by_pkg_config() { # program link-options ...
    local program=$work/$1
    shift
    export PKG_CONFIG_PATH
    PKG_CONFIG_PATH=$(dirname "$(find "$at" -name fusedmoe.pc)")
    # shellcheck disable=SC2046
    cc -o "$program" "$example" $(pkg-config --cflags fusedmoe) "$@" $(pkg-config --libs --static fusedmoe) &&
        LD_LIBRARY_PATH=$(pkg-config --variable=libdir fusedmoe) "$program"
}

project() { # folder line ...: a project of the example and these lines, configured
    local folder=$work/$1
    mkdir -p "$folder" && shift
    { printf '%s\n' 'cmake_minimum_required(VERSION 3.22)' 'project(user C)' "$@" "add_executable(user $example)"
      echo 'target_link_libraries(user PRIVATE fusedmoe::fusedmoe m)'; } >"$folder/CMakeLists.txt"
    cmake -G "Unix Makefiles" -S "$folder" -B "$folder/build" -DCMAKE_PREFIX_PATH="$at"
}

by_find_package() {
    project found 'find_package(fusedmoe 0.1 REQUIRED)' && cmake --build "$work/found/build" && "$work/found/build/user"
}

# A module of the project's own has the name of one of ours, and it chose no build type: neither is disturbed.
as_a_part() {
    mkdir -p "$work/part/modules" && echo 'message(STATUS "of the user")' >"$work/part/modules/Warnings.cmake"
    project part 'list(APPEND CMAKE_MODULE_PATH ${CMAKE_SOURCE_DIR}/modules)' 'set(FMOE_CUDA OFF)' \
        "add_subdirectory($root fusedmoe)" 'include(Warnings)' || return
    grep -q '^CMAKE_BUILD_TYPE:[A-Z]*=$' "$work/part/build/CMakeCache.txt" &&
        ! grep -q 'test_api' "$work/part/build/fusedmoe/Makefile" &&
        grep -q -e -O3 "$work/part/build/fusedmoe/CMakeFiles/fmoe_cpu.dir/flags.make"
}

# What is in the place of the CUDA backend, beside the libraries, is found by the command: here it is not one.
command_finds_backend() {
    local folder
    folder=$(dirname "$(find "$at" -name libfusedmoe.so)")
    cp "$folder/libfusedmoe.so" "$folder/libfusedmoe_cuda.so" && "$at/bin/fusedmoe" info >"$work/info"
    rm "$folder/libfusedmoe_cuda.so"
    grep -e 'libfusedmoe_cuda.so is not a CUDA backend' "$work/info" || { cat "$work/info" && false; }
}

try install cmake --install "$build" --prefix "$at" --component Unspecified
if command -v pkg-config >/dev/null; then
    try pkg-config by_pkg_config shared
    try pkg-config-static by_pkg_config static -static
else
    echo "pkg-config is not installed" && echo "SKIP" && skipped=1
fi
try find_package by_find_package
try add_subdirectory as_a_part
try command command_finds_backend
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
