# SPDX-License-Identifier: Apache-2.0
# Debian packages that tests/run.sh needs beside gcc, make, cmake and python3. .ci/run installs them.
# shellcheck shell=bash disable=SC2034
FMOE_TEST_PACKAGES=(ninja-build clang libclang-rt-14-dev qemu-user-static gcc-aarch64-linux-gnu
    libc6-dev-arm64-cross g++ python3-venv shellcheck openmpi-bin libopenmpi-dev mpich libmpich-dev)
