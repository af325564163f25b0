"""Attention of single queries on Hopper: one warp copies keys and values, four warps compute.

The arithmetic is that of `paged_split.py`, tile by tile and split by split, so the bits agree. Only
the division of labour differs. An item is (kv head, sequence, lane), which is one program there;
here two programs to a multiprocessor take items in turn. Copies run ahead from one item to the
next, so the memory stays busy while items change. It also stays busy while the kernel before ends:
the first tiles are requested before the wait. That is safe because, since the last plain launches,
early kernels have written no keys but the newest (`early.py`). Sequences that have the row of the
one before are drafts: for these more than one key is new, and nothing is requested before the wait.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.chip import chip_of
from quire.kernels.early import early_options, let_next_start, wait_for_last
from quire.kernels.hopper_caches import BAND, KeptDescriptors, suits_hopper
from quire.kernels.hopper_split_ring import (
    STAGES,
    TILE,
    keys_of,
    make_barriers,
    make_ring,
    produce,
    turn,
)
from quire.kernels.launch import Launcher, alignments, int_kind
from quire.kernels.paged_inputs import PagedInputs, SplitGrid
from quire.kernels.paged_tile import INDEX_ARGS, PagedConfig, fold, fold_weights
from quire.kernels.rehearsal import Memory
from quire.kernels.splits import split_start

__all__ = ["HopperSplit"]

BLOCK_M, BLOCK_N = 16, TILE.value  # the tiles this kernel is laid out for
PROGRAMS = 2  # of a multiprocessor
# With more items the many programs of `paged_split.py` hide each other's start as well.
MOST_ITEMS = 4  # of a program

ROWS = gl.constexpr(BLOCK_M)
ONES = gl.constexpr(32)  # equal columns of the row sum: the fewest that four warps take
# Registers of a thread: on average, so that two programs find room, and of the warp that copies.
REGISTERS = 128
PRODUCER_REGISTERS = gl.constexpr(24)
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))


@gluon.jit
def _empty_state(HEAD_DIM: gl.constexpr):
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    total = gl.zeros([ROWS, ONES], gl.float32, MMA)
    return top, total, gl.zeros([ROWS, HEAD_DIM], gl.float32, MMA)


@gluon.jit
def _fold_split(folded, state, scale):
    """Fold the state of a finished split into the state of the splits before it."""
    old_top, old_total, old_acc = folded
    top, total, acc = state
    new_top, old, new = fold_weights(old_top, top, scale)
    total = fold(old_total, old[:, None], total, new[:, None])
    return new_top, total, fold(old_acc, old[:, None], acc, new[:, None])


@gluon.jit
def _leave(scratch, part, state, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Store a split's state for `merge_splits.py`, from scratch row `part` on."""
    acc_scratch, sums_scratch = scratch
    top, total, acc = state
    r = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, MMA))
    place = (part + r)[:, None] * HEAD_DIM + dims[None, :]
    gl.store(acc_scratch + place, acc, mask=(r < GROUP)[:, None] & (dims < HEAD_DIM)[None, :])
    gl.store(sums_scratch + (part + r) * 2, top, mask=r < GROUP)
    # The columns are equal, so max picks, not reduces.
    gl.store(sums_scratch + (part + r) * 2 + 1, gl.max(total, 1), mask=r < GROUP)


@gluon.jit
def _attend_tile(query, k, v, state, first, end, scale):
    """Extend a state by one tile: the formulas of `paged_tile.attend_tile`."""
    top, total, acc = state
    logits = mma_v2(query, k, gl.zeros([ROWS, TILE], gl.float32, MMA))
    n = first + gl.arange(0, TILE, gl.SliceLayout(0, MMA))
    logits = gl.where((n < end)[None, :], logits, float("-inf"))
    new_top = gl.maximum(top, gl.max(logits, 1))
    ref = gl.where(new_top == float("-inf"), 0.0, new_top)
    decay = gl.exp2((top - ref) * scale)
    p = gl.exp2(gl.fma(logits, scale, (ref * -scale)[:, None])).to(query.dtype)
    weights = gl.convert_layout(p, gl.DotOperandLayout(0, MMA, 2))
    ones = gl.full([TILE, ONES], 1.0, gl.float32, gl.DotOperandLayout(1, MMA, 2)).to(p.dtype)
    total = mma_v2(weights, ones, total * decay[:, None])
    acc = mma_v2(weights, v, acc * decay[:, None])
    return new_top, total, acc


