"""The rings of the Hopper prefill kernel: how keys and values get from pages to shared memory.

One producer warp asks the copy engine for the boxes of a tile (a page, or part of one) and goes on;
a barrier tells the consumers when the tile has arrived, another tells the producer when both have
read it and its stage is free. A tile lies band by band, 64 columns wide as the swizzle wants it, so
that the same memory is the boxes that are copied and the operand of the matrix units.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from quire.kernels.early import wait_for_inputs
from quire.kernels.hopper_caches import BAND

__all__ = [
    "CONSUMERS",
    "clear_past_end",
    "make_barriers",
    "make_ring",
    "produce",
]

CONSUMERS = gl.constexpr(2)  # warpgroups that read every tile
STAGES = gl.constexpr(3)  # tiles of keys, and of values, in flight


@gluon.jit
def make_ring(
    dtype: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """Memory for a ring of tiles, as the boxes that are copied and as [stages, tokens, dim]."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    BOXES: gl.constexpr = STAGES * BLOCK_N * HEAD_DIM // (BOX[0] * BOX[1])
    boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX[0], BOX[1]], layout)
    return boxes, boxes._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)


@gluon.jit
def _barriers(ARRIVALS: gl.constexpr):
    """One barrier a stage; it completes a phase after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def make_barriers():
    """(key ready, key free, value ready, value free), a barrier a stage each."""
    return _barriers(1), _barriers(CONSUMERS), _barriers(1), _barriers(CONSUMERS)


@gluon.jit
def _tile_rows(
    rows, pages, tile, end, kv_head, KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Append to `rows` where a tile's boxes begin in the cache as [pages * heads * slots, dim].
    Boxes past the end read page 0, which always exists; their content is never used."""
    for box in gl.static_range(BLOCK_N // BOX):
        n = tile * BLOCK_N + box * BOX
        page = gl.load(pages + n // PAGE_SIZE, mask=n < end, other=0)
        rows = rows + ((page * KV_HEADS + kv_head) * PAGE_SIZE + n % PAGE_SIZE,)  # noqa: RUF005
    return rows


@gluon.jit
def _copy_tile(cache, ring, ready, stage, rows, BANDS: gl.constexpr):
    """Ask for one tile of keys or values; `ready` completes when all of it has arrived."""
    BOXES: gl.constexpr = len(rows)
    mbarrier.expect(ready, BANDS * BOXES * cache.block_type.nbytes)
    for band in gl.static_range(BANDS):
        for box in gl.static_range(BOXES):
            place = ring.index((stage * BANDS + band) * BOXES + box)
            tma.async_copy_global_to_shared(cache, [rows[box], band * BAND], ready, place)


@gluon.jit
def produce(
    caches, rings, barriers, pages, kv_head, end,
    KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BANDS: gl.constexpr, BLOCK_N: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Fill every stage of the rings as soon as the consumers have freed it."""
    wait_for_inputs(EARLY)  # earlier kernels write the page table and the pages
    keys, values = caches
    key_ring, value_ring = rings
    key_ready, key_free, value_ready, value_free = barriers
    BOX: gl.constexpr = keys.block_shape[0]
    for tile in range(gl.cdiv(end, BLOCK_N)):
        stage = tile % STAGES
        phase = tile // STAGES & 1
        rows = _tile_rows((), pages, tile, end, kv_head, KV_HEADS, PAGE_SIZE, BLOCK_N, BOX)
        mbarrier.wait(key_free.index(stage), phase ^ 1)  # passes while the ring is new
        _copy_tile(keys, key_ring, key_ready.index(stage), stage, rows, BANDS)
        mbarrier.wait(value_free.index(stage), phase ^ 1)
        _copy_tile(values, value_ring, value_ready.index(stage), stage, rows, BANDS)


@gluon.jit
def clear_past_end(ring, stage, live, BANDS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zero the values of a tile from row `live` on: slots past the end hold anything, NaN too,
    and 0 * NaN would leak. Both consumers do it, each before it reads; they write the same."""
    BOX: gl.constexpr = ring.shape[1]
    BOXES: gl.constexpr = BLOCK_N // BOX
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, BOX, gl.SliceLayout(1, layout))[:, None]
    for band in gl.static_range(BANDS):
        for box in gl.static_range(BOXES):
            if (box + 1) * BOX > live:
                place = ring.index((stage * BANDS + band) * BOXES + box)
                v = place.load(layout)
                place.store(gl.where(box * BOX + row < live, v, gl.zeros_like(v)))
    fence_async_shared()
