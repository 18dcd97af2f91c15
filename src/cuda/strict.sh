#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a compiler and fails when the assembler says that wgmma was serialised or setmaxnreg ignored: such a kernel works, at a
# fraction of its speed, and nobody reads remarks.
out=$("$@" 2>&1)
status=$?
[ -z "$out" ] || printf '%s\n' "$out"
if printf '%s' "$out" | grep -qE 'C75[0-9][0-9]|C76[0-9][0-9]'; then
    echo "error: the assembler's remark above means a slow kernel" >&2
    exit 1
fi
exit $status
