# SPDX-License-Identifier: Apache-2.0
"""python -m fusedmoe: what there is on this machine and whether it computes right. See diagnose.py."""

from .diagnose import main

if __name__ == "__main__":
    raise SystemExit(main())
