#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# The CUDA checks on a card: Hopper's kernels where it has them, and the general ones, group by group, each for so many
# seconds at most; then expert parallelism, and with compute-sanitizer in PATH its memcheck and racecheck on a few cases.
# Closes with one line of counts. What a group did not come to in its time is said, and is no failure.
#
#   tests/cuda/card.sh [BUILD [SECONDS [SEED]]]     build/cuda 40 (the clock); needs the targets of tests/suites.sh
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
build=${1:-build/cuda} seconds=${2:-40} seed=${3:-$(date +%s)}
check=$build/tests/cuda/check_cuda library=$PWD/$build/libfusedmoe_cuda.so
[[ $build == /* ]] && library=$build/libfusedmoe_cuda.so
[ -x "$check" ] || { echo "card.sh: no $check: cmake --build $build --target fusedmoe_cuda check_cuda test_ep_cuda" && exit 2; }
log=$(mktemp) passed=0 failed=0 skipped=0
trap 'rm -f "$log"' EXIT
echo "seed $seed"

run() { # name command ...
    local name=$1 code p f s
    shift
    timeout -k 10 "$seconds" "$@" >"$log" 2>&1
    code=$?
    read -r p f s < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped.*$/\1 \2 \3/p' "$log" | tail -1)
    if [ -z "${p:-}" ]; then p=0 f=1 s=0 && tail -5 "$log"; fi
    if [ "$code" -ne 0 ] && [ "$code" -ne 3 ] && [ "$code" -ne 124 ] && [ "$f" -eq 0 ]; then f=1 && tail -5 "$log"; fi
    [ "$f" -eq 0 ] || grep -E '^FAILED' "$log" | head -5
    printf '%-34s %7d passed %4d failed %4d skipped%s\n' "$name" "$p" "$f" "$s" "$(grep -q 'time was over' "$log" && echo ', cut off')"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

for path in sm90 sm80; do
    for group in route permute gmm activation special batch experts quant gmm_quant; do
        choice=$([ $path = sm80 ] && echo FMOE_CUDA_PATH=sm80 || echo FMOE_CUDA_PATH=)
        run "$path $group" env "$choice" "$check" "$library" "$seed" 10 "$group"
    done
done
run "sm90 inside" env FMOE_CUDA_PATH= "$check" "$library" "$seed" 10 inside
run "sm90 quant, a small ring" env FMOE_CUDA_RING=40000 "$check" "$library" "$seed" 10 quant
[ ! -x "$build/tests/cuda/test_ep_cuda" ] || run "expert parallelism" "$build/tests/cuda/test_ep_cuda"
[ ! -x "$build/tests/cuda/test_quantise_cuda" ] || run "weights to codes" "$build/tests/cuda/test_quantise_cuda" --seed "$seed"
if sanitizer=$(command -v compute-sanitizer); then
    for tool in memcheck racecheck; do
        for path in "" sm80; do
            run "$tool ${path:-sm90}" env FMOE_CUDA_PATH=$path FMOE_CHECK_MOST=2e6 "$sanitizer" --tool $tool --error-exitcode 9 \
                "$check" "$library" "$seed" 3 experts quant
        done
    done
else
    echo "compute-sanitizer is not in PATH: no memcheck, no racecheck"
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
