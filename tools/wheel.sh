#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# make wheel: dist/fusedmoe-*-manylinux_*.whl, one for all Pythons from 3.10 on, tried in an empty environment.
# FMOE_CUDA=ON puts the CUDA backend into it (nvcc is needed), with code for every card unless FMOE_CUDA_ARCHS says otherwise. FMOE_SMOKE=0: do not try it.
# The tag says which glibc it needs: that of the machine it is built on, or an older one. Releases are built in manylinux images.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/need.sh wheel
bin=$PWD/.venv/bin
work=$(mktemp -d)
mkdir -p build
trap 'rm -rf "$work"' EXIT

export FMOE_CUDA=${FMOE_CUDA:-OFF} FMOE_CUDA_ARCHS=${FMOE_CUDA_ARCHS:-all}
echo "wheel: building (FMOE_CUDA=$FMOE_CUDA)"
PATH=$bin:$PATH "$bin/python" -m build --wheel --no-isolation --outdir "$work/built" -C build-dir=build/wheel . >build/wheel.log 2>&1 || {
    tail -40 build/wheel.log
    exit 1
}
rm -f dist/fusedmoe-*.whl
PATH=$bin:$PATH "$bin/auditwheel" repair --wheel-dir dist "$work"/built/*.whl
wheel=$(echo dist/fusedmoe-*manylinux*.whl)
[ "${FMOE_SMOKE:-1}" = 0 ] && exit 0

echo "wheel: trying $wheel"
"$bin/python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip --disable-pip-version-check -qq install "$(grep '^torch==' python/requirements-dev.txt)" "$wheel"
(cd "$work" && "$work/venv/bin/python" -W ignore::UserWarning "$OLDPWD/tools/smoke.py" && "$work/venv/bin/fusedmoe" --help >/dev/null)
ls -l "$wheel"
