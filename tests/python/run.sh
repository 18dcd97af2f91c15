#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# All Python tests from a fresh clone: .venv, then the newest transformers. With FMOE_FULL=1 (make test-full) also older
# ones with LLaMA-Factory, and hypothesis draws from FMOE_SEED on; else its draws are always the same.
# Closes with "N passed, N failed, N skipped". FMOE_VERSIONS=0 leaves the older versions out.
set -u
cd "$(dirname "$0")/../.." || exit
if ! python/setup.sh; then
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
fi
log=.venv/test.log
full=${FMOE_FULL:-0} draws=
[ "$full" = 0 ] || draws="--hypothesis-profile=drawn --hypothesis-seed=${FMOE_SEED:-0}"
# shellcheck disable=SC2086 # two options, or none
.venv/bin/python -m pytest -q -rs -p no:cacheprovider $draws tests/python 2>&1 | tee $log
count() { # word in pytest's closing line
    n=$(grep -E '(passed|failed|error).* in [0-9.]+s' $log | tail -1 | grep -oE "[0-9]+ $1" | grep -oE '[0-9]+')
    echo "${n:-0}"
}
passed=$(count passed) failed=$(($(count failed) + $(count error))) skipped=$(count skipped)
[ $((passed + failed)) -gt 0 ] || failed=1
if [ "$full" != 0 ] && [ "${FMOE_VERSIONS:-1}" != 0 ]; then
    sh tests/python/run_versions.sh .venv/bin/python 2>&1 | tee $log
    read -r p _ f _ s _ <<END
$(tail -1 $log)
END
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
