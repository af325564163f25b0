"""Two of every four weights and their places, as the four they stand for.

A byte holds the places of two runs of four: of one run, and of the run half a slab behind. Both
values of a run lie in planes of their own, so that a field's runs are neighbours in each. What is
laid out for Hopper's streaming kernel (`slabs.sparse_in_lanes`) is read by `sparse_lanes` instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["sparse_field", "sparse_lanes"]


@triton.jit
def sparse_field(
    places, values, rows, slab, f: tl.constexpr, N,
    WIDTH: tl.constexpr,  # inputs of a field; four to a run
):  # fmt: skip
    """[rows, WIDTH] of field f. places [slabs, N, runs] bytes, values [slabs, 2, 2, N, runs]."""
    RUNS: tl.constexpr = WIDTH // 4
    spots = rows.to(tl.int64)[:, None] * RUNS + tl.arange(0, RUNS)[None, :]
    byte = tl.load(places + slab.to(tl.int64) * N * RUNS + spots).to(tl.int32) >> (f * 4)
    first_place, second_place = byte & 3, (byte >> 2) & 3
    plane = slab.to(tl.int64) * 4 + f * 2
    first = tl.load(values + plane * N * RUNS + spots)
    second = tl.load(values + (plane + 1) * N * RUNS + spots)
    zero = tl.zeros_like(first)
    w0 = tl.where(first_place == 0, first, tl.where(second_place == 0, second, zero))
    w1 = tl.where(first_place == 1, first, tl.where(second_place == 1, second, zero))
    w2 = tl.where(first_place == 2, first, tl.where(second_place == 2, second, zero))
    w3 = tl.where(first_place == 3, first, tl.where(second_place == 3, second, zero))
    four = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [rows, RUNS, 2, 2]
    return four.reshape(first.shape[0], WIDTH)


@triton.jit
def sparse_lanes(bits, values, rows, slab, f: tl.constexpr, N):
    """[rows, 64] of field f. bits [slabs, N, 16] bytes, values [slabs, N, 64]."""
    run = tl.arange(0, 16)[None, :]  # 4 j + 2 c + s
    s, number = run % 2, run // 2
    row = slab.to(tl.int64) * N + rows.to(tl.int64)[:, None]
    pair = values + row * 64 + s * 32 + f * 16 + number * 2
    low, high = tl.load(pair), tl.load(pair + 1)
    byte = bits + row * 16 + s * 8 + f * 2  # of h = 0 and p = 0
    has0 = (tl.load(byte).to(tl.int32) >> number) & 1 != 0
    has1 = (tl.load(byte + 1).to(tl.int32) >> number) & 1 != 0
    has2 = (tl.load(byte + 4).to(tl.int32) >> number) & 1 != 0
    has3 = (tl.load(byte + 5).to(tl.int32) >> number) & 1 != 0
    zero = tl.zeros_like(low)
    w0, w1 = tl.where(has0, low, zero), tl.where(has1, tl.where(has0, high, low), zero)
    w2, w3 = tl.where(has2, high, zero), tl.where(has3, tl.where(has2, low, high), zero)
    four = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [rows, 16, 2, 2]
    return four.reshape(low.shape[0], 64)