@gluon.jit
def _walk(
    query, tiles, barriers, scratch, part, count, split, low, high, scale,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, SPLIT_SIZE: gl.constexpr,
    OCTAVE: gl.constexpr, FOLDS: gl.constexpr,
):  # fmt: skip
    """(place, state) of the last split of [low, high); earlier splits are stored or folded in.

    `count` tiles have been through the ring so far."""
    key_tiles, value_tiles = tiles
    ready, free = barriers
    right: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    row = gl.arange(0, TILE, gl.SliceLayout(1, right))
    state = _empty_state(HEAD_DIM)
    folded = _empty_state(HEAD_DIM)
    border = split_start(split + 1, SPLIT_SIZE, OCTAVE)
    for start in range(low, high, TILE):
        if start == border:
            split += 1
            border = split_start(split + 1, SPLIT_SIZE, OCTAVE)
            if FOLDS:
                folded = _fold_split(folded, state, scale)
            else:
                _leave(scratch, part, state, GROUP, HEAD_DIM)
                part += KV_HEADS * GROUP
            state = _empty_state(HEAD_DIM)
        stage = count % STAGES
        mbarrier.wait(ready.index(stage), count // STAGES & 1)
        k = key_tiles.index(stage).load(right)
        v = value_tiles.index(stage).load(right)
        mbarrier.arrive(free.index(stage), count=1)
        if start + TILE > high:
            # Slots past the end hold anything, NaN too, and 0 * NaN would leak into acc.
            v = gl.where((start + row < high)[:, None], v, gl.zeros_like(v))
        state = _attend_tile(query, k, v, state, start, high, scale)
        count += 1
    if FOLDS:
        state = _fold_split(folded, state, scale)
    return part, state


@gluon.jit
def _query_places(
    item, num_items, num_seqs, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where the query heads of an item lie in [sequences, heads, dim], and which of them exist."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    head = item % (KV_HEADS * num_seqs) * GROUP + r  # heads of a sequence follow one another
    is_there = (r < GROUP) & (item < num_items)
    return head[:, None] * HEAD_DIM + dims[None, :], is_there[:, None] & (dims < HEAD_DIM)[None, :]


@gluon.jit
def _consume(
    pointers, scratch, tiles, barriers, context_lens, scale, num_seqs, lanes, max_splits,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, SPLIT_SIZE: gl.constexpr,
    OCTAVE: gl.constexpr, FOLDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    q, out = pointers
    ACROSS: gl.constexpr = HEAD_DIM // 8  # threads that read a row, 16 bytes each
    coalesced: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    num_items = KV_HEADS * num_seqs * lanes
    count = 0  # tiles so far
    item, seq = turn(0, num_items, num_seqs, KV_HEADS)
    next_end = gl.load(context_lens + seq)
    wait_for_last(EARLY)
    at, keep = _query_places(item, num_items, num_seqs, KV_HEADS, GROUP, HEAD_DIM, coalesced)
    next_query = gl.load(q + at, mask=keep, other=0.0)
    for i in range(gl.cdiv(num_items, gl.num_programs(0))):
        item, seq = turn(i, num_items, num_seqs, KV_HEADS)
        end = gl.where(item < num_items, next_end, 0)
        query = gl.convert_layout(next_query, gl.DotOperandLayout(0, MMA, 2))
        next_item, next_seq = turn(i + 1, num_items, num_seqs, KV_HEADS)
        next_end = gl.load(context_lens + next_seq)
        at, keep = _query_places(
            next_item, num_items, num_seqs, KV_HEADS, GROUP, HEAD_DIM, coalesced
        )
        next_query = gl.load(q + at, mask=keep, other=0.0)
        split, low, high = keys_of(item, end, num_seqs, lanes, KV_HEADS, SPLIT_SIZE, OCTAVE)
        part = (seq * max_splits + split).to(gl.int64) * KV_HEADS + item % KV_HEADS
        part, state = _walk(
            query, tiles, barriers, scratch, part * GROUP, count, split, low, high, scale,
            GROUP, KV_HEADS, HEAD_DIM, SPLIT_SIZE, OCTAVE, FOLDS,
        )  # fmt: skip
        count += gl.cdiv(high - low, TILE)
        if FOLDS or end <= SPLIT_SIZE:
            if low < high:
                _, total, acc = state
                place, is_there = _query_places(
                    item, num_items, num_seqs, KV_HEADS, GROUP, HEAD_DIM, MMA
                )
                result = acc / gl.max(total, 1)[:, None]
                gl.store(out + place, result.to(out.dtype.element_ty), mask=is_there)
        elif low < high:
            _leave(scratch, part, state, GROUP, HEAD_DIM)


@gluon.jit(
    do_not_specialize=["num_seqs", "lanes", "max_splits"], do_not_specialize_on_alignment=INDEX_ARGS
)
def _hopper_split_kernel(
    q, keys, values, page_table, rows, context_lens, out, acc_scratch, sums_scratch, scale,
    table_stride, num_seqs, lanes, max_splits,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    SPLIT_SIZE: gl.constexpr, OCTAVE: gl.constexpr, FOLDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """keys, values: descriptors of the caches as [bands, pages * heads * slots, 64]."""
    let_next_start(EARLY)
    BOX: gl.constexpr = keys.block_shape
    key_ring, key_tiles = make_ring(keys.dtype, BOX, HEAD_DIM, True)
    value_ring, value_tiles = make_ring(keys.dtype, BOX, HEAD_DIM, False)
    barriers = (make_barriers(), make_barriers())
    gl.warp_specialize(
        [
            (_consume, ((q, out), (acc_scratch, sums_scratch), (key_tiles, value_tiles), barriers,
                        context_lens, scale, num_seqs, lanes, max_splits, GROUP, KV_HEADS,
                        HEAD_DIM, SPLIT_SIZE, OCTAVE, FOLDS, EARLY)),
            (produce, ((keys, values), (key_ring, value_ring), barriers, page_table, rows,
                        context_lens, table_stride, num_seqs, lanes, KV_HEADS, PAGE_SIZE,
                        SPLIT_SIZE, OCTAVE, EARLY)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(_hopper_split_kernel)


def _num_programs(inputs: PagedInputs) -> int:
    return PROGRAMS * chip_of(inputs.keys.device).units


class HopperSplit:
    """`split_attention` of single queries, computed by this kernel."""

    def __init__(self) -> None:
        self._descriptor_of = KeptDescriptors(_descriptor)

    def can_run(self, q: Tensor, inputs: PagedInputs, grid: SplitGrid, config: PagedConfig) -> bool:
        """Whether this kernel takes these tensors; the bits are those of `split_attention`."""
        return (
            suits_hopper(q, inputs)
            and grid.tiles is None
            and inputs.paths is None
            and not grid.company
            and (config.split.block_m, config.block_n) == (BLOCK_M, BLOCK_N)
            and q.shape[1] // inputs.keys.shape[1] <= BLOCK_M
        )

    def is_faster(self, inputs: PagedInputs, grid: SplitGrid) -> bool:
        """Whether this kernel is faster than `split_attention`, as measured on an H200."""
        return _num_items(inputs, grid) <= MOST_ITEMS * _num_programs(inputs)

    def __call__(
        self, q: Tensor, inputs: PagedInputs, grid: SplitGrid, config: PagedConfig, out: Tensor
    ) -> None:
        """Takes the arguments of `split_attention`; follow with `merge_splits`."""
        if grid.num_tiles == 0:
            return
        _, kv_heads, page_size, head_dim = inputs.keys.shape
        assert q.is_contiguous() and out.is_contiguous()
        assert inputs.keys.is_contiguous() and inputs.values.is_contiguous()
        _launch(
            (min(_num_programs(inputs), _num_items(inputs, grid)), 1, 1),
            (
                q, self._descriptor_of(inputs.keys), self._descriptor_of(inputs.values),
                inputs.page_table, inputs.rows, inputs.context_lens, out, grid.acc, grid.sums,
                inputs.state_scale, inputs.table_stride, grid.num_tiles, grid.lanes,
                grid.max_splits,
            ),
            {
                "GROUP": q.shape[1] // kv_heads,
                "KV_HEADS": kv_heads,
                "HEAD_DIM": head_dim,
                "PAGE_SIZE": page_size,
                "SPLIT_SIZE": config.split_size,
                "OCTAVE": config.octave,
                "FOLDS": grid.folds,
                **early_options(),
                "num_warps": 4,
                "maxnreg": REGISTERS,
            },
            (
                inputs.kind, q.dtype, alignments(q, out, grid.acc, grid.sums),
                int_kind(inputs.table_stride),
            ),
        )  # fmt: skip


def _descriptor(cache: Tensor) -> TensorDescriptor:
    """All columns of a box of tokens at once."""
    pages, kv_heads, page_size, head_dim = cache.shape
    bands = head_dim // BAND.value
    return TensorDescriptor(
        Memory(cache.data_ptr(), cache.dtype),
        [bands, pages * kv_heads * page_size, BAND.value],
        [BAND.value, head_dim, 1],
        [bands, min(page_size, BLOCK_N), BAND.value],
        gl.NVMMASharedLayout(128, 16, rank=3),
    )


def _num_items(inputs: PagedInputs, grid: SplitGrid) -> int:
    return inputs.keys.shape[1] * grid.num_tiles * grid.lanes
