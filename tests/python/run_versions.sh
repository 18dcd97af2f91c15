#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The models and LLaMA-Factory's interface under older transformers, each in a small environment that borrows torch and
# fusedmoe from the one given: sh tests/python/run_versions.sh [python of an environment with fusedmoe] [folder]
# FMOE_VERSIONS=all adds the oldest supported ones.
set -eu
python=${1:-.venv/bin/python}
here=$(cd "$(dirname "$0")" && pwd)
venvs=${2:-$here/../../.venv-versions}
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
passed=0 failed=0 skipped=0

count() { # line, word
    n=$(echo "$1" | grep -oE "[0-9]+ $2" | grep -oE '[0-9]+' || true)
    echo "${n:-0}"
}

run() { # name, transformers, llamafactory, more packages
    venv=$venvs/$1
    if [ ! -f "$venv/ready" ]; then
        echo "== making $1"
        rm -rf "$venv"
        "$python" -m venv --without-pip "$venv"
        own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "import site; site.addsitedir('$site')" > "$own/borrowed.pth"
        pip="$python -m pip --disable-pip-version-check -qq --python $venv/bin/python install"
        $pip "transformers==$2" $4
        [ "$3" = none ] || $pip --no-deps "llamafactory==$3"
        touch "$venv/ready"
    fi
    echo "== transformers $2, LLaMA-Factory $3"
    log=$venv/log
    "$venv/bin/python" -m pytest -q -p no:cacheprovider "$here/test_models.py" "$here/test_layers.py" "$here/test_mixins.py" "$here/test_lora.py" \
        "$here/test_parallel.py" "$here/test_llamafactory.py" "$here/test_kernels.py" "$here/test_routing.py" "$here/test_routing_models.py" "$here/test_lora_files.py" \
        "$here/test_quant.py" "$here/test_quant_lists.py" "$here/test_quant_loading.py" \
        > "$log" 2>&1 || true
    tail -30 "$log"
    line=$(grep -E '(passed|failed|error).* in [0-9.]+s' "$log" | tail -1)
    p=$(count "$line" passed) f=$(count "$line" failed) e=$(count "$line" error) s=$(count "$line" skipped)
    [ "$p$f$e" != 000 ] || f=1 # pytest did not get that far
    passed=$((passed + p)) failed=$((failed + f + e)) skipped=$((skipped + s))
}

run v4 4.57.6 0.9.4 "peft==0.18.1 accelerate omegaconf"
run v5 5.6.0 0.9.5 "peft==0.18.1 accelerate omegaconf"
if [ "${FMOE_VERSIONS:-1}" = all ]; then # the oldest that are supported
    run v4-oldest 4.51.3 none "peft==0.18.1"
    run v5-oldest 5.0.0 none ""
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
