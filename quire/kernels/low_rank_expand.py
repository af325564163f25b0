"""The second half of what adapters add: B times the ranks, onto sums, before they are rounded.

y = round(sums + B (scale * h)), and the gate from rounded numbers as products themselves apply it.
A program has a tile of 16 rows and some outputs. It goes through the tile's slots, several at a
time: their ranks lie side by side, and a row has zeros at those of others, which leave its sums
alone. So sums are read, rounded and gated once, however many adapters the rows have. The chains of
`low_rank_shrink.py` are added in their order. Where B is bf16, h is split into two such numbers,
which keeps 16 bits, twice what is left after rounding; both have a sum of their own, one chain over
increasing ranks. A row without an adapter is only rounded and gated, so it has the bits of a
product that no adapter touched. The first slots' B is read before the wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, let_next_start, wait_for_last
from quire.kernels.launch import Launcher, alignments, ceil_div, int_kind, pad_to_power
from quire.kernels.low_rank_places import (
    RANKS,
    TILE,
    TILE_WORDS,
    Places,
    place_at,
    rows_at,
    slots_at,
)
from quire.kernels.silu_mul import activated

__all__ = ["MOST_PARTS", "ExpandConfig", "low_rank_expand", "low_rank_gate"]

MOST_PARTS = 3


class ExpandConfig(NamedTuple):
    """How programs go about it; no bit depends on it."""

    block: int  # outputs of a program
    width: int  # ranks of all slots that are multiplied at once
    num_warps: int


@triton.jit
def _high_tile(
    tile, count, origin, table, slot_stride, part, group, first, n, size,
    WIDTH: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """[outputs, WIDTH] of B: of a group of slots, R ranks each from the `first` on; zeros where
    there are none."""
    SLOTS: tl.constexpr = WIDTH // R
    slots = slots_at(tile, count, group * SLOTS + tl.arange(0, SLOTS))
    place = place_at(table, slots, slot_stride, part)
    high = tl.multiple_of(tl.load(place + 1), 16)[None, :, None]
    rank = tl.multiple_of(tl.load(place + 2).to(tl.int32), 16)[None, :, None]
    r = (first + tl.arange(0, R))[None, None, :]
    cells = origin + high + (n[:, None, None] * rank + r)
    mask = (n < size)[:, None, None] & (r < rank)
    return tl.load(cells, mask=mask, other=0.0).reshape(n.shape[0], WIDTH)


@triton.jit
def _scales_of(tile, count, table, slot_stride, part, which):
    """(scale, rank) of each row."""
    slots = slots_at(tile, tl.where(which >= 0, count, 0), tl.maximum(which, 0))
    place = place_at(table, slots, slot_stride, part)
    scale = tl.load(place + 3).to(tl.int32).to(tl.float32, bitcast=True)
    return scale, tl.load(place + 2).to(tl.int32)


@triton.jit
def _low_tile(
    h_rows, scaled, first, num_ranks, dtype: tl.constexpr, R: tl.constexpr, CHAINS: tl.constexpr
):
    """scale * h at R ranks of each row's own slot, [TILE, R], in two parts where B is bf16."""
    scale, rank = scaled
    r = first + tl.arange(0, R)
    own = r[None, :] < rank[:, None]
    cells = h_rows[:, None] + r[None, :]
    total = tl.load(cells, mask=own, other=0.0)
    for chain in tl.static_range(1, CHAINS):
        total += tl.load(cells + chain * num_ranks, mask=own, other=0.0)
    total *= scale[:, None]
    upper, lower = total, total
    if dtype == tl.bfloat16:
        upper = total.to(dtype)
        lower = (total - upper.to(tl.float32)).to(dtype)
    return upper, lower


@triton.jit
def _among_others(low, which, group, WIDTH: tl.constexpr, R: tl.constexpr):
    """[TILE, R] -> [TILE, WIDTH]: each row's at its own slot's ranks, zeros at others."""
    SLOTS: tl.constexpr = WIDTH // R
    own = which[:, None] == (group * SLOTS + tl.arange(0, SLOTS))[None, :]
    spread = tl.where(own[:, :, None], low[:, None, :], 0.0).to(low.dtype)
    return spread.reshape(TILE, WIDTH)


@triton.jit
def _add_products(sums, low, which, group, high, WIDTH: tl.constexpr, R: tl.constexpr):
    """(sum of the upper parts of h, sum of the lower) with a group's products."""
    upper, lower = sums
    first = _among_others(low[0], which, group, WIDTH, R)
    if high.dtype == tl.bfloat16:
        upper = tl.dot(first, high.T, upper)
        lower = tl.dot(_among_others(low[1], which, group, WIDTH, R), high.T, lower)
    else:  # numbers of 16 bits are exact in tf32
        HOW: tl.constexpr = "ieee" if high.dtype == tl.float32 else "tf32x3"
        upper = tl.dot(first, high.to(tl.float32).T, upper, input_precision=HOW)
    return upper, lower


