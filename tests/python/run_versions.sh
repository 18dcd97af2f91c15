#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The models and LLaMA-Factory's interface under older transformers, each in a small environment that borrows torch and
# fusedmoe from the one given: sh tests/python/run_versions.sh [python of an environment with fusedmoe] [folder]
set -eu
python=${1:-.venv/bin/python}
here=$(cd "$(dirname "$0")" && pwd)
venvs=${2:-$here/../../.venv-versions}
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
failed=0

run() { # name, transformers, llamafactory, more packages
    venv=$venvs/$1
    if [ ! -f "$venv/ready" ]; then
        echo "== making $1"
        rm -rf "$venv"
        "$python" -m venv --without-pip "$venv"
        own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "import site; site.addsitedir('$site')" > "$own/borrowed.pth"
        pip="$python -m pip --disable-pip-version-check -q --python $venv/bin/python install"
        $pip "transformers==$2" $4
        $pip --no-deps "llamafactory==$3"
        touch "$venv/ready"
    fi
    echo "== transformers $2, LLaMA-Factory $3"
    "$venv/bin/python" -m pytest -q -p no:cacheprovider "$here/test_models.py" "$here/test_llamafactory.py" "$here/test_kernels.py" || failed=1
}

run v4 4.57.6 0.9.4 "peft==0.18.1 accelerate omegaconf"
run v5 5.6.0 0.9.5 "accelerate omegaconf"
exit $failed
