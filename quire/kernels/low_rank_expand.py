"""The second half of what adapters add: B times the ranks, onto sums, before they are rounded.

y = round(sums + B (scale * h)), and the gate from rounded numbers as products themselves apply it.
The chains of `low_rank_shrink.py` are added in their order. The matrix unit multiplies by B, always
for tiles of 16 rows; what it is given of h keeps 22 bits, far more than are left after rounding. A
row without an adapter is only rounded and gated, so it has the bits of a product that no adapter
touched. A program reads its rows of B before it waits for its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, let_next_start, wait_for_last
from quire.kernels.launch import Launcher, alignments, ceil_div, int_kind
from quire.kernels.low_rank_places import RANKS, TILE, Places, place_at, tile_at
from quire.kernels.silu_mul import activated

__all__ = ["MOST_PARTS", "low_rank_expand", "low_rank_gate"]

MOST_PARTS = 3
_BLOCK_N = 128
_BLOCK_PAIRS = 64


@triton.jit
def _high_tile(high, n, size, rank, r):
    """[outputs, RANKS] of B; zeros where there are none."""
    cells = high + n.to(tl.int64)[:, None] * rank + (r + tl.arange(0, RANKS))[None, :]
    return tl.load(cells, mask=(n < size)[:, None] & (r < rank), other=0.0)


@triton.jit
def _ranks_of(h_rows, live, r, num_ranks, CHUNKS: tl.constexpr):
    """[TILE, RANKS]: the chains of RANKS ranks, added in their order."""
    cells = h_rows[:, None] + (r + tl.arange(0, RANKS))[None, :]
    total = tl.load(cells, mask=live[:, None], other=0.0)
    for chunk in tl.static_range(1, CHUNKS):
        total += tl.load(cells + chunk * num_ranks, mask=live[:, None], other=0.0)
    return total


@triton.jit
def _added(
    total, first, high, n, size, rank, scale, h_rows, live, num_ranks,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """total plus B (scale * h); `first` is B's first tile."""
    # Numbers of 16 bits are exact in tf32, so the three products of tf32x3 lose nothing of B.
    HOW: tl.constexpr = "ieee" if first.dtype == tl.float32 else "tf32x3"
    if rank > 0:
        low = _ranks_of(h_rows, live, 0, num_ranks, CHUNKS) * scale
        delta = tl.dot(low, first.to(tl.float32).T, input_precision=HOW)
        for r in tl.range(RANKS, rank, RANKS):
            low = _ranks_of(h_rows, live, r, num_ranks, CHUNKS) * scale
            tile = _high_tile(high, n, size, rank, r)
            delta = tl.dot(low, tile.to(tl.float32).T, delta, input_precision=HOW)
        total += delta
    return total


