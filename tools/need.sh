#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# need.sh NAME: the packages of requirements-NAME.txt are in .venv, which is made if there is none. Does nothing when nothing has changed.
set -eu
cd "$(dirname "$0")/.."
list=tools/requirements-$1.txt stamp=.venv/.fusedmoe.$1
[ -x .venv/bin/python ] || "${FMOE_PYTHON:-python3}" -m venv .venv
wanted=$(cksum < "$list")
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0
echo "$1: packages ($(grep -v '^#' "$list" | tr '\n' ' ' | sed 's/ $//'))"
.venv/bin/python -m pip --disable-pip-version-check -qq install -r "$list"
echo "$wanted" > "$stamp"
