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

pins="torch==2.13.0 torch-npu==2.13.0 numpy pyyaml transformers==5.6.0 pytest hypothesis"
# The older pair, in a folder of its own that goes before the rest: torch and torch_npu are shared.
pins4="llamafactory==0.9.4 transformers==4.57.6 tokenizers==0.22.2 huggingface_hub==0.36.2 requests urllib3 charset_normalizer"
if [ "$(cat "$venv/.made-of" 2>/dev/null)" != "$pins $pins4" ]; then
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
    # shellcheck disable=SC2086
    "$venv/bin/pip" install -q --no-deps --target "$venv/v4" $pins4 >>"$log" 2>&1 ||
        { echo "transformers 4.57.6 with llamafactory 0.9.4 cannot be installed: skipped"; rm -rf "$venv/v4"; }
    echo "$pins $pins4" >"$venv/.made-of"
fi

# The package itself, whenever a source has changed: the wheel of `make setup` where it is of these sources.
changed_since() { # file
    [ ! -f "$1" ] ||
        [ -n "$(find include src python pyproject.toml CMakeLists.txt cmake -type f -newer "$1" ! -name '*.pyc' | head -1)" ]
}
if changed_since "$venv/.package"; then
    touch "$venv/.package.new"
    package=(. -C cmake.define.FMOE_CUDA=OFF -C build-dir="$build/python-npu")
    wheel=$(echo .venv/wheel/fusedmoe-*.whl)
    changed_since "$wheel" || package=(--force-reinstall "$wheel")
    if ! "$venv/bin/pip" install -q --no-deps "${package[@]}" >"$log" 2>&1; then
        tail -20 "$log"
        echo "0 passed, 1 failed, 0 skipped"
        exit 1
    fi
    mv "$venv/.package.new" "$venv/.package"
fi

FMOE_SIM=$(realpath "$build/tests/ascend_sim/cann")
export FMOE_SIM
python=$(realpath -s "$venv/bin/python")
FMOE_V4=$(realpath -s "$venv/v4")
export FMOE_V4 # report.py runs itself there
if [ "$what" = report ]; then
    exec "$python" -W ignore tests/ascend/report.py ${file:+"$(realpath "$file")"}
fi

passed=0 failed=0 skipped=0
pytest() { # file: run from elsewhere, for the sources' own python/ must not be imported
    local out
    out=$(cd "$build" && "$python" -m pytest -q -rs -p no:cacheprovider -W ignore --rootdir "$tests" "$tests/$1" 2>&1)
    echo "$out"
    count() { grep -E '(passed|failed|error).* in [0-9.]+s' <<<"$out" | tail -1 | grep -oE "[0-9]+ $1" | grep -oE '[0-9]+' || echo 0; }
    passed=$((passed + $(count passed))) skipped=$((skipped + $(count skipped)))
    failed=$((failed + $(count failed) + $(count error)))
    [ $((passed + failed + skipped)) -gt 0 ] || failed=1
}
tests=$(realpath tests/ascend)
pytest test_torch_npu.py
pytest test_quant_npu.py
pytest test_ep_npu.py
pytest test_strides_npu.py
pytest test_bench_npu.py
if [ -d "$FMOE_V4" ]; then
    PYTHONPATH=$FMOE_V4 pytest test_transformers4.py
else
    echo "SKIPPED: transformers 4.57.6 and llamafactory 0.9.4 on the simulated NPU: they could not be installed"
    skipped=$((skipped + 1))
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
