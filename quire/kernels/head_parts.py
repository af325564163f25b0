"""A head in parts: how queries and sums lie where the cache keeps several codes in a word.

Codes are read as words of 16 bits (`coded_tile.py`). Part i of a head are the dimensions that have
the i-th code of each word: every second or fourth one. Keys are multiplied part by part, one
product added to the other, and values give sums part by part, so no code ever moves to another
register. Floats are one part. All kernels do it alike, so the order of sums is the same in all.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import constexpr_function

NARROWEST = 16  # what the matrix units want


@constexpr_function
def num_parts(bits: int) -> int:
    return 16 // bits if bits else 1


@constexpr_function
def part_pad(head_pad: int, bits: int) -> int:
    """Width of a tile that holds one part of a head."""
    return max(head_pad // (16 // bits if bits else 1), NARROWEST)


@triton.jit
def load_parts(
    q, head, keep, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """([BLOCK_M, part] of queries at heads [BLOCK_M]) by part; zeros where they are not kept."""
    PARTS: tl.constexpr = num_parts(BITS)
    parts = tl.tuple([])
    for i in tl.static_range(PARTS):
        place, is_there = _places(i, head, keep, HEAD_DIM, HEAD_PAD, BITS)
        parts = parts + (tl.load(q + place, mask=is_there, other=0.0),)  # noqa: RUF005
    return parts


@triton.jit
def store_parts(
    out, head, keep, parts, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """What `load_parts` would read."""
    for i in tl.static_range(len(parts)):
        place, is_there = _places(i, head, keep, HEAD_DIM, HEAD_PAD, BITS)
        tl.store(out + place, parts[i].to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _places(
    i: tl.constexpr, head, keep,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = part_pad(HEAD_PAD, BITS)
    PARTS: tl.constexpr = num_parts(BITS)
    dims = tl.arange(0, WIDTH) * PARTS + i
    return head[:, None] * HEAD_DIM + dims[None, :], keep[:, None] & (dims < HEAD_DIM)[None, :]


@triton.jit
def zero_parts(BLOCK_M: tl.constexpr, HEAD_PAD: tl.constexpr, BITS: tl.constexpr):
    PARTS: tl.constexpr = num_parts(BITS)
    WIDTH: tl.constexpr = part_pad(HEAD_PAD, BITS)
    parts = tl.tuple([])
    for _ in tl.static_range(PARTS):
        zeros = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        parts = parts + (zeros,)  # noqa: RUF005
    return parts


@triton.jit
def fold_parts(old, old_weight, new, new_weight):
    """`paged_tile.fold` of sums, part by part."""
    parts = tl.tuple([])
    for i in tl.static_range(len(old)):
        folded = tl.fma(new[i], new_weight[:, None], old[i] * old_weight[:, None])
        parts = parts + (folded,)  # noqa: RUF005
    return parts


@triton.jit
def divided_parts(parts, total):
    divided = tl.tuple([])
    for i in tl.static_range(len(parts)):
        divided = divided + (parts[i] / total[:, None],)  # noqa: RUF005
    return divided
