#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# old_ptxas.sh FOLDER: the Hopper kernels through the assembler of CUDA 12.4, which serialises wgmma where that of 12.9
# and newer does not. The wheel has no nvcc: this machine's compiles to PTX, whose version number is lowered; nothing in
# it is newer than Hopper.
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1" && cd "$1" || exit 2
if [ ! -x ptxas ]; then
    if ! python3 -m pip download -q --no-deps --dest . nvidia-cuda-nvcc-cu12==12.4.131 >pip.log 2>&1; then
        echo "SKIP: no wheel of CUDA 12.4: $(tail -1 pip.log)" && echo "0 passed, 0 failed, 1 skipped"
        exit 0
    fi
    python3 -m zipfile -e nvidia_cuda_nvcc_cu12-12.4.131-*.whl . && mv nvidia/cuda_nvcc/bin/ptxas . &&
        chmod +x ptxas && rm -rf nvidia* || exit 2
fi
passed=0 failed=0
for name in gather rows dh wgrad; do
    nvcc -std=c++17 -O3 -arch=sm_90a -ptx -I "$root/include" -I "$root/src" -o $name.ptx \
        "$root/src/cuda/sm90/inst_$name.cu" &&
        sed -i 's/^\.version .*/.version 8.4/' $name.ptx &&
        sh "$root/src/cuda/sm90/slow_kernels.sh" error \
            ./ptxas -O3 -arch=sm_90a --warn-on-spills $name.ptx -o $name.cubin >$name.log 2>&1
    if [ $? -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1)) && echo "FAILED: inst_$name.cu" && tail -20 $name.log
    fi
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
