"""Attention of many queries on Hopper: one warp copies keys and values, two warpgroups compute.

The arithmetic is that of `paged_prefill.py`, tile by tile and split by split, so the bits agree;
only who does what differs. `hopper_ring.py` brings the tiles; each consumer warpgroup keeps 64
query rows and computes the softmax of one tile while the matrix units weigh the values of the tile
before. Written in Gluon, where layouts, barriers and registers are the kernel's own business.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.hopper_caches import BAND, KeptDescriptors, suits_hopper
from quire.kernels.hopper_ring import (
    CONSUMERS,
    clear_past_end,
    make_barriers,
    make_ring,
    produce,
)
from quire.kernels.launch import Launcher, alignments, int_kind
from quire.kernels.paged_inputs import PagedInputs
from quire.kernels.paged_split import tile_span
from quire.kernels.paged_tile import INDEX_ARGS, PagedConfig, fold, fold_weights
from quire.kernels.rehearsal import Memory
from quire.kernels.splits import split_count, split_start

__all__ = ["HopperPrefill"]

BLOCK_M, BLOCK_N = 128, 64  # the tiles this kernel is laid out for

ROWS = gl.constexpr(64)  # query rows of a warpgroup
ONES = gl.constexpr(8)  # equal columns of the row sum: the fewest the matrix units take
# Registers of a thread. Three warpgroups start with 65,536 / 384 each, rounded down to 8; the two
# consumers take from the producer.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(3 * 168 - 2 * 240)


@gluon.jit
def _softmax(logits, top, first, positions, scale, MASKED: gl.constexpr):
    """(new top, decay, weights): the formulas of `paged_tile.attend`."""
    if MASKED:
        n = first + gl.arange(0, logits.shape[1], gl.SliceLayout(0, logits.type.layout))
        logits = gl.where(n[None, :] <= positions[:, None], logits, float("-inf"))
    new_top = gl.maximum(top, gl.max(logits, 1))
    ref = gl.where(new_top == float("-inf"), 0.0, new_top)
    decay = gl.exp2((top - ref) * scale)
    return new_top, decay, gl.exp2(gl.fma(logits, scale, (ref * -scale)[:, None]))


@gluon.jit
def _like(weight, x):
    """weight [rows] as a column beside x [rows, columns]; all products share one row layout."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return gl.convert_layout(weight, layout, assert_trivial=True)[:, None]


@gluon.jit
def _fold_split(folded, state, scale):
    """Fold the state of a finished split into the state of the splits before it."""
    old_top, old_total, old_acc = folded
    top, total, acc = state
    new_top, old, new = fold_weights(old_top, top, scale)
    total = fold(old_total, _like(old, total), total, _like(new, total))
    return new_top, total, fold(old_acc, _like(old, acc), acc, _like(new, acc))


