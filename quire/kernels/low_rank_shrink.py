"""The first half of what adapters add: each row's inputs times its adapter's A, in fp32.

It is launched behind the product whose inputs it shares, and runs beside it: that one lets it start
once the inputs are there. One of its programs waits for the product, so that who waits for this
kernel waits for both. A product's inputs are cut into few chains of neighbours by their number
alone. Each chain is one sum on the matrix unit over increasing k, always of a tile of 16 rows, so a
row's bits depend on that row and its adapter. `low_rank_expand.py` adds the chains in their order.
Programs need little shared memory, of which the product leaves little.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, let_next_start, wait_for_last
from quire.kernels.launch import Launcher, alignments, int_kind
from quire.kernels.low_rank_places import (
    RANKS,
    TILE,
    TILE_WORDS,
    Places,
    place_at,
    rows_at,
    shrink_shape,
    slots_at,
)

__all__ = ["ShrinkConfig", "low_rank_shrink", "room_for_ranks"]


class ShrinkConfig(NamedTuple):
    """How programs go about it; no bit depends on it."""

    step: int = 256  # inputs that are multiplied at once
    num_warps: int = 4


@triton.jit
def _inputs(cells, live, k, end, STEP: tl.constexpr):
    """[rows, STEP] of x, or of A. From L2: without a wait, a multiprocessor's own cache may still
    have what was at x's place before."""
    columns = k + tl.arange(0, STEP)
    mask = live[:, None] & (columns < end)[None, :]
    return tl.load(cells + columns[None, :], mask=mask, other=0, cache_modifier=".cg")


@triton.jit
def _shrink_kernel(
    x,  # [M, K]
    tiles, origin, table, slot_stride,
    h,  # [M, parts, CHAINS, num_ranks] f32
    K, stride_x, num_ranks,
    SLOTS: tl.constexpr, CHAIN: tl.constexpr, CHAINS: tl.constexpr, STEP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    chain, first = tl.program_id(0) % CHAINS, tl.program_id(0) // CHAINS * RANKS
    part, at = tl.program_id(1), tl.program_id(2)
    tile, index = tiles + at // SLOTS * TILE_WORDS, at % SLOTS
    slot = slots_at(tile, tl.load(tile), index)
    place = place_at(table, slot, slot_stride, part)
    rank = tl.load(place + 2).to(tl.int32)
    if first < rank:
        rows, which = rows_at(tile)
        own = which == index
        rows = tl.maximum(rows, 0).to(tl.int64)
        ranks = first + tl.arange(0, RANKS)
        a_cells = origin + tl.multiple_of(tl.load(place), 16) + ranks.to(tl.int64)[:, None] * K
        x_cells = x + rows[:, None] * stride_x
        is_rank = ranks < rank
        begin = chain * CHAIN
        end = tl.minimum(begin + CHAIN, K)
        a_tile = _inputs(a_cells, is_rank, begin, end, STEP)
        x_tile = _inputs(x_cells, own, begin, end, STEP)
        total = tl.zeros([TILE, RANKS], tl.float32)
        for k in tl.range(begin + STEP, end, STEP):
            next_a = _inputs(a_cells, is_rank, k, end, STEP)
            next_x = _inputs(x_cells, own, k, end, STEP)
            total = tl.dot(x_tile, a_tile.T, total, input_precision="ieee")
            a_tile, x_tile = next_a, next_x
        total = tl.dot(x_tile, a_tile.T, total, input_precision="ieee")
        of_row = (rows * tl.num_programs(1) + part) * CHAINS + chain
        tl.store(h + of_row[:, None] * num_ranks + ranks[None, :], total, mask=own[:, None])
    if (tl.program_id(0) == 0) & (part == 0) & (at == 0):
        wait_for_last(EARLY)


_launch = Launcher(_shrink_kernel)


def room_for_ranks(x: Tensor, places: Places) -> Tensor:
    """What `low_rank_shrink` writes: [rows, parts, chains, num_ranks] fp32."""
    shape = (len(x), len(places.sizes), shrink_shape(x.shape[1])[1], places.num_ranks)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def low_rank_shrink(
    x: Tensor, tiles: Tensor, places: Places, h: Tensor, config: ShrinkConfig | None = None
) -> None:
    """x [rows, in] -> `h` of `room_for_ranks`; what no adapter has is not written.

    Weights are of x's dtype. `h` must have been there before the product was launched: memory that
    the product has given back may still be in use."""
    (m, k), parts = x.shape, len(places.sizes)
    assert x.stride(1) == 1, f"{x.stride()=}"
    assert tiles.shape[1] == TILE_WORDS.value and m <= len(tiles) * TILE.value, f"{tiles.shape=}"
    assert places.num_ranks % RANKS.value == 0, f"{places.num_ranks=}"
    if m == 0:
        return
    config = config or ShrinkConfig()
    chain, chains = shrink_shape(k)
    origin, table, slot_stride = places.kernel_args()
    assert origin.dtype == x.dtype, f"{origin.dtype=} {x.dtype=}"
    slots = 1 if m == 1 else TILE.value
    _launch(
        (chains * (places.num_ranks // RANKS.value), parts, len(tiles) * slots),
        (x, tiles, origin, table, slot_stride, h, k, x.stride(0), places.num_ranks),
        {
            "SLOTS": slots,
            "CHAIN": chain,
            "CHAINS": chains,
            "STEP": config.step,
            **early_options(),
            "num_warps": config.num_warps,
            "num_stages": 1,
        },
        (
            *(x.dtype, k, int_kind(x.stride(0)), int_kind(slot_stride)),
            alignments(x, tiles, origin, table, h),
        ),
    )
