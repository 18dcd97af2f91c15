#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# The unmodified torch-npu wheel on the simulated NPU: set up an environment of its own, then run the tests in it, or
# the report.
#
#   tests/ascend/run_torch.sh test            [build folder]
#   tests/ascend/run_torch.sh report [FILE]   [build folder]     FILE: docs/ascend.md, to write the tables there
#
# The environment is made once (build/venv-npu; FMOE_NPU_VENV names another place) and kept: torch_npu loads itself with
# every `import torch`, so no other test may share it. FMOE_NPU_PYTHON names the interpreter, 3.11 by default: that is
# what the wheel is for. Where it cannot be installed everything is skipped, which is said and counted.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
what=${1:-test}
file=
if [ "$what" = report ] && [ -n "${2:-}" ] && [ -f "${2:-}" ]; then file=$2; shift; fi
build=${2:-build}
venv=${FMOE_NPU_VENV:-$build/venv-npu}
log=$build/venv-npu.log
mkdir -p "$build"

skip() {
    echo "SKIPPED: torch_npu on the simulated NPU: $1"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
}

if [ ! -d "$build/tests/ascend_sim/cann" ]; then
    echo "$build/tests/ascend_sim/cann is missing: build first (cmake --build $build)"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
fi

pins="torch==2.13.0 torch-npu==2.13.0 numpy pyyaml transformers==5.6.0 pytest"
if [ "$(cat "$venv/.made-of" 2>/dev/null)" != "$pins" ]; then
    python=${FMOE_NPU_PYTHON:-$(command -v python3.11 || command -v python3)}
    [ -x "$python" ] || skip "no Python 3.11"
    echo "setting up $venv (once)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || skip "python -m venv does not work here"
    # shellcheck disable=SC2086
    if ! "$venv/bin/pip" install -q $pins >"$log" 2>&1; then
        tail -5 "$log"
        skip "torch-npu 2.13.0 cannot be installed with $("$python" --version 2>&1)"
    fi
    "$venv/bin/pip" install -q --no-deps llamafactory==0.9.5 >>"$log" 2>&1 ||
        echo "llamafactory 0.9.5 cannot be installed: its tests are skipped"
    echo "$pins" >"$venv/.made-of"
fi

# The package itself, whenever a source has changed.
sources="include src python pyproject.toml CMakeLists.txt cmake"
# shellcheck disable=SC2086
newest=$(find $sources -type f -newer "$venv/.package" 2>/dev/null | head -1)
if [ ! -f "$venv/.package" ] || [ -n "$newest" ]; then
    touch "$venv/.package.new"
    if ! "$venv/bin/pip" install -q --no-deps . -C cmake.define.FMOE_CUDA=OFF -C build-dir="$build/python-npu" \
        >"$log" 2>&1; then
        tail -20 "$log"
        echo "0 passed, 1 failed, 0 skipped"
        exit 1
    fi
    mv "$venv/.package.new" "$venv/.package"
fi

FMOE_SIM=$(realpath "$build/tests/ascend_sim/cann")
export FMOE_SIM
python=$(realpath -s "$venv/bin/python")
if [ "$what" = report ]; then
    "$python" -W ignore tests/ascend/report.py ${file:+"$(realpath "$file")"}
else
    # From elsewhere: the sources' own python/ must not be imported.
    tests=$(realpath tests/ascend)
    cd "$build" && "$python" -m pytest -q -p no:cacheprovider -W ignore --rootdir "$tests" "$tests/test_torch_npu.py"
fi
