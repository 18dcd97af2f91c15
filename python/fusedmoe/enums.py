# SPDX-License-Identifier: Apache-2.0
"""Names for the numbers of fusedmoe.h. Functions take the member, its number or its name: ``Activation.GEGLU``, ``1``, ``"geglu"``."""

from enum import IntEnum, IntFlag


class Activation(IntEnum):
    """fmoe_act: what stands between the two products. Those from SILU on have no gate."""

    SWIGLU = 0
    GEGLU = 1
    GEGLU_TANH = 2
    REGLU = 3
    SWIGLU_CLAMP = 4
    SWIGLU_OAI = 5
    SWIGLU_CLAMP_OUT = 6
    SILU = 16
    GELU = 17
    GELU_TANH = 18
    RELU = 19
    RELU2 = 20


class Score(IntEnum):
    """fmoe_score: what a router makes of its logits."""

    SOFTMAX = 0
    TOPK_SOFTMAX = 1
    SIGMOID = 2
    SQRT_SOFTPLUS = 3


class Flag(IntFlag):
    """Flags of a layer: those of fmoe_desc, and how Python gives the weights."""

    INTERLEAVED = 1 << 0  # gate and up columns alternate
    BIAS = 1 << 1  # w has b1 and b2
    RECOMPUTE = 1 << 2  # save x alone, compute h again in the backward
    SKIP_NEG1 = 1 << 3  # the id -1 skips a slot
    SKIP_E = 1 << 4  # the id E skips a slot
    SHARED_GATE = 1 << 5
    ROUND_STEPS = 1 << 6  # round where transformers' own code does
    REUSE_SAVED = 1 << 7  # the backward may overwrite what was saved
    BORROW_DW1 = 1 << 8  # the backward computes in the memory of W1's gradient
    KEEP_ALL = 1 << 10  # an NPU keeps everything for the backward
    KEEP_LEAN = 1 << 11  # an NPU keeps h alone for the backward, a quarter
    SAME_BITS = 1 << 12  # on CUDA: a token's bits in any batch, for few tokens at some cost
    LIST = 1 << 16  # one matrix an expert: gates, ups, downs
    TRANSPOSED = 1 << 17  # stacks are [E,in,out]
