#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh TARGET SECONDS: new inputs for one program of tests/fuzz, from a seed that libFuzzer takes from the clock and prints.
# What it finds is left in build/found; an input that breaks something goes into tests/fuzz/corpus once it is mended.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz --target "fuzz_$1"
mkdir -p build/found build/new
"build/fuzz/tests/fuzz_$1" -max_total_time="$2" -max_len=2048 -timeout=10 -artifact_prefix=build/found/ build/new "tests/fuzz/corpus/$1"
