#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Expert parallelism on every MPI that is installed: compiled with its own mpicc, run on 2, 3 and 4 processes.
#
#   tests/mpi/run.sh build-folder     (libfusedmoe.a is there)
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
build=$1 passed=0 failed=0 skipped=0
for mpi in openmpi mpich; do
    compiler=$(command -v mpicc.$mpi) launcher=$(command -v mpirun.$mpi)
    if [ -z "$compiler" ] || [ -z "$launcher" ]; then
        echo "$mpi is not installed (Debian: openmpi-bin libopenmpi-dev; mpich libmpich-dev)"
        echo "SKIP    $mpi"
        skipped=$((skipped + 1))
        continue
    fi
    program=$build/test_ep_mpi.$mpi
    if ! "$compiler" -std=c17 -O2 -g1 -D_GNU_SOURCE -Wall -Wextra -Iinclude -Isrc -Itests -o "$program" tests/mpi/test_ep_mpi.c \
        src/ep/mpi/engine_mpi.c "$build/libfusedmoe.a" -lm -lpthread -ldl; then
        failed=$((failed + 1))
        continue
    fi
    case $mpi in
    openmpi) options=(--oversubscribe --allow-run-as-root --mca btl "self,vader" --mca btl_vader_single_copy_mechanism none
        --mca mpi_yield_when_idle 1) ;;
    mpich) options=() ;;
    esac
    for n in 2 3 4; do
        echo "$mpi, $n processes"
        log=$(timeout 120 "$launcher" "${options[@]}" -np $n "$program" 2>&1)
        code=$?
        echo "$log"
        line=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' <<<"$log" | tail -1)
        read -r p f < <(sed -E 's/^([0-9]+) passed, ([0-9]+) failed.*/\1 \2/' <<<"${line:-0 passed, 1 failed}")
        [ $code -ne 0 ] && [ "$f" -eq 0 ] && f=1
        passed=$((passed + p)) failed=$((failed + f))
    done
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
