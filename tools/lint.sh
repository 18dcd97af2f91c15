#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# make lint: what can be said about the sources without running them. Closes with one line of counts.
#
#   tools/lint.sh            text, ruff, clang-format, shellcheck, clang-tidy, mypy
#   tools/lint.sh ruff text  only these
#   tools/lint.sh --fix      what ruff and clang-format can mend by themselves (make format)
#
# The versions are those of tools/requirements-lint.txt, in .venv; shellcheck is Debian's. mypy also needs torch (make setup).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
tools/need.sh lint || exit 2
bin=.venv/bin passed=0 failed=0 skipped=0

files() { # pattern ...: those that git knows or would take
    git ls-files --cached --others --exclude-standard -- "$@" | sort -u | while read -r file; do [ -f "$file" ] && echo "$file"; done
}
c_files() { files '*.c' '*.h' '*.cpp' '*.cu' '*.cuh'; }

text() { files | $bin/python tools/lint_text.py; }
ruff() { $bin/ruff check --quiet --output-format concise .; }
# Only the names: `make format` shows and mends the rest.
clang_format() { ! c_files | xargs -n 40 $bin/clang-format --dry-run 2>&1 | sed -n 's/^\([^ :]*\):.*-Wclang-format-violations.*/\1 (make format)/p' | sort -u | grep .; }
# Scripts, and with them the files that they source.
shell_check() {
    files | xargs awk 'FNR == 1 && /^#!.*(\/|env )(ba)?sh/ {print FILENAME} FNR > 1 {nextfile}' |
        xargs shellcheck --severity=warning --external-sources --check-sourced --source-path=.:SCRIPTDIR
}

# .clang-tidy says which checks. The analyzer looks into functions one by one (shallow), which takes a sixth of the time.
clang_tidy() {
    local folder=build/lint
    cmake -S . -B $folder -DFMOE_CUDA=OFF -DFMOE_TESTS=OFF -DCMAKE_BUILD_TYPE=Release >build/lint.log || { cat build/lint.log && return 1; }
    $bin/python -c "
import json
for file in sorted({entry['file'] for entry in json.load(open('$folder/compile_commands.json'))}): print(file)" |
        xargs -n 8 -P 2 $bin/clang-tidy -p $folder --quiet --extra-arg=-Wno-unknown-warning-option --extra-arg=-Xclang \
            --extra-arg=-analyzer-config --extra-arg=-Xclang --extra-arg=mode=shallow 2>$folder/clang-tidy.log
}

mypy() { $bin/mypy; } # pyproject.toml says of what

run() { # function: what it prints is shown where it fails
    local begin=$SECONDS
    if "$1" >"$log" 2>&1; then
        passed=$((passed + 1)) && echo "ok      $1 ($((SECONDS - begin)) s)"
    else
        failed=$((failed + 1)) && cat "$log" && echo "FAILED  $1"
    fi
}

skip() { # name reason
    skipped=$((skipped + 1)) && echo "$2" && echo "SKIP    $1"
}

if [ "${1-}" = --fix ]; then
    $bin/ruff check --quiet --fix . || true
    c_files | xargs -n 40 $bin/clang-format -i
    exit
fi
log=$(mktemp) && trap 'rm -f "$log"' EXIT
mkdir -p build
[ $# -gt 0 ] || set -- text ruff clang_format shell_check clang_tidy mypy
for name; do
    case $name in
    text | ruff | clang_format | clang_tidy) run "$name" ;;
    shell_check) if command -v shellcheck >/dev/null; then run shell_check; else skip shell_check "shellcheck is not installed (Debian: shellcheck)"; fi ;;
    mypy) if $bin/python -c 'import torch' 2>/dev/null; then run mypy; else skip mypy "torch is not in .venv: make setup"; fi ;;
    *) echo "lint.sh: there is no $name" && exit 2 ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