@triton.jit
def _nothing(BLOCK: tl.constexpr):
    return tl.zeros([TILE, BLOCK], tl.float32), tl.zeros([TILE, BLOCK], tl.float32)


@triton.jit
def _expand_kernel(
    sums,  # [M, N] f32
    h,  # [M, PARTS, CHAINS, num_ranks] f32
    tiles, origin, table, slot_stride,
    y,  # [M, N]
    N, size_0, size_1, size_2, num_ranks,
    PARTS: tl.constexpr, CHAINS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
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
    tile = tiles + tl.program_id(1) * TILE_WORDS
    count = tl.load(tile)
    rows, which = rows_at(tile)
    of_part = (tile, count, origin, table, slot_stride, part)
    high = _high_tile(*of_part, 0, 0, n, size, WIDTH, R)
    scaled = _scales_of(tile, count, table, slot_stride, part, which)
    live = rows >= 0
    rows = tl.maximum(rows, 0).to(tl.int64)
    cells = rows[:, None] * N + (begin + n)[None, :]
    inside = live[:, None] & (n < size)[None, :]
    h_rows = h + (rows * PARTS + part) * (CHAINS * num_ranks)
    wait_for_last(EARLY)

    total = tl.load(sums + cells, mask=inside, other=0.0)
    added = _nothing(BLOCK)
    for first in tl.range(0, num_ranks, R):
        low = _low_tile(h_rows, scaled, first, num_ranks, dtype, R, CHAINS)
        for group in tl.range(0, tl.cdiv(count, WIDTH // R)):
            later = _high_tile(*of_part, group + 1, first, n, size, WIDTH, R)
            added = _add_products(added, low, which, group, high, WIDTH, R)
            high = later
        high = _high_tile(*of_part, 0, first + R, n, size, WIDTH, R)
    total = tl.where((which >= 0)[:, None], total + (added[0] + added[1]), total)
    tl.store(y + cells, total.to(dtype), mask=inside)


@triton.jit
def _gate_and_up(row_cells, live, n, N, PAIRS: tl.constexpr):
    """Sums of both at outputs n."""
    BLOCK: tl.constexpr = n.shape[0]
    if PAIRS:
        pair = tl.program_id(0) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        inside = live[:, None] & (pair < 2 * N)[None, :]
        both = tl.load(row_cells + pair[None, :], mask=inside, other=0.0)
        gate, up = both.reshape(TILE, BLOCK, 2).split()
    else:
        inside = live[:, None] & (n < N)[None, :]
        gate = tl.load(row_cells + n[None, :], mask=inside, other=0.0)
        up = tl.load(row_cells + N + n[None, :], mask=inside, other=0.0)
    return gate, up


@triton.jit
def _gate_kernel(
    sums,  # [M, 2 * N] f32: gate | up, or in pairs
    h,  # [M, 2, CHAINS, num_ranks] f32
    tiles, origin, table, slot_stride,
    y,  # [M, N]
    N, num_ranks,
    PAIRS: tl.constexpr, GATE: tl.constexpr, CHAINS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = y.dtype.element_ty
    tile = tiles + tl.program_id(1) * TILE_WORDS
    count = tl.load(tile)
    rows, which = rows_at(tile)
    adapters = (tile, count, origin, table, slot_stride)
    of_gate = _high_tile(*adapters, 0, 0, 0, n, N, WIDTH, R)
    of_up = _high_tile(*adapters, 1, 0, 0, n, N, WIDTH, R)
    gate_scaled = _scales_of(tile, count, table, slot_stride, 0, which)
    up_scaled = _scales_of(tile, count, table, slot_stride, 1, which)
    live = rows >= 0
    rows = tl.maximum(rows, 0).to(tl.int64)
    inside = live[:, None] & (n < N)[None, :]
    h_rows = h + rows * (2 * CHAINS * num_ranks)
    wait_for_last(EARLY)

    gate, up = _gate_and_up(sums + rows[:, None] * (2 * N), live, n, N, PAIRS)
    to_gate, to_up = _nothing(BLOCK), _nothing(BLOCK)
    for first in tl.range(0, num_ranks, R):
        low_gate = _low_tile(h_rows, gate_scaled, first, num_ranks, dtype, R, CHAINS)
        up_rows = h_rows + CHAINS * num_ranks
        low_up = _low_tile(up_rows, up_scaled, first, num_ranks, dtype, R, CHAINS)
        for group in tl.range(0, tl.cdiv(count, WIDTH // R)):
            later_gate = _high_tile(*adapters, 0, group + 1, first, n, N, WIDTH, R)
            later_up = _high_tile(*adapters, 1, group + 1, first, n, N, WIDTH, R)
            to_gate = _add_products(to_gate, low_gate, which, group, of_gate, WIDTH, R)
            to_up = _add_products(to_up, low_up, which, group, of_up, WIDTH, R)
            of_gate, of_up = later_gate, later_up
        of_gate = _high_tile(*adapters, 0, 0, first + R, n, N, WIDTH, R)
        of_up = _high_tile(*adapters, 1, 0, first + R, n, N, WIDTH, R)
    has_adapter = (which >= 0)[:, None]
    gate = tl.where(has_adapter, gate + (to_gate[0] + to_gate[1]), gate)
    up = tl.where(has_adapter, up + (to_up[0] + to_up[1]), up)
    gated = activated(gate.to(dtype), GATE) * up.to(dtype).to(tl.float32)
    tl.store(y + rows[:, None] * N + n[None, :], gated.to(dtype), mask=inside)


_EXPAND, _GATE = ExpandConfig(64, 64, 8), ExpandConfig(64, 16, 4)
_launch_expand, _launch_gate = Launcher(_expand_kernel), Launcher(_gate_kernel)


def low_rank_expand(
    sums: Tensor,
    h: Tensor,
    tiles: Tensor,
    places: Places,
    out: Tensor,
    config: ExpandConfig | None = None,
) -> Tensor:
    """sums [rows, out] and what `low_rank_shrink` gave -> out of the model's dtype."""
    sizes, (m, n) = places.sizes, sums.shape
    config = config or _EXPAND
    assert len(sizes) <= MOST_PARTS and sum(sizes) == n, f"{sizes=} {n=}"
    _check(sums, out)
    if m == 0:
        return out
    origin, table, slot_stride = places.kernel_args()
    padded = (*sizes, 0, 0)[:MOST_PARTS]
    _launch_expand(
        (sum(ceil_div(size, config.block) for size in sizes), len(tiles), 1),
        (sums, h, tiles, origin, table, slot_stride, out, n, *padded, h.shape[3]),
        {"PARTS": len(sizes), **_constants(h, out.dtype, config)},
        (
            *(out.dtype, sizes, int_kind(slot_stride)),
            alignments(sums, h, tiles, origin, table, out),
        ),
    )
    return out


def low_rank_gate(
    sums: Tensor,
    h: Tensor,
    tiles: Tensor,
    places: Places,
    out: Tensor,
    form: tuple[str, bool],
    config: ExpandConfig | None = None,
) -> Tensor:
    """The same for gate and up, sums [rows, 2 * width] -> out [rows, width]: act(gate) * up.
    `form`: the activation, and whether sums lie in pairs."""
    (m, n), (gate, pairs) = out.shape, form
    config = config or _GATE
    assert places.sizes == (n, n) and sums.shape[1] == 2 * n, f"{places.sizes=} {sums.shape=}"
    _check(sums, out)
    if m == 0:
        return out
    origin, table, slot_stride = places.kernel_args()
    _launch_gate(
        (ceil_div(n, config.block), len(tiles), 1),
        (sums, h, tiles, origin, table, slot_stride, out, n, h.shape[3]),
        {"PAIRS": pairs, "GATE": gate, **_constants(h, out.dtype, config)},
        (out.dtype, n, int_kind(slot_stride), alignments(sums, h, tiles, origin, table, out)),
    )
    return out


def _constants(h: Tensor, dtype: torch.dtype, config: ExpandConfig) -> Mapping[str, object]:
    # Only the two sums of bf16 are the same whether ranks come one step after the other or at once.
    at_once = config.width if dtype == torch.bfloat16 else RANKS.value
    return {
        "CHAINS": h.shape[2],
        "BLOCK": config.block,
        "WIDTH": config.width if dtype != torch.float32 else RANKS.value,
        "R": min(at_once, pad_to_power(h.shape[3])),
        **early_options(),
        "num_warps": config.num_warps,
        "num_stages": 1,
    }


def _check(sums: Tensor, out: Tensor) -> None:
    assert sums.dtype == torch.float32, f"got {sums.dtype}, want sums"
    assert sums.is_contiguous() and out.is_contiguous(), f"{sums.stride()=} {out.stride()=}"