@triton.jit
def _expand_kernel(
    sums,  # [M, N] f32
    h,  # [M, PARTS, CHUNKS, num_ranks] f32
    tiles, origin, table, slot_stride,
    y,  # [M, N]
    N, size_0, size_1, size_2, num_ranks,
    PARTS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    slot, rows = tile_at(tiles, tl.program_id(1))
    # Which part this program has, where that begins, and the first of its outputs there.
    block = tl.program_id(0)
    first_1 = tl.cdiv(size_0, BLOCK)
    first_2 = first_1 + tl.cdiv(size_1, BLOCK)
    in_1, in_2 = block >= first_1, block >= first_2  # never, where there are fewer parts
    part = in_1.to(tl.int32) + in_2.to(tl.int32)
    begin = tl.where(in_2, size_0 + size_1, tl.where(in_1, size_0, 0))
    size = tl.where(in_2, size_2, tl.where(in_1, size_1, size_0))
    block -= tl.where(in_2, first_2, tl.where(in_1, first_1, 0))
    n = block * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = y.dtype.element_ty
    _, high, rank, scale = place_at(table, slot, slot_stride, part)
    high = origin + high
    first = _high_tile(high, n, size, rank, 0)
    wait_for_last(EARLY)

    live = rows >= 0
    rows = tl.maximum(rows, 0).to(tl.int64)
    cells = rows[:, None] * N + (begin + n)[None, :]
    inside = live[:, None] & (n < size)[None, :]
    total = tl.load(sums + cells, mask=inside, other=0.0)
    h_rows = h + (rows * PARTS + part) * (CHUNKS * num_ranks)
    total = _added(total, first, high, n, size, rank, scale, h_rows, live, num_ranks, CHUNKS)
    tl.store(y + cells, total.to(dtype), mask=inside)


@triton.jit
def _gate_kernel(
    sums,  # [M, 2 * N] f32: gate | up, or in pairs
    h,  # [M, 2, CHUNKS, num_ranks] f32
    tiles, origin, table, slot_stride,
    y,  # [M, N]
    N, num_ranks,
    PAIRS: tl.constexpr, GATE: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    slot, rows = tile_at(tiles, tl.program_id(1))
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = y.dtype.element_ty
    _, gate_high, gate_rank, gate_scale = place_at(table, slot, slot_stride, 0)
    _, up_high, up_rank, up_scale = place_at(table, slot, slot_stride, 1)
    gate_high, up_high = origin + gate_high, origin + up_high
    gate_first = _high_tile(gate_high, n, N, gate_rank, 0)
    up_first = _high_tile(up_high, n, N, up_rank, 0)
    wait_for_last(EARLY)

    live = rows >= 0
    rows = tl.maximum(rows, 0).to(tl.int64)
    inside = live[:, None] & (n < N)[None, :]
    begin = sums + rows[:, None] * (2 * N)
    if PAIRS:
        pair = tl.program_id(0) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        cells = begin + pair[None, :]
        both = tl.load(cells, mask=live[:, None] & (pair < 2 * N)[None, :], other=0.0)
        gate, up = both.reshape(TILE, BLOCK, 2).split()
    else:
        gate = tl.load(begin + n[None, :], mask=inside, other=0.0)
        up = tl.load(begin + N + n[None, :], mask=inside, other=0.0)
    h_rows = h + rows * (2 * CHUNKS * num_ranks)
    gate = _added(
        gate, gate_first, gate_high, n, N, gate_rank, gate_scale, h_rows, live, num_ranks,
        CHUNKS,
    )  # fmt: skip
    up = _added(
        up, up_first, up_high, n, N, up_rank, up_scale, h_rows + CHUNKS * num_ranks, live,
        num_ranks, CHUNKS,
    )  # fmt: skip
    gated = activated(gate.to(dtype), GATE) * up.to(dtype).to(tl.float32)
    tl.store(y + rows[:, None] * N + n[None, :], gated.to(dtype), mask=inside)


_launch_expand, _launch_gate = Launcher(_expand_kernel), Launcher(_gate_kernel)


def low_rank_expand(sums: Tensor, h: Tensor, tiles: Tensor, places: Places, out: Tensor) -> Tensor:
    """sums [rows, out] and what `low_rank_shrink` gave -> out of the model's dtype."""
    sizes, (m, n) = places.sizes, sums.shape
    assert len(sizes) <= MOST_PARTS and sum(sizes) == n, f"{sizes=} {n=}"
    _check(sums, out)
    if m == 0:
        return out
    origin, table, slot_stride = places.kernel_args()
    padded = (*sizes, 0, 0)[:MOST_PARTS]
    _launch_expand(
        (sum(ceil_div(size, _BLOCK_N) for size in sizes), len(tiles), 1),
        (sums, h, tiles, origin, table, slot_stride, out, n, *padded, h.shape[3]),
        {"PARTS": len(sizes), **_constants(h, _BLOCK_N)},
        (
            *(out.dtype, sizes, int_kind(slot_stride)),
            alignments(sums, h, tiles, origin, table, out),
        ),
    )
    return out


def low_rank_gate(
    sums: Tensor, h: Tensor, tiles: Tensor, places: Places, out: Tensor, gate: str, pairs: bool
) -> Tensor:
    """The same for gate and up, sums [rows, 2 * width] -> out [rows, width]: act(gate) * up."""
    m, n = out.shape
    assert places.sizes == (n, n) and sums.shape[1] == 2 * n, f"{places.sizes=} {sums.shape=}"
    _check(sums, out)
    if m == 0:
        return out
    origin, table, slot_stride = places.kernel_args()
    _launch_gate(
        (ceil_div(n, _BLOCK_PAIRS), len(tiles), 1),
        (sums, h, tiles, origin, table, slot_stride, out, n, h.shape[3]),
        {"PAIRS": pairs, "GATE": gate, **_constants(h, _BLOCK_PAIRS)},
        (out.dtype, n, int_kind(slot_stride), alignments(sums, h, tiles, origin, table, out)),
    )
    return out


def _constants(h: Tensor, block: int) -> Mapping[str, object]:
    return {
        "CHUNKS": h.shape[2],
        "BLOCK": block,
        **early_options(),
        "num_warps": 4,
        "num_stages": 1,
    }


def _check(sums: Tensor, out: Tensor) -> None:
    assert sums.dtype == torch.float32, f"got {sums.dtype}, want sums"
    assert sums.is_contiguous() and out.is_contiguous(), f"{sums.stride()=} {out.stride()=}"
