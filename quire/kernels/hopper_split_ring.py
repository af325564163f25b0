"""The rings of the Hopper kernel for single queries: which item comes next, and how its keys and
values get from pages to shared memory.

One producer warp asks the copy engine for the boxes of a tile (a page, or part of one), all columns
at once, and goes on to the next tile, also across the border between items. One barrier tells the
consumer when a tile has arrived, another tells the producer when it has been read. The layout of
the boxes does not suit the matrix instructions of a warpgroup, so tiles are loaded into registers.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from quire.kernels.early import wait_for_last
from quire.kernels.splits import lane_splits, split_count, split_start

__all__ = ["STAGES", "TILE", "keys_of", "make_barriers", "make_ring", "produce", "turn"]

TILE = gl.constexpr(64)  # keys
STAGES = gl.constexpr(2)  # tiles of keys and values in flight


@constexpr_function
def _tile_bases(box: int, tokens: int, dim: int, transposed: bool) -> list[list[int]]:
    """What each bit of an offset means, as (token, column) or, transposed, (column, token).

    The tile is a sequence of boxes [bands, box, 64], swizzled as the copy engine does it."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    row = 8
    while row < box:
        bases.append([row, 0])
        row *= 2
    if dim > 64:
        bases.append([0, 64])
    while row < tokens:
        bases.append([row, 0])
        row *= 2
    return [base[::-1] for base in bases] if transposed else bases


@gluon.jit
def make_ring(
    dtype: gl.constexpr, BOX: gl.constexpr, HEAD_DIM: gl.constexpr, TRANSPOSED: gl.constexpr
):
    """Memory for a ring of tiles: as boxes, and as the right operand of a product, [stages, tokens,
    dim] or transposed."""
    boxes = gl.allocate_shared_memory(
        dtype,
        [STAGES * TILE // BOX[1], BOX[0], BOX[1], BOX[2]],
        gl.NVMMASharedLayout(128, 16, rank=3),
    )
    bases: gl.constexpr = _tile_bases(BOX[1], TILE, HEAD_DIM, TRANSPOSED)
    layout: gl.constexpr = gl.SharedLinearLayout(bases, [], 1024)
    SHAPE: gl.constexpr = [STAGES, HEAD_DIM, TILE] if TRANSPOSED else [STAGES, TILE, HEAD_DIM]
    return boxes, boxes._reinterpret(dtype, SHAPE, layout)


@gluon.jit
def make_barriers():
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def turn(i, num_items, num_seqs, KV_HEADS: gl.constexpr):
    """(item, its sequence) of this program's turn i; past the last item the sequence is 0.

    The longest contexts usually come first. Every second round of turns runs backwards, so that
    all programs get about the same work."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    item = i * programs + gl.where(i % 2 == 0, place, programs - 1 - place)
    return item, gl.where(item < num_items, item // KV_HEADS % num_seqs, 0)


@gluon.jit
def keys_of(
    item, end, num_seqs, lanes,
    KV_HEADS: gl.constexpr, SPLIT_SIZE: gl.constexpr, OCTAVE: gl.constexpr,
):  # fmt: skip
    """(first split, first key, one past the last key) of an item whose sequence has `end` keys.

    Both keys are equal for a lane without splits."""
    lane = item // KV_HEADS // num_seqs
    num_splits = split_count(end, SPLIT_SIZE, OCTAVE)
    split, stop = lane_splits(lane, lanes, 0, num_splits, end, SPLIT_SIZE, OCTAVE)
    low = split_start(split, SPLIT_SIZE, OCTAVE)
    high = gl.minimum(split_start(stop, SPLIT_SIZE, OCTAVE), end)
    return split, low, gl.maximum(low, high)


@gluon.jit
def _boxes_of(
    boxes, pages, start, high, kv_head,
    KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Append to `boxes` where a tile's boxes begin in the cache as [pages * heads * slots, dim].

    Also returns how many of them begin before `high`."""
    for box in gl.static_range(TILE // BOX):
        n = start + box * BOX
        page = gl.load(pages + n // PAGE_SIZE, mask=n < high, other=0)
        boxes = boxes + ((page * KV_HEADS + kv_head) * PAGE_SIZE + n % PAGE_SIZE,)  # noqa: RUF005
    return boxes, gl.minimum(gl.cdiv(high - start, BOX), TILE // BOX)


@gluon.jit
def _copy(caches, rings, done, stage, boxes, live):
    """Ask for the first `live` boxes of a tile of keys and of a tile of values.

    `done` completes when all have arrived."""
    keys, values = caches
    key_ring, value_ring = rings
    BOXES: gl.constexpr = len(boxes)
    for count in gl.static_range(1, BOXES + 1):
        mbarrier.expect(done, 2 * count * keys.block_type.nbytes, pred=live == count)
    for box in gl.static_range(BOXES):
        at = stage * BOXES + box
        is_live = box < live
        row = boxes[box]
        tma.async_copy_global_to_shared(keys, [0, row, 0], done, key_ring.index(at), pred=is_live)
        tma.async_copy_global_to_shared(
            values, [0, row, 0], done, value_ring.index(at), pred=is_live
        )


@gluon.jit
def produce(
    caches, rings, barriers, page_table, rows, context_lens, table_stride, num_seqs, lanes,
    KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, SPLIT_SIZE: gl.constexpr,
    OCTAVE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Fill every stage of the rings as soon as the consumer has freed it."""
    ready, free = barriers
    BOX: gl.constexpr = caches[0].block_shape[1]
    num_items = KV_HEADS * num_seqs * lanes
    count = 0  # tiles so far
    _, seq = turn(0, num_items, num_seqs, KV_HEADS)
    next_end = gl.load(context_lens + seq)
    next_row = gl.load(rows + seq)
    next_row_before = gl.load(rows + gl.maximum(seq - 1, 0))
    next_seq = seq
    for i in range(gl.cdiv(num_items, gl.num_programs(0))):
        item, _ = turn(i, num_items, num_seqs, KV_HEADS)
        end = gl.where(item < num_items, next_end, 0)
        pages = page_table + next_row.to(gl.int64) * table_stride
        is_draft = (next_seq > 0) & (next_row_before == next_row)
        _, next_seq = turn(i + 1, num_items, num_seqs, KV_HEADS)
        next_end = gl.load(context_lens + next_seq)
        next_row = gl.load(rows + next_seq)
        next_row_before = gl.load(rows + gl.maximum(next_seq - 1, 0))
        _, low, high = keys_of(item, end, num_seqs, lanes, KV_HEADS, SPLIT_SIZE, OCTAVE)
        for start in range(low, high, TILE):
            if is_draft | (start + TILE >= end):
                wait_for_last(EARLY)  # this step wrote the newest key, and those of drafts before
            boxes, live = _boxes_of(
                (), pages, start, high, item % KV_HEADS, KV_HEADS, PAGE_SIZE, BOX
            )
            stage = count % STAGES
            mbarrier.wait(free.index(stage), count // STAGES & 1 ^ 1)  # passes while it is new
            _copy(caches, rings, ready.index(stage), stage, boxes, live)
            count += 1
