#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# fusedmoe check --backend ascend on the simulated CANN: whole it passes and writes its report; with wrong results
# planted in one operator after the other, each is found, and named among at most three suspects.
#
#   tests/ascend/check_faults.sh FUSEDMOE FOLDER     the program, and a folder of the simulator's libraries
set -uo pipefail
fusedmoe=$1
export FMOE_ASCEND_PATH=$2
passed=0 failed=0
report=$(mktemp)
trap 'rm -f "$report"' EXIT
good() { passed=$((passed + 1)); }
bad() { echo "FAILED  $1"; failed=$((failed + 1)); }

whole=$("$fusedmoe" check --backend ascend --report "$report") && good || { bad "the whole check"; echo "$whole" | grep FAILED; }
[[ $(grep -v '^report: ' <<<"$whole") == "$(cat "$report")" ]] && good || bad "the report is not what was printed"
for needed in 'Ascend910B2' 'CANN ' 'operators used: aclnn' 'verdict: all' ' ms, '; do
    grep -q "$needed" "$report" && good || bad "the report has no '$needed'"
done
operators=$(grep '^operators used:' "$report" | tr ' ' '\n' | grep '^aclnn')
[ "$(wc -l <<<"$operators")" -ge 45 ] && good || bad "only $(wc -l <<<"$operators") operators are used"
for operator in $operators; do
    text=$(FMOE_SIM_SPOIL=${operator#aclnn} "$fusedmoe" check --backend ascend --report - 2>/dev/null)
    code=$? suspects=$(grep -m1 '^suspect' <<<"$text" | grep -o 'aclnn[A-Za-z0-9]*' | tr '\n' ' ')
    if [ $code != 1 ]; then bad "wrong results of $operator: exit status $code"
    elif ! grep -qw "$operator" <<<"$suspects"; then bad "wrong results of $operator: suspects are '$suspects'"
    elif [ "$(wc -w <<<"$suspects")" -gt 3 ]; then bad "wrong results of $operator: $(wc -w <<<"$suspects") suspects, $suspects"
    else good; fi
done
text=$("$fusedmoe" check --backend ascend --device 9 --report -)
[[ $? = 1 && $text = *'verdict: no NPU can be used: Ascend: device 9'* ]] && good || bad "a device that is not there"
text=$(FMOE_ASCEND_PATH=/nonexistent "$fusedmoe" check --backend ascend --report -)
[[ $? = 1 && $text = *'libascendcl.so not found'* ]] && good || bad "no CANN"
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
