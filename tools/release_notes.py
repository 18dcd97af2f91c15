#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""release_notes.py X.Y.Z: what CHANGELOG.md says of a version. 1, where the sources are of another version or it says nothing."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = {
    "pyproject.toml": r'^version = "([^"]+)"',
    "CMakeLists.txt": r"^project\(fusedmoe VERSION (\S+)",
    "include/fusedmoe.h": r"^#define FMOE_VERSION_MAJOR (\d+)\n#define FMOE_VERSION_MINOR (\d+)\n#define FMOE_VERSION_PATCH (\d+)",
}


def versions() -> dict[str, str]:
    """Every place that names the version, and what it says."""
    found = {place: re.search(pattern, (ROOT / place).read_text(), re.M) for place, pattern in PLACES.items()}
    return {place: ".".join(match.groups()) if match else "none" for place, match in found.items()}


def notes(version: str) -> str:
    """The section "## [X.Y.Z] - date" without its heading; empty where there is none."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", text, re.M | re.S)
    return found[1].strip() if found else ""


def main() -> int:
    wrong = {place: is_of for place, is_of in versions().items() if is_of != sys.argv[1]}
    for place, is_of in wrong.items():
        print(f"{place} is of version {is_of}, not {sys.argv[1]}", file=sys.stderr)
    text = notes(sys.argv[1])
    if not text:
        print(f"CHANGELOG.md has no section [{sys.argv[1]}]", file=sys.stderr)
    print(text)
    return bool(wrong) or not text


if __name__ == "__main__":
    sys.exit(main())
