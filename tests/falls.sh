#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# falls.sh PROGRAM: run it and see that the loss it prints falls to less than half, and that every number is one.
set -uo pipefail
out=$("$@") || { echo "$out"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }
echo "$out"
if awk '/loss/ { last = $NF + 0; if (!n++) first = last; if ($NF !~ /^[0-9.]+$/) bad = 1 }
        END { exit !(n > 2 && !bad && last < first / 2) }' <<<"$out"
then echo "1 passed, 0 failed, 0 skipped"
else echo "the loss does not fall"; echo "0 passed, 1 failed, 0 skipped"; exit 1
fi
