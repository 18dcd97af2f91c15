# SPDX-License-Identifier: Apache-2.0
# The suites of make test, in order. Sourced by run.sh: suite, skip and make_variant are its functions.
# shellcheck shell=bash

if make_variant release "$build" all -DCMAKE_BUILD_TYPE=Release; then
    bin=$build/tests
    suite ref "$bin/test_ref"
    suite ref-route "$bin/test_ref_route"
    suite check "$build/fusedmoe" check
fi
