"""Codes of 1 to 6 bits out of their planes, as whole numbers.

A code of three, five or six bits lies in two planes, its low and its high bits. Bytes of a plane
hold fields of inputs that are a field's width apart, so every field of a tile is one shift and one
mask, and no number moves to another thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["code_field", "table_value"]


@triton.jit
def _plane_field(
    tiles, f, first, N, spots,
    WIDTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Field f of a plane whose first tile is `first`."""
    PER: tl.constexpr = 8 // BITS
    tile = tl.load(tiles + (first + f // PER) * N * WIDTH + spots)
    return (tile.to(tl.int32) >> (f % PER * BITS)) & ((1 << BITS) - 1)


@triton.jit
def code_field(
    tiles, f: tl.constexpr, N, spots,
    WIDTH: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Field f of a slab [tiles, N, WIDTH] at `spots`, places within a tile: int32."""
    q = _plane_field(tiles, f, 0, N, spots, WIDTH, LOW)
    if HIGH > 0:
        UNIT: tl.constexpr = HIGH if HIGH < LOW else LOW
        q |= _plane_field(tiles, f, LOW // UNIT, N, spots, WIDTH, HIGH) << LOW
    return q


@triton.jit
def table_value(table, q, rows, KIND: tl.constexpr, PLAIN: tl.constexpr):
    """What codes of four bits stand for: a table of fp32 for all, or of signed bytes for each row.

    Triton would copy what its own loads read ahead of time, one number after the other, and in
    another layout. So these are instructions; PLAIN: not in the interpreter, which knows none."""
    if KIND == "table" and PLAIN:
        value = tl.load(table + q)
    elif KIND == "table":
        value = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [table + q],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif PLAIN:
        value = tl.load(table + rows[:, None] * 16 + q).to(tl.float32)
    else:
        number = tl.inline_asm_elementwise(
            "ld.global.nc.s8 $0, [$1];", "=r,l", [table + rows[:, None] * 16 + q],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        value = number.to(tl.float32)
    return value
