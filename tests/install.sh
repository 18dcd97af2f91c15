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
version=$(sed -n 's/^project(fusedmoe VERSION \([0-9]*\.[0-9]*\).*/\1/p' "$root/CMakeLists.txt")

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

# Where it was installed is known from where the file lies, and may be given another name.
pkg_config_prefix() {
    export PKG_CONFIG_PATH
    PKG_CONFIG_PATH=$(dirname "$(find "$at" -name fusedmoe.pc)")
    local prefix
    prefix=$(pkg-config --variable=prefix fusedmoe)
    echo "prefix: $prefix" && pkg-config --define-variable=prefix=/other --cflags --libs fusedmoe
    [ "$(realpath "$prefix")" = "$(realpath "$at")" ] && [ -f "$prefix/include/fusedmoe.h" ] &&
        [ "$(pkg-config --define-variable=prefix=/other --variable=includedir fusedmoe)" = /other/include ] &&
        [[ $(pkg-config --define-variable=prefix=/other --variable=libdir fusedmoe) = /other/lib* ]]
}

project() { # folder line ...: a project of the example and these lines, configured
    local folder=$work/$1
    mkdir -p "$folder" && shift
    { printf '%s\n' 'cmake_minimum_required(VERSION 3.22)' 'project(user C)' "$@" "add_executable(user $example)"
      echo 'target_link_libraries(user PRIVATE fusedmoe::fusedmoe m)'; } >"$folder/CMakeLists.txt"
    cmake -G "Unix Makefiles" -S "$folder" -B "$folder/build" -DCMAKE_PREFIX_PATH="$at"
}

by_find_package() {
    project found "find_package(fusedmoe $version REQUIRED)" && cmake --build "$work/found/build" && "$work/found/build/user"
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

# A backend that loads, with drivers that have no card, one, and one that is too old. None of it is CUDA.
command_counts_devices() {
    local folder=$work/driver line
    mkdir -p "$folder/none" && cat >"$folder/backend.c" <<'END' && cat >"$folder/nvml.c" <<'END2'
#include "backend.h"
static const fmoe_backend table = {.version = FMOE_BACKEND_VERSION, .name = "cuda"};
FMOE_API const fmoe_backend *fmoe_cuda_backend(const fmoe_core *core) { return core ? &table : 0; }
END
#include <stdio.h>
#include <stdlib.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { return *n = (unsigned)atoi(getenv("CARDS")), 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **card) { return *card = &*card, (int)i; }
int nvmlDeviceGetName(void *card, char *name, unsigned n) { return snprintf(name, n, "Card %d", !!card), 0; }
int nvmlDeviceGetCudaComputeCapability(void *card, int *major, int *minor)
{
    return *major = atoi(getenv("MAJOR")), *minor = 0, !card;
}
END2
    cc -shared -fPIC -I"$root/src" -I"$root/include" -o "$folder/backend.so" "$folder/backend.c" &&
        cc -shared -fPIC -o "$folder/libnvidia-ml.so.1" "$folder/nvml.c" &&
        cc -shared -fPIC -o "$folder/libcuda.so.1" -x c /dev/null && echo "no library" >"$folder/none/libcuda.so.1" || return
    says() { # words, folder of the driver, cards, the first one's major version
        line=$(LD_LIBRARY_PATH=$2 CARDS=$3 MAJOR=$4 FMOE_CUDA_LIBRARY=$folder/backend.so "$at/bin/fusedmoe" info | grep '^cuda: ')
        echo "$line" && [ "$line" = "cuda: $1" ]
    }
    unset CUDA_VISIBLE_DEVICES
    says "loaded, no device: the NVIDIA driver finds none" "$folder" 0 0 &&
        says "loaded, 1 device, Card 1 of compute capability 9.0" "$folder" 1 9 &&
        says "loaded, 2 devices, the first Card 1 of compute capability 7.0 (8.0 is the least)" "$folder" 2 7 &&
        CUDA_VISIBLE_DEVICES=1 says "loaded, 1 device, Card 1 of compute capability 9.0; CUDA_VISIBLE_DEVICES=1" "$folder" 1 9 &&
        says "loaded, no device: there is no NVIDIA driver (libcuda.so.1)" "$folder/none" 0 0
}

try install cmake --install "$build" --prefix "$at" --component Unspecified
if command -v pkg-config >/dev/null; then
    try pkg-config by_pkg_config shared
    try pkg-config-prefix pkg_config_prefix
    try pkg-config-static by_pkg_config static -static
else
    echo "pkg-config is not installed" && echo "SKIP" && skipped=1
fi
try find_package by_find_package
try add_subdirectory as_a_part
try command command_finds_backend
try command-devices command_counts_devices
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
