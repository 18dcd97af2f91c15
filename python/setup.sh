#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# .venv with everything the example and the tests need, and the package in it. Does nothing when nothing has changed.
# FMOE_PYTHON names an interpreter to use; a torch and transformers that are installed there are borrowed, not installed again.
# FMOE_CUDA=ON, OFF or AUTO (where there is nvcc): whether the CUDA backend is built. Without it: AUTO where there is an NVIDIA device.
set -eu
cd "$(dirname "$0")/.."
python=${FMOE_PYTHON:-}
[ -n "$python" ] || python=$(command -v python3)
stamp=.venv/.fusedmoe
state() {
    { echo "$python ${FMOE_CUDA:-}"; find include src cmake python bench/bench.py bench/meters.py CMakeLists.txt pyproject.toml -type f ! -name '*.pyc' ! -path '*/__pycache__/*' |
        LC_ALL=C sort | xargs cksum; } | cksum
}

if [ ! -x .venv/bin/python ]; then
    echo "setup: .venv from $python"
    "$python" -m venv .venv
    if [ -n "${FMOE_PYTHON:-}" ]; then
        site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        own=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "import site; site.addsitedir('$site')" > "$own/borrowed.pth"
    fi
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check -qq "$@"; }
now=$(state)
[ -f $stamp ] && [ "$(cat $stamp)" = "$now" ] && exit 0
wanted=$(cksum < python/requirements-dev.txt)
if [ ! -f $stamp.requirements ] || [ "$(cat $stamp.requirements)" != "$wanted" ]; then
    echo "setup: packages (torch, transformers, ...)"
    if [ -n "${FMOE_PYTHON:-}" ] && .venv/bin/python -c 'import torch' 2>/dev/null; then
        grep -v '^torch==' python/requirements-dev.txt > .venv/requirements.txt
    else
        cp python/requirements-dev.txt .venv/requirements.txt
    fi
    pip install -r .venv/requirements.txt
    echo "$wanted" > $stamp.requirements
fi
cuda=${FMOE_CUDA:-}
[ -n "$cuda" ] || { [ -e /dev/nvidiactl ] && cuda=AUTO; } || cuda=OFF # no NVIDIA device here: nvcc need not work for minutes
echo "setup: building fusedmoe (FMOE_CUDA=$cuda)"
progress() { # of a verbose pip: every file that is compiled, on a terminal in one line that changes; all of it goes to .venv/build.log
    [ -t 1 ] && begin='\r\033[Ksetup: ' end='' || begin='setup: ' end='\n'
    while IFS= read -r line; do
        printf '%s\n' "$line" >&3
        case $line in
        *"CUDA backend:"*) printf 'setup: CUDA backend:%s\n' "${line#*CUDA backend:}" ;;
        *\[*[0-9]*\]\ [BL]*ing\ *) printf "$begin%s$end" "${line#"${line%%[![:space:]]*}"}" ;;
        esac
    done 3>.venv/build.log
    [ -t 1 ] && echo || true
}
rm -rf $stamp .venv/wheel # left there for other environments (tests/ascend/run_torch.sh), as old as the sources it began with
touch .venv/begun
{ PATH=$PWD/.venv/bin:$PATH .venv/bin/python -m pip --disable-pip-version-check -v wheel --no-build-isolation --no-deps -w .venv/wheel \
    -C build-dir=.venv/build -C cmake.define.FMOE_CUDA="$cuda" . 2>&1 || echo "setup: pip failed"; } | progress
if ! ls .venv/wheel/*.whl >/dev/null 2>&1; then
    tail -60 .venv/build.log
    exit 1
fi
pip install --no-deps --force-reinstall .venv/wheel/*.whl
touch -r .venv/begun .venv/wheel/*.whl
.venv/bin/python -c 'import fusedmoe; print("setup: fusedmoe", fusedmoe.__version__, "in .venv")'
echo "$now" > $stamp
