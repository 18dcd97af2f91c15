#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# slow_kernels.sh error|warning COMMAND...: runs a compiler and says aloud, or fails, when the assembler spilled
# registers, serialised wgmma or ignored setmaxnreg: such a kernel works, at a fraction of its speed, and nobody reads
# remarks.
level=$1
shift
out=$("$@" 2>&1)
status=$?
[ -z "$out" ] || printf '%s\n' "$out"
if printf '%s' "$out" | grep -qE 'C75[0-9][0-9]|C76[0-9][0-9]|spill'; then
    echo "$level: the assembler's remark above means a slow kernel" >&2
    [ "$level" = warning ] || exit 1
fi
exit $status
