#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The Python tests, in the .venv that make setup makes; then the small ones under other versions of transformers.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
python/setup.sh || exit 1
.venv/bin/python -m pytest tests/python