@gluon.jit
def _logits(query, keys):
    """Start the product of the query rows with a tile of keys."""
    BLOCK_N: gl.constexpr = keys.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(query, keys.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _weigh(p, values, ones, total, acc):
    """Start the two products of a tile: the row sums and the weighted values."""
    for_total: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 2)
    for_acc: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    weights = gl.convert_layout(p, for_total, assert_trivial=True)
    total = warpgroup_mma(weights, ones, total, is_async=True)
    weights = gl.convert_layout(p, for_acc, assert_trivial=True)
    return total, warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def _walk(
    shared, barriers, folded, state, p, tiles, positions, scale,
    MASKED: gl.constexpr, SPLIT_SIZE: gl.constexpr, OCTAVE: gl.constexpr,
):  # fmt: skip
    """Extend the state by tiles [first, last), one product behind.

    `p` are the weights of the previous tile: the matrix units multiply its values while the softmax
    of this tile is computed."""
    query, ones, key_tiles, value_tiles = shared
    key_ready, key_free, value_ready, value_free = barriers
    top, total, acc = state
    first, last = tiles
    STAGES: gl.constexpr = key_tiles.shape[0]
    BLOCK_N: gl.constexpr = key_tiles.shape[1]
    split = split_count(first * BLOCK_N, SPLIT_SIZE, OCTAVE)  # the next to begin
    border = split_start(split, SPLIT_SIZE, OCTAVE) // BLOCK_N
    for tile in range(first, last):
        stage = tile % STAGES
        before = (tile - 1) % STAGES
        mbarrier.wait(key_ready.index(stage), tile // STAGES & 1)
        logits = _logits(query, key_tiles.index(stage))
        mbarrier.wait(value_ready.index(before), (tile - 1) // STAGES & 1)
        total, acc = _weigh(p, value_tiles.index(before), ones, total, acc)
        logits = warpgroup_mma_wait(2, deps=[logits])
        mbarrier.arrive(key_free.index(stage), count=1)
        is_fresh = tile == border
        old_top = gl.where(is_fresh, float("-inf"), top)
        new_top, decay, p = _softmax(logits, old_top, tile * BLOCK_N, positions, scale, MASKED)
        p = p.to(value_tiles.dtype)
        total, acc = warpgroup_mma_wait(0, deps=[total, acc])
        mbarrier.arrive(value_free.index(before), count=1)
        if is_fresh:
            folded = _fold_split(folded, (top, total, acc), scale)
            split += 1
            border = split_start(split, SPLIT_SIZE, OCTAVE) // BLOCK_N
            total = gl.zeros_like(total)
            acc = gl.zeros_like(acc)
        else:
            total = total * _like(decay, total)
            acc = acc * _like(decay, acc)
        top = new_top
    return folded, (top, total, acc), p


@gluon.jit
def _attend(
    shared, value_ring, barriers, position, end, scale,
    GROUP: gl.constexpr, SPLIT_SIZE: gl.constexpr, OCTAVE: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """The folded (total, acc) of a warpgroup's rows over the keys before `end`."""
    query, ones, key_tiles, value_tiles = shared
    key_ready, key_free, value_ready, _ = barriers
    STAGES: gl.constexpr = key_tiles.shape[0]
    BLOCK_N: gl.constexpr = key_tiles.shape[1]
    HEAD_DIM: gl.constexpr = key_tiles.shape[2]
    rows: gl.constexpr = gl.SliceLayout(
        1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    )
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    of_acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    positions = position + (WG * ROWS + gl.arange(0, ROWS, rows)) // GROUP
    top = gl.full([ROWS], float("-inf"), gl.float32, rows)
    total = gl.zeros([ROWS, ONES], gl.float32, of_total)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, of_acc)
    folded = (top, total, acc)

    mbarrier.wait(key_ready.index(0), 0)
    logits = _logits(query, key_tiles.index(0))
    logits = warpgroup_mma_wait(0, deps=[logits])
    mbarrier.arrive(key_free.index(0), count=1)
    top, _, p = _softmax(logits, top, 0, positions, scale, True)
    state = (top, total, acc)
    p = p.to(value_tiles.dtype)
    # |0 ... every row sees all keys ... edge ... the causal edge runs through here ... last|
    edge = gl.maximum((position + 1) // BLOCK_N, 1)
    last = gl.cdiv(end, BLOCK_N)
    one = gl.minimum(edge, 1)  # as a run-time value
    folded, state, p = _walk(
        shared, barriers, folded, state, p, (one, edge), positions, scale, False,
        SPLIT_SIZE, OCTAVE,
    )  # fmt: skip
    folded, state, p = _walk(
        shared, barriers, folded, state, p, (edge, last), positions, scale, True,
        SPLIT_SIZE, OCTAVE,
    )  # fmt: skip
    top, total, acc = state
    stage = (last - 1) % STAGES
    mbarrier.wait(value_ready.index(stage), (last - 1) // STAGES & 1)
    clear_past_end(value_ring, stage, end - (last - 1) * BLOCK_N, HEAD_DIM // BAND, BLOCK_N)
    total, acc = _weigh(p, value_tiles.index(stage), ones, total, acc)
    total, acc = warpgroup_mma_wait(0, deps=[total, acc])
    _, total, acc = _fold_split(folded, (top, total, acc), scale)
    return total, acc


@gluon.jit
def _places(
    token, tokens, kv_head, WG: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where a warpgroup's rows lie in [tokens, heads, dim], and which of them exist.

    Row r is query head r % GROUP of token r // GROUP."""
    r = WG * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    head = (token + r // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + r % GROUP
    keep = (r // GROUP < tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    return head[:, None] * HEAD_DIM + dims[None, :], keep


@gluon.jit
def _consume(
    pointers, queries, operands, value_ring, barriers, span, kv_head, scale,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, SPLIT_SIZE: gl.constexpr, OCTAVE: gl.constexpr,
    WG: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Attend rows [64 * WG, 64 * WG + 64) of the query tile."""
    wait_for_inputs(EARLY)  # each warpgroup must wait for itself
    q, out = pointers
    token, tokens, position = span
    ones, key_tiles, value_tiles = operands
    HEAD_DIM: gl.constexpr = key_tiles.shape[2]
    ACROSS: gl.constexpr = HEAD_DIM // 8  # threads that read a row, 16 bytes each
    coalesced: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    place, keep = _places(token, tokens, kv_head, WG, GROUP, KV_HEADS, HEAD_DIM, coalesced)
    query = queries.index(WG)
    query.store(gl.load(q + place, mask=keep, other=0.0))
    fence_async_shared()
    total, acc = _attend(
        (query, ones, key_tiles, value_tiles), value_ring, barriers, position,
        position + tokens, scale, GROUP, SPLIT_SIZE, OCTAVE, WG,
    )  # fmt: skip
    total = _like(gl.max(total, 1), acc)  # the columns are equal, so max picks, not reduces
    of_acc: gl.constexpr = acc.type.layout
    place, keep = _places(token, tokens, kv_head, WG, GROUP, KV_HEADS, HEAD_DIM, of_acc)
    gl.store(out + place, (acc / total).to(out.dtype.element_ty), mask=keep)


@gluon.jit
def _ones(dtype: gl.constexpr, BLOCK_N: gl.constexpr):
    """[BLOCK_N, ONES], for the row sums."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    one = gl.full([ONES, BLOCK_N], 1.0, gl.float32, layout).to(dtype)
    ones = gl.allocate_shared_memory(dtype, [ONES, BLOCK_N], gl.NVMMASharedLayout(128, 16), one)
    fence_async_shared()
    return ones.permute([1, 0])


@gluon.jit(do_not_specialize_on_alignment=INDEX_ARGS)
def _hopper_kernel(
    q, keys, values, page_table, rows, query_starts, context_lens, tiles, out, scale, table_stride,
    TOKENS: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, SPLIT_SIZE: gl.constexpr, OCTAVE: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """keys, values: descriptors of the caches as [pages * heads * slots, dim]."""
    wait_for_inputs(EARLY)
    kv_head = gl.program_id(0)
    seq, token, tokens, position = tile_span(
        tiles, query_starts, context_lens, gl.program_id(1), True, TOKENS
    )
    pages = page_table + gl.load(rows + seq).to(gl.int64) * table_stride

    dtype: gl.constexpr = keys.dtype
    BOX: gl.constexpr = keys.block_shape
    key_ring, key_tiles = make_ring(dtype, BOX, BLOCK_N, HEAD_DIM)
    value_ring, value_tiles = make_ring(dtype, BOX, BLOCK_N, HEAD_DIM)
    queries = gl.allocate_shared_memory(
        dtype, [CONSUMERS, ROWS, HEAD_DIM], gl.NVMMASharedLayout(128, 16)
    )
    operands = (_ones(dtype, BLOCK_N), key_tiles, value_tiles)
    barriers = make_barriers()
    span = (token, tokens, position)
    gl.warp_specialize(
        [
            (_consume, ((q, out), queries, operands, value_ring, barriers, span, kv_head, scale,
                        GROUP, KV_HEADS, SPLIT_SIZE, OCTAVE, 0, EARLY)),
            (_consume, ((q, out), queries, operands, value_ring, barriers, span, kv_head, scale,
                        GROUP, KV_HEADS, SPLIT_SIZE, OCTAVE, 1, EARLY)),
            (produce, ((keys, values), (key_ring, value_ring), barriers, pages, kv_head,
                       position + tokens, KV_HEADS, PAGE_SIZE, HEAD_DIM // BAND, BLOCK_N, EARLY)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(_hopper_kernel)


class HopperPrefill:
    """`prefill_attention`, computed by this kernel."""

    def __init__(self) -> None:
        self._descriptor_of = KeptDescriptors(_descriptor)

    def can_run(self, q: Tensor, inputs: PagedInputs, config: PagedConfig) -> bool:
        """Whether this kernel takes these tensors; the bits are those of `prefill_attention`."""
        return (
            suits_hopper(q, inputs)
            and (config.prefill.block_m, config.block_n) == (BLOCK_M, BLOCK_N)
            and q.shape[1] // inputs.keys.shape[1] <= BLOCK_M
        )

    def __call__(
        self, q: Tensor, inputs: PagedInputs, tiles: Tensor, config: PagedConfig, out: Tensor
    ) -> None:
        """Takes the arguments of `prefill_attention`."""
        if tiles.shape[0] == 0:
            return
        _, kv_heads, page_size, head_dim = inputs.keys.shape
        group = q.shape[1] // kv_heads
        assert q.is_contiguous() and out.is_contiguous() and inputs.keys.is_contiguous()
        _launch(
            (kv_heads, tiles.shape[0], 1),
            (
                q, self._descriptor_of(inputs.keys), self._descriptor_of(inputs.values),
                inputs.page_table, inputs.rows, inputs.query_starts, inputs.context_lens, tiles,
                out, inputs.state_scale, inputs.table_stride,
            ),
            {
                "TOKENS": BLOCK_M // group,
                "GROUP": group,
                "KV_HEADS": kv_heads,
                "HEAD_DIM": head_dim,
                "PAGE_SIZE": page_size,
                "BLOCK_N": BLOCK_N,
                "SPLIT_SIZE": config.split_size,
                "OCTAVE": config.octave,
                **early_options(),
                "num_warps": 4,
            },
            (inputs.kind, q.dtype, alignments(q, out), int_kind(inputs.table_stride)),
        )  # fmt: skip


def _descriptor(cache: Tensor) -> TensorDescriptor:
    pages, kv_heads, page_size, head_dim = cache.shape
    return TensorDescriptor(
        Memory(cache.data_ptr(), cache.dtype),
        [pages * kv_heads * page_size, head_dim],
        [head_dim, 1],
        [min(page_size, BLOCK_N), BAND.value],
        gl.NVMMASharedLayout(128, 16),
    )
