#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# make test: build the library, run what a newcomer runs, and close with one line of counts. make test-full: everything
# (also sanitizers, fuzzing, emulators, CUDA's build and its kernels on a simulated device, older versions of packages), with draws that are new in every run.
#
# A suite is a command that prints "N passed, N failed, N skipped" (a pytest summary counts as well). A suite that
# prints no such line, or ends with an error and no failure counted, is itself one failure. Only a tool that is not
# installed may be a skip, and every skip is listed with its reason.
#
#   tests/run.sh [--full] [--seed N] [suite ...]
#   suite ...                    only the suites whose name contains one of the words (asan-...: builds that alone)
#   --seed N                     where drawing begins; FMOE_SEED does the same. Without: 1, with --full the clock
#   FMOE_TEST_BUILD=dir          where to build (default build/; variants in dir/asan, dir/tsan, dir/fuzz)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
build=${FMOE_TEST_BUILD:-build}
full=0 seed=${FMOE_SEED:-} only=()
while [ $# -gt 0 ]; do
    case $1 in
    --full) full=1 ;;
    --seed) seed=$2 && shift ;;
    --*) echo "run.sh: no option $1" && exit 2 ;;
    *) only+=("$1") ;;
    esac
    shift
done
if [ -z "$seed" ]; then seed=$([ $full = 1 ] && date +%s || echo 1); fi
case $seed in *[!0-9]*) echo "run.sh: the seed is a number, not '$seed'" && exit 2 ;; esac
export FMOE_FULL=$full FMOE_SEED=$seed # tests/python/run.sh
echo "seed $seed"
begun=$(date +%s)
log_folder=$build/test-logs
mkdir -p "$log_folder"
# What the suites report, a line each: suites of the second lane (suites.sh) run in a process of their own.
results=$log_folder/results skips=$log_folder/skips failures=$log_folder/failures
: >"$results" && : >"$skips" && : >"$failures"
if command -v ninja >/dev/null; then generator=Ninja; else generator="Unix Makefiles"; fi

selected() { # name
    [ ${#only[@]} -eq 0 ] && return 0
    local word
    for word in "${only[@]}"; do [[ $1 == *"$word"* ]] && return 0; done
    return 1
}

add() { # name passed failed skipped seconds
    printf '%-28s %6d passed %4d failed %4d skipped %7.1f s\n' "$1" "$2" "$3" "$4" "$5" | tee -a "$results"
    if [ "$3" -gt 0 ]; then echo "failed: $1: see $log_folder/$1.log" >>"$failures"; fi
}

# A suite that cannot run here and may be skipped: a tool or a device that is missing.
skip() { # name reason
    selected "$1" || return 0
    echo "skipped: $1: $2" >>"$skips"
    add "$1" 0 0 1 0
}

suite() { # name command ...
    local name=$1 log code begin end p f s line
    shift
    selected "$name" || return 0
    log=$log_folder/$name.log
    begin=$(date +%s.%N)
    "$@" >"$log" 2>&1
    code=$?
    end=$(date +%s.%N)
    p=0 f=0 s=0
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log" | tail -1)
    if [ -n "$line" ]; then
        read -r p f s <<<"$(sed -E 's/^([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped$/\1 \2 \3/' <<<"$line")"
    else # pytest: "== 3 failed, 12 passed, 1 skipped, 2 errors in 1.2s =="
        line=$(grep -E '(passed|failed|error|skipped).* in [0-9.]+s' "$log" | tail -1)
        p=$(grep -oE '[0-9]+ passed' <<<"$line" | grep -oE '[0-9]+' || echo 0)
        f=$(($(grep -oE '[0-9]+ failed' <<<"$line" | grep -oE '[0-9]+' || echo 0) +
             $(grep -oE '[0-9]+ errors?' <<<"$line" | grep -oE '[0-9]+' || echo 0)))
        s=$(grep -oE '[0-9]+ skipped' <<<"$line" | grep -oE '[0-9]+' || echo 0)
    fi
    if [ -z "$line" ]; then
        echo "$name printed no counts; its end:" && tail -20 "$log"
        f=1
    elif [ "$code" -ne 0 ] && [ "$f" -eq 0 ]; then
        echo "$name: exit code $code; its end:" && tail -20 "$log"
        f=1
    elif [ "$f" -gt 0 ]; then
        grep -E -B8 '^FAILED' "$log" | head -60
    fi
    if [ "$s" -gt 0 ]; then # the reason stands before the line that says SKIP, or in it
        while read -r line; do echo "skipped: $name: $line" >>"$skips"; done \
            < <(grep -E -B1 '^SKIP' "$log" | grep -vE '^(--|ok .*|=+ .*)$' | sed -E 's/^SKIPPED \[[0-9]+\] ([^:]+):[0-9]+: /\1: /' |
                awk '!seen[$0]++' | head -20)
    fi
    add "$name" "$p" "$f" "$s" "$(echo "$end $begin" | awk '{print $1 - $2}')"
}

# Whether a suite of a variant may be selected: not where every word begins with another variant's name.
needed() { # variant
    local word
    for word in "${only[@]}"; do
        [[ $word =~ ^(arm64|asan|tsan|fuzz|cuda)- && $word != "$1"-* ]] || return 0
    done
    [ ${#only[@]} -eq 0 ]
}

# Configure and build one variant; a build that fails is a failed suite.
make_variant() { # name folder targets(or all) cmake-options ...
    local name=$1 folder=$2 targets=$3 begin end
    shift 3
    needed "$name" || return 1
    begin=$(date +%s.%N)
    if ! { cmake -S . -B "$folder" -G "$generator" -DFMOE_TESTS=ON -DFMOE_WERROR=ON "$@" &&
           cmake --build "$folder" --parallel 2 --target $targets; } >"$log_folder/build-$name.log" 2>&1; then
        grep -E 'error|Error' "$log_folder/build-$name.log" | head -20
        end=$(date +%s.%N)
        add "build-$name" 0 1 0 "$(echo "$end $begin" | awk '{print $1 - $2}')"
        return 1
    fi
    end=$(date +%s.%N)
    add "build-$name" 1 0 0 "$(echo "$end $begin" | awk '{print $1 - $2}')"
}

source tests/suites.sh

echo
cat "$results" "$skips" "$failures"
read -r passed failed skipped < <(awk '{p += $2; f += $4; s += $6} END {print p + 0, f + 0, s + 0}' "$results")
echo "seed $seed, $((($(date +%s) - begun) / 60)) minutes; the same again: tests/run.sh$([ $full = 0 ] || echo ' --full') --seed $seed"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
