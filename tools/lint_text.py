#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What no other linter looks at: columns, bytes and the licence line. Names of files on stdin, a line for each fault, 1 if there is one."""

import sys
from collections.abc import Iterator
from pathlib import Path

C = (".c", ".h", ".inc", ".cpp", ".cu", ".cuh")
CODE = (*C, ".py", ".pyi", ".sh", ".cmake", ".yml", ".yaml", ".toml")
COLUMNS = dict.fromkeys(C, 120)  # clang-format leaves what it cannot break; ruff counts Python's
NOT_OURS = ("tests/golden/", "tests/corpus/", "tests/fuzz/corpus/", "bench/results/", "docs/charts/")


def faults(path: str, data: bytes) -> Iterator[str]:
    suffix, name = Path(path).suffix, Path(path).name
    code = suffix in CODE or name in ("CMakeLists.txt", "Makefile", ".clang-tidy") or data.startswith(b"#!")
    if not code and suffix != ".md":
        return
    lines = data.split(b"\n")
    if lines.pop() != b"":
        yield f"{path}:{len(lines) + 1}: no newline at the end"
    if code and not any(b"SPDX-License-Identifier: Apache-2.0" in line for line in lines[:3]):
        yield f"{path}:1: no SPDX line among the first three"
    for number, line in enumerate(lines, 1):
        at = f"{path}:{number}"
        if any(byte > 126 for byte in line):
            yield f"{at}: not ASCII"
        if b"\t" in line and name != "Makefile":
            yield f"{at}: a tab"
        if line != line.rstrip():
            yield f"{at}: blanks at the end"
        if len(line) > COLUMNS.get(suffix, len(line)):
            yield f"{at}: {len(line)} columns, at most {COLUMNS[suffix]}"


def main() -> int:
    count = 0
    for path in sys.stdin.read().split("\n"):
        if path and not path.startswith(NOT_OURS):
            for fault in faults(path, Path(path).read_bytes()):
                count += 1
                print(fault)
    return count > 0


if __name__ == "__main__":
    sys.exit(main())
