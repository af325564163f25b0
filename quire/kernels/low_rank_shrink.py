"""The first half of what adapters add: each row's inputs times its adapter's A, in fp32.

A product is cut into chains of neighbouring inputs by its number of inputs alone. Each chain is one
sum on the matrix unit over increasing k, always of a tile of 16 rows, so a row's bits depend on
that row and its adapter. `low_rank_expand.py` adds the chains in their order. A program reads its
part of A before it waits for its inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, let_next_start, wait_for_last
from quire.kernels.launch import Launcher, alignments, int_kind
from quire.kernels.low_rank_places import RANKS, TILE, Places, place_at, shrink_shape, tile_at

__all__ = ["low_rank_shrink"]


@triton.jit
def _shrink_kernel(
    x,  # [M, K]
    tiles, origin, table, slot_stride,
    h,  # [M, parts, CHUNKS, num_ranks] f32
    K, stride_x, num_ranks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    slot, rows = tile_at(tiles, tl.program_id(0))
    chunk, part = tl.program_id(1), tl.program_id(2)
    low, _, rank, _ = place_at(table, slot, slot_stride, part)
    ranks = tl.arange(0, RANKS)
    k = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = k < K
    cells = origin + low + ranks[:, None] * K + k[None, :]
    a = tl.load(cells, mask=inside[None, :] & (rank > 0), other=0.0)  # [RANKS, CHUNK]
    wait_for_last(EARLY)

    if rank > 0:
        live = (rows >= 0)[:, None]
        at = tl.maximum(rows, 0).to(tl.int64)
        x_cells = x + at[:, None] * stride_x + k[None, :]
        x_tile = tl.load(x_cells, mask=live & inside[None, :], other=0.0)
        of_row = tl.num_programs(2) * CHUNKS
        h_rows = h + (at * of_row + part * CHUNKS + chunk) * num_ranks
        low_cells = h_rows[:, None] + ranks[None, :]
        tl.store(low_cells, tl.dot(x_tile, a.T, input_precision="ieee"), mask=live)
        for r in tl.range(RANKS, rank, RANKS):
            more = tl.load(cells + r * K, mask=inside[None, :], other=0.0)
            tl.store(low_cells + r, tl.dot(x_tile, more.T, input_precision="ieee"), mask=live)


_launch = Launcher(_shrink_kernel)


def low_rank_shrink(x: Tensor, tiles: Tensor, places: Places) -> Tensor:
    """x [rows, in] -> [rows, parts, chains, num_ranks] fp32; what no adapter has is not written.

    Weights are of x's dtype."""
    (m, k), parts = x.shape, len(places.sizes)
    assert x.stride(1) == 1 and tiles.shape[1] == 1 + TILE.value, f"{x.stride()=} {tiles.shape=}"
    assert places.num_ranks % RANKS.value == 0, f"{places.num_ranks=}"
    chunk, chunks = shrink_shape(k)
    shape = (m, parts, chunks, places.num_ranks)
    h = torch.empty(shape, dtype=torch.float32, device=x.device)
    if m == 0:
        return h
    origin, table, slot_stride = places.kernel_args()
    assert origin.dtype == x.dtype, f"{origin.dtype=} {x.dtype=}"
    _launch(
        (len(tiles), chunks, parts),
        (x, tiles, origin, table, slot_stride, h, k, x.stride(0), places.num_ranks),
        {
            "CHUNK": chunk,
            "CHUNKS": chunks,
            **early_options(),
            "num_warps": 4,
            "num_stages": 1,
        },
        (
            *(x.dtype, k, int_kind(x.stride(0)), int_kind(slot_stride)),
            alignments(x, tiles, origin, table, h),
        ),
    )
    return h
