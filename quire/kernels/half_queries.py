"""Queries of bf16 as fp16, for keys whose codes the device turns into fp16 in one instruction.

E4M3 becomes a pair of fp16 in one conversion, a pair of bf16 in seven steps. A query has bf16's
range, so each row gives up a power of two that brings its largest number just below fp16's largest;
logits get it back. All of it is exact, but for numbers below 2**-31 of their row's largest.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import constexpr_function

_MOST = tl.constexpr(14)  # exponent of a row's largest number as fp16
_LEAST = tl.constexpr(16)  # of what is divided by, as fp32 stores it: rows of zeros, or next to it
_TWICE = tl.constexpr(2 * 127)  # what fp32 adds to the exponents of two numbers


@constexpr_function
def takes_halves(bits: int, words: object, dtype: object) -> bool:
    """Whether words of codes are fp8's and meet bf16; those of int8 have a sign."""
    return bits == 8 and words == tl.uint16 and dtype == tl.bfloat16


@triton.jit
def half_queries(q):
    """(parts of q [BLOCK_M, part] as fp16, what logits of each row [BLOCK_M] are multiplied by)."""
    most = tl.max(tl.abs(q[0].to(tl.float32)), 1)
    for i in tl.static_range(1, len(q)):
        most = tl.maximum(most, tl.max(tl.abs(q[i].to(tl.float32)), 1))
    exponent = tl.maximum(most.to(tl.int32, bitcast=True) >> 23, _LEAST)
    down = ((-exponent + (_TWICE + _MOST)) << 23).to(tl.float32, bitcast=True)
    halves = tl.tuple([])
    for i in tl.static_range(len(q)):
        halves = halves + ((q[i].to(tl.float32) * down[:, None]).to(tl.float16),)  # noqa: RUF005
    back = ((exponent - _MOST) << 23).to(tl.float32, bitcast=True)
    return halves, back
