# SPDX-License-Identifier: Apache-2.0
# The suites, in order. Sourced by run.sh: suite, skip and make_variant are its functions; full and seed its variables.
# shellcheck shell=bash disable=SC2154

corpus=tests/fuzz/corpus
case $build in /*) root=$build ;; *) root=$PWD/$build ;; esac
targets=(plan route forward backward quant) # of tests/fuzz
units=(ref ref_experts ref_route ref_block api packed quant quant_ops forms describe values machine alloc threads process ep ep_faults
    ep_ccl ep_stream abi versions)

replays() { # folder: every fuzz target on its corpus, one line of counts
    local target line total=0
    for target in "${targets[@]}"; do
        line=$("$1/fuzz_$target" "$corpus/$target") || {
            echo "fuzz_$target failed on its corpus"
            echo "$total passed, 1 failed, 0 skipped"
            return 1
        }
        echo "fuzz_$target: $line"
        total=$((total + ${line%% *}))
    done
    echo "$total passed, 0 failed, 0 skipped"
}

fuzz_for() { # folder target seconds: new inputs with libFuzzer; findings are left in the log folder
    mkdir -p "$log_folder/fuzz_$2"
    "$1/fuzz_$2" -seed="$seed" -max_total_time="$3" -max_len=2048 -timeout=10 -print_final_stats=1 \
        -artifact_prefix="$log_folder/fuzz_$2." "$log_folder/fuzz_$2" "$corpus/$2" || {
        echo "0 passed, 1 failed, 0 skipped"
        return 1
    }
    echo "1 passed, 0 failed, 0 skipped"
}

check_level() { # level: the checks with the levels above it switched off
    if "$build/fusedmoe" info | grep -qE "levels .*\b$1\b"; then
        suite "check-max-$1" env FMOE_MAX_ISA="$1" "$build/fusedmoe" check --seed "$seed" --seconds 2 --quick
    else
        skip "check-max-$1" "the CPU does not have $1"
    fi
}

# ---- release, and the simulated CANN: what more than one suite needs ----
ascend=$(cd tests/ascend && ls test_*.c | sed 's/\.c$//' | tr '\n' ' ')
# torch_npu also opens libraries of CANN that none of the C tests needs
cann="sim_opapi_cann81 sim_opapi_cann85 sim_opapi_nogmm sim_hccl sim_acl_op_compiler sim_ge_runner sim_graph sim_acl_tdt_channel sim_split"
make_variant release "$build" "fmoe_c_tests $ascend $cann" -DCMAKE_BUILD_TYPE=Release -DFMOE_CUDA=OFF
released=$?

# ---- the second lane, beside everything below: Python (mostly one thread, and downloads), then the CUDA build ----
second_lane() {
    suite python tests/python/run.sh
    suite lint tools/lint.sh
    [ $full = 1 ] || return 0
    if [ $released = 0 ]; then suite ascend-torch tests/ascend/run_torch.sh test "$build"; fi
    if command -v nvcc >/dev/null; then
        if make_variant cuda "$build/cuda" "fusedmoe_cuda test_tune test_driver test_launches check_cuda test_ep_cuda test_quantise_cuda test_cuda_sim check_cuda_sim test_ep_cuda_sim test_quantise_cuda_sim"; then
            suite cuda-tune "$build/cuda/tests/cuda/test_tune"
            suite cuda-launches "$build/cuda/tests/cuda/test_launches" tests/cuda/launches.txt
            suite cuda-old-driver "$build/cuda/tests/cuda/test_driver" "$root/cuda/libfusedmoe_cuda.so" "$root/cuda/tests/cuda/old_driver/libcuda.so"
            suite cuda-old-ptxas tests/cuda/old_ptxas.sh "$build/cuda/old-ptxas"
            suite cuda-ep "$build/cuda/tests/cuda/test_ep_cuda"
            suite cuda-quantise "$build/cuda/tests/cuda/test_quantise_cuda"
            suite cuda-check "$build/cuda/tests/cuda/check_cuda" "$root/cuda/libfusedmoe_cuda.so" 1
            suite cuda-sim "$build/cuda/tests/cuda_sim/test_cuda_sim"
            suite cuda-sim-ep env FMOE_EP_DRAWS=2 "$build/cuda/tests/cuda_sim/test_ep_cuda_sim"
            for cc in 80 90; do
                suite "cuda-sim-quantise-$cc" env FMOE_SIM_CC=$cc "$build/cuda/tests/cuda_sim/test_quantise_cuda_sim" --seed "$seed"
            done
            suite cuda-sim-inside env FMOE_SIM_CC=90 FMOE_CHECK_MOST=4e6 \
                "$build/cuda/tests/cuda_sim/check_cuda_sim" "$root/cuda/tests/cuda_sim/libfusedmoe_cuda.so" "$seed" 5 inside
            for cc in 80 86 90; do # small layers: kernels of 8.x, with less shared memory, and Hopper's
                suite "cuda-sim-check-$cc" env FMOE_SIM_CC=$cc FMOE_SIM_SEED="$seed" FMOE_CHECK_MOST=4e5 \
                    "$build/cuda/tests/cuda_sim/check_cuda_sim" "$root/cuda/tests/cuda_sim/libfusedmoe_cuda.so" "$seed" 4
            done
        fi
    else
        skip cuda "nvcc is not installed"
    fi
    suite cuda-configure tests/cuda/configure.sh "$build/cuda-configure"
}
second_lane &

# ---- the CPU, and Ascend on the simulated CANN ----
if [ $released = 0 ]; then
    bin=$build/tests
    for name in "${units[@]}"; do suite "$name" "$bin/test_$name" --seed "$seed"; done
    suite ep-mpi tests/mpi/run.sh "$build"
    suite layers tests/layers.py
    suite example tests/falls.sh "$bin/train_layer"
    suite replay replays "$bin"
    suite ascend-check tests/ascend/check_faults.sh "$build/fusedmoe" "$root/tests/ascend_sim/cann"
    for program in $ascend; do
        suite "$program-cann" env FMOE_ASCEND_PATH="$root/tests/ascend_sim/cann" "$bin/ascend/$program"
    done
    if [ $full = 0 ]; then
        suite check "$build/fusedmoe" check --seed "$seed" --seconds 10 --quick
    else
        suite check "$build/fusedmoe" check --seed "$seed" --seconds 30
        for level in c avx2 avx512; do check_level $level; done
        suite big "$bin/test_big"
        suite install tests/install.sh "$build"
        for program in $ascend; do # other versions and other libraries, the same operators
            suite "$program-cann81" env FMOE_ASCEND_PATH="$root/tests/ascend_sim/cann81" "$bin/ascend/$program"
        done
        suite ascend-check-cann81 tests/ascend/check_faults.sh "$build/fusedmoe" "$root/tests/ascend_sim/cann81"
        for program in test_ascend_layer test_ascend_vendor; do
            suite "$program-cann85" env FMOE_ASCEND_PATH="$root/tests/ascend_sim/cann85" "$bin/ascend/$program"
            suite "$program-950" env FMOE_SIM_SOC=Ascend950PR_9589 FMOE_ASCEND_PATH="$root/tests/ascend_sim/cann" "$bin/ascend/$program"
        done
        suite test_ascend_ops-split env FMOE_ASCEND_PATH="$root/tests/ascend_sim/split" "$bin/ascend/test_ascend_ops"
        if qemu=$(command -v qemu-x86_64-static || command -v qemu-x86_64); then
            # CPUs without AVX-512, and without AVX: no illegal instruction, and the right numbers.
            haswell=Haswell,-pcid,-x2apic,-tsc-deadline,-hle,-invpcid,-rtm # less what the emulator lacks
            suite qemu-haswell "$qemu" -cpu $haswell "$build/fusedmoe" check --seed "$seed" --seconds 1 --quick --loose
            suite qemu-nehalem "$qemu" -cpu Nehalem "$build/fusedmoe" check --seed "$seed" --seconds 1 --quick
        else
            skip qemu "qemu-x86_64 is not installed (Debian: qemu-user-static)"
        fi
    fi
fi
[ $full = 1 ] || { wait && return 0; }

# ---- arm64: cross-built, every level under emulation ----
if command -v aarch64-linux-gnu-gcc >/dev/null && qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64); then
    if make_variant arm64 "$build/arm64" fusedmoe_cli -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake -DFMOE_CUDA=OFF; then
        suite arm64-check "$qemu" -cpu max -L /usr/aarch64-linux-gnu "$build/arm64/fusedmoe" check --seed "$seed" --seconds 1 --quick
    fi
else
    skip arm64 "gcc-aarch64-linux-gnu or qemu-user-static is not installed"
fi

# ---- sanitizers ----
sanitized=(-DCMAKE_BUILD_TYPE=RelWithDebInfo -DFMOE_CUDA=OFF)
# AMX in software here, so that its kernels are checked on every CPU with AVX512_BF16, and with sanitizers on all of them.
if make_variant asan "$build/asan" "fmoe_c_tests $ascend" "${sanitized[@]}" -DFMOE_SANITIZE=address,undefined \
    -DFMOE_AMX_EMULATE=ON; then
    bin=$build/asan/tests
    for name in "${units[@]}"; do
        [ "$name" = abi ] || suite "asan-$name" "$bin/test_$name" --seed "$seed" # abi: of the release's files
    done
    suite asan-check "$build/asan/fusedmoe" check --seed "$seed" --seconds 8 --quick
    if grep -qs '^ok .*amx_bf16' "$log_folder/asan-check.log"; then
        suite asan-check-amx "$build/asan/fusedmoe" check --seconds 20 --quick --seed $((seed + 1)) -f amx_bf16
    else
        skip asan-check-amx "the CPU has no AVX512_BF16, which the emulation of AMX computes with"
    fi
    suite asan-big "$bin/test_big"
    # The example ends without freeing what the system takes back anyway.
    suite asan-example env ASAN_OPTIONS=detect_leaks=0 tests/falls.sh "$bin/train_layer"
    suite asan-replay replays "$bin"
    for program in $ascend; do
        suite "asan-$program" env FMOE_ASCEND_PATH="$root/asan/tests/ascend_sim/cann" "$bin/ascend/$program"
    done
fi
# Also the build of a compiler that does not know AMX.
if make_variant tsan "$build/tsan" "fusedmoe_cli test_threads test_process test_ep test_ep_faults test_ep_ccl test_ep_stream" "${sanitized[@]}" -DFMOE_SANITIZE=thread \
    -DFMOE_HAS_AMX_BF16=OFF; then
    suite tsan-threads env TSAN_OPTIONS=halt_on_error=1 "$build/tsan/tests/test_threads"
    for name in process ep ep_faults ep_ccl ep_stream; do
        suite "tsan-$name" env TSAN_OPTIONS=halt_on_error=1 "$build/tsan/tests/test_$name"
    done
    suite tsan-check env TSAN_OPTIONS=halt_on_error=1 "$build/tsan/fusedmoe" check --seed "$seed" --seconds 4 --quick -f /
fi

# ---- fuzzing ----
if command -v clang >/dev/null; then
    if make_variant fuzz "$build/fuzz" "${targets[*]/#/fuzz_}" -DCMAKE_C_COMPILER=clang \
        "${sanitized[@]}" -DFMOE_SANITIZE=fuzzer-no-link,address,undefined; then
        for target in "${targets[@]}"; do
            suite "fuzz-$target" fuzz_for "$build/fuzz/tests" "$target" 10
        done
    fi
else
    skip fuzz "clang is not installed (Debian: clang, libclang-rt-14-dev)"
fi
wait
