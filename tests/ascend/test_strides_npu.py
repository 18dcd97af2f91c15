# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, I001
"""tests/python/test_strides.py on the simulated NPU: drawn strides of every argument of every public function, the bits of the contiguous
call, and no rule of CANN's broken on the way."""

import os
import sys

import npu  # before torch
import pytest
import torch

os.environ.setdefault("FMOE_STRIDE_CALLS", "25")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
from test_strides import (
    test_activation, test_block, test_experts, test_forwards_of_modules, test_grouped_matmul, test_permute_and_unpermute, test_route,
)  # fmt: skip


@pytest.fixture(autouse=True)
def clean():
    npu.forgive()
    npu.reset()
    yield
    torch.npu.synchronize()
    assert npu.violation() == ""
    assert [npu.get(f"live_{n}") for n in ("tensors", "lists", "scalars", "arrays", "executors")] == [0] * 5
    assert npu.get("hollow_launches") == 0
