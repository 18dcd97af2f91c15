# SPDX-License-Identifier: Apache-2.0
"""Formats of quantised weights: fmoe_quant without its tensors, and those that have a name."""

from typing import NamedTuple

import torch

E4M3, S8, E2M1, NF4, FP4, U4, LUT4 = range(1, 8)  # fmoe_code
E8M0, E4M3_SCALE = 1, 2  # fmoe_scale_type
HIGH_FIRST, HALVES = 1, 2  # fmoe_quant.flags


class Format(NamedTuple):
    """How codes become weights: (code - zero) * scale, a scale for rows x cols codes (0: all of them)."""

    name: str
    code: int
    flags: int = 0
    rows: int = 1
    cols: int = 0
    scale_type: int = 0
    zero: float = 0.0
    scale_dtype: torch.dtype = torch.float32
    scale2: float = 0.0  # 0: none

    @property
    def bits(self) -> int:
        return 4 if self.code >= E2M1 else 8

    def bytes_of(self, K: int) -> int:
        """Of a row of K codes."""
        return -(-K // 2) if self.bits == 4 else K

    def grid(self, N: int, K: int) -> tuple[int, int]:
        """Rows and columns of scales of a matrix N x K."""
        rows = lambda n: -(-n // self.rows) if self.rows else 1
        return (2 * rows(N // 2) if self.flags & HALVES else rows(N)), (-(-K // self.cols) if self.cols else 1)


FORMATS = {
    f.name: f
    for f in (
        Format("nf4", NF4, HIGH_FIRST, 1, 64),  # bitsandbytes' bytes
        Format("fp4", FP4, HIGH_FIRST, 1, 64),
        Format("fp8", E4M3, 0, 128, 128),
        Format("mxfp4", E2M1, 0, 1, 32, E8M0, scale_dtype=torch.uint8),
        Format("int8", S8, 0, 1, 0, scale2=1 / 127),  # bitsandbytes' bytes: the scale is a row's largest magnitude
        Format("int4", U4, 0, 1, 128, zero=8.0),
    )
}


def by_name(name: str) -> Format:
    """The format of a name; ValueError names those that there are."""
    if name not in FORMATS:
        raise ValueError(f"quantize: the format is {name!r}, expected one of {', '.join(FORMATS)}")
    return FORMATS[name]
