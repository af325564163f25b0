"""Attention of many queries on Hopper: one warp copies keys and values, two warpgroups compute.

The arithmetic is that of `paged_prefill.py`, tile by tile and split by split, so the bits agree;
only who does what differs. A producer warp asks the copy engine for pages into a ring of shared
memory; each consumer warpgroup keeps 64 query rows and computes the softmax of one tile while the
matrix units weigh the values of the tile before. Written in Gluon, where layouts, barriers and
registers are the kernel's own business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.launch import Launcher
from quire.kernels.paged_split import PagedInputs, tile_span
from quire.kernels.paged_tile import INDEX_ARGS, LOG2_E, PagedConfig, fold, fold_weights

__all__ = ["HopperLaunch", "HopperPrefill", "can_run"]

BLOCK_M, BLOCK_N = 128, 64  # the tiles this kernel is laid out for

ROWS = gl.constexpr(64)  # query rows of a warpgroup
CONSUMERS = gl.constexpr(2)
BAND = gl.constexpr(64)  # columns of a copied box: 128 bytes, the span of the swizzle
ONES = gl.constexpr(8)  # equal columns of the row sum: the fewest the matrix units take
# What three warpgroups start with, 65,536 / 384 rounded down to 8: the consumers take from the
# producer.
REGISTERS = gl.constexpr(3 * 168)


@gluon.jit
def _tile_rows(
    rows, pages, tile, end, kv_head, KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Append to `rows` where a tile's boxes begin in the cache as [pages * heads * slots, dim].
    Boxes past the end read page 0, which is always there; nothing comes of them."""
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
def _produce(
    caches, rings, barriers, pages, kv_head, end,
    KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BANDS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Keep the rings full, as far as the consumers free their stages."""
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
    """weight [rows] as a column beside x [rows, columns]: the rows of all products lie alike."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return gl.convert_layout(weight, layout, assert_trivial=True)[:, None]


@gluon.jit
def _fold_split(folded, state, scale):
    """Fold the state of a finished split into that of those before it."""
    old_top, old_total, old_acc = folded
    top, total, acc = state
    new_top, old, new = fold_weights(old_top, top, scale)
    total = fold(old_total, _like(old, total), total, _like(new, total))
    return new_top, total, fold(old_acc, _like(old, acc), acc, _like(new, acc))


@gluon.jit
def _clear_past_end(ring, stage, live, BANDS: gl.constexpr, BLOCK_N: gl.constexpr):
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
def _begin_turn(turns, turn, WG: gl.constexpr, TURNS: gl.constexpr):
    """Wait until the other warpgroup has queued its products; the first turn is warpgroup 0's."""
    if TURNS:
        mbarrier.wait(turns.index(WG), (turn ^ WG ^ 1) & 1)


@gluon.jit
def _end_turn(turns, WG: gl.constexpr, TURNS: gl.constexpr):
    if TURNS:
        mbarrier.arrive(turns.index(1 - WG), count=1)


@gluon.jit
def _walk(
    shared, barriers, turns, folded, state, p, tiles, positions, scale,
    MASKED: gl.constexpr, PER_SPLIT: gl.constexpr, WG: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Extend the state by tiles [first, last), always one product behind: `p` are the weights of
    the tile before, whose values the matrix units weigh while this tile's softmax is computed."""
    query, ones, key_tiles, value_tiles = shared
    key_ready, key_free, value_ready, value_free = barriers
    top, total, acc = state
    first, last = tiles
    STAGES: gl.constexpr = key_tiles.shape[0]
    BLOCK_N: gl.constexpr = key_tiles.shape[1]
    for tile in range(first, last):
        stage = tile % STAGES
        before = (tile - 1) % STAGES
        mbarrier.wait(key_ready.index(stage), tile // STAGES & 1)
        _begin_turn(turns, tile, WG, TURNS)
        logits = _logits(query, key_tiles.index(stage))
        mbarrier.wait(value_ready.index(before), (tile - 1) // STAGES & 1)
        total, acc = _weigh(p, value_tiles.index(before), ones, total, acc)
        _end_turn(turns, WG, TURNS)
        logits = warpgroup_mma_wait(2, deps=[logits])
        mbarrier.arrive(key_free.index(stage), count=1)
        is_fresh = tile % PER_SPLIT == 0
        old_top = gl.where(is_fresh, float("-inf"), top)
        new_top, decay, p = _softmax(logits, old_top, tile * BLOCK_N, positions, scale, MASKED)
        p = p.to(value_tiles.dtype)
        total, acc = warpgroup_mma_wait(0, deps=[total, acc])
        mbarrier.arrive(value_free.index(before), count=1)
        if is_fresh:
            folded = _fold_split(folded, (top, total, acc), scale)
            total = gl.zeros_like(total)
            acc = gl.zeros_like(acc)
        else:
            total = total * _like(decay, total)
            acc = acc * _like(decay, acc)
        top = new_top
    return folded, (top, total, acc), p


@gluon.jit
def _attend(
    shared, value_ring, barriers, turns, position, end, scale,
    GROUP: gl.constexpr, PER_SPLIT: gl.constexpr, WG: gl.constexpr, TURNS: gl.constexpr,
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
    _begin_turn(turns, 0, WG, TURNS)
    logits = _logits(query, key_tiles.index(0))
    _end_turn(turns, WG, TURNS)
    logits = warpgroup_mma_wait(0, deps=[logits])
    mbarrier.arrive(key_free.index(0), count=1)
    top, _, p = _softmax(logits, top, 0, positions, scale, True)
    state = (top, total, acc)
    p = p.to(value_tiles.dtype)
    # |0 ... every row sees all keys ... edge ... the causal edge runs through here ... last|
    edge = gl.maximum((position + 1) // BLOCK_N, 1)
    last = gl.cdiv(end, BLOCK_N)
    folded, state, p = _walk(
        shared, barriers, turns, folded, state, p, (1, edge), positions, scale,
        False, PER_SPLIT, WG, TURNS,
    )  # fmt: skip
    folded, state, p = _walk(
        shared, barriers, turns, folded, state, p, (edge, last), positions, scale,
        True, PER_SPLIT, WG, TURNS,
    )  # fmt: skip
    top, total, acc = state
    stage = (last - 1) % STAGES
    mbarrier.wait(value_ready.index(stage), (last - 1) // STAGES & 1)
    _clear_past_end(value_ring, stage, end - (last - 1) * BLOCK_N, HEAD_DIM // BAND, BLOCK_N)
    total, acc = _weigh(p, value_tiles.index(stage), ones, total, acc)
    total, acc = warpgroup_mma_wait(0, deps=[total, acc])
    _, total, acc = _fold_split(folded, (top, total, acc), scale)
    return total, acc


@gluon.jit
def _places(
    token, tokens, kv_head, WG: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where a warpgroup's rows lie in [tokens, heads, dim], and which of them are there: row r is
    query head r % GROUP of token r // GROUP."""
    r = WG * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    head = (token + r // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + r % GROUP
    keep = (r // GROUP < tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    return head[:, None] * HEAD_DIM + dims[None, :], keep


@gluon.jit
def _consume(
    pointers, queries, operands, value_ring, barriers, turns, span, kv_head, scale,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, PER_SPLIT: gl.constexpr, WG: gl.constexpr,
    TURNS: gl.constexpr, HOLD: gl.constexpr,
):  # fmt: skip
    """Attend rows [64 * WG, 64 * WG + 64) of the query tile."""
    q, out = pointers
    token, tokens, position = span
    ones, key_tiles, value_tiles = operands
    BLOCK_N: gl.constexpr = key_tiles.shape[1]
    HEAD_DIM: gl.constexpr = key_tiles.shape[2]
    ACROSS: gl.constexpr = HEAD_DIM // 8  # threads that read a row, 16 bytes each
    coalesced: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    place, keep = _places(token, tokens, kv_head, WG, GROUP, KV_HEADS, HEAD_DIM, coalesced)
    query = queries.index(WG)
    query.store(gl.load(q + place, mask=keep, other=0.0))
    if HOLD:
        of_logits: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
        query = query.load(gl.DotOperandLayout(0, of_logits, 2))
    else:
        fence_async_shared()
    total, acc = _attend(
        (query, ones, key_tiles, value_tiles), value_ring, barriers, turns, position,
        position + tokens, scale, GROUP, PER_SPLIT, WG, TURNS,
    )  # fmt: skip
    total = _like(gl.max(total, 1), acc)  # the columns are equal, so max picks, not reduces
    of_acc: gl.constexpr = acc.type.layout
    place, keep = _places(token, tokens, kv_head, WG, GROUP, KV_HEADS, HEAD_DIM, of_acc)
    gl.store(out + place, (acc / total).to(out.dtype.element_ty), mask=keep)


@gluon.jit
def _ring(dtype: gl.constexpr, BOX: gl.constexpr, TILES: gl.constexpr):
    """Memory for a ring of tiles, as the boxes that are copied and as [stages, tokens, dim]: a
    tile is stored band by band, so its boxes are its consecutive parts."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    BOXES: gl.constexpr = TILES[0] * TILES[1] * TILES[2] // (BOX[0] * BOX[1])
    boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX[0], BOX[1]], layout)
    return boxes, boxes._reinterpret(dtype, TILES, layout)


@gluon.jit
def _ones(dtype: gl.constexpr, BLOCK_N: gl.constexpr):
    """[BLOCK_N, ONES], for the row sums."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    one = gl.full([ONES, BLOCK_N], 1.0, gl.float32, layout).to(dtype)
    ones = gl.allocate_shared_memory(dtype, [ONES, BLOCK_N], gl.NVMMASharedLayout(128, 16), one)
    fence_async_shared()
    return ones.permute([1, 0])


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit(do_not_specialize_on_alignment=INDEX_ARGS)
def _hopper_kernel(
    q, keys, values, page_table, rows, query_starts, context_lens, tiles, out, scale, table_stride,
    TOKENS: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, SPLIT_SIZE: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, HOLD: gl.constexpr, CONSUMER: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """CONSUMER: registers of a consumer's thread."""
    wait_for_inputs(EARLY)
    kv_head = gl.program_id(0)
    seq, token, tokens, position = tile_span(
        tiles, query_starts, context_lens, gl.program_id(1), True, TOKENS
    )
    pages = page_table + gl.load(rows + seq).to(gl.int64) * table_stride

    dtype: gl.constexpr = keys.dtype
    BOX: gl.constexpr = keys.block_shape
    PER_SPLIT: gl.constexpr = SPLIT_SIZE // BLOCK_N
    key_ring, key_tiles = _ring(dtype, BOX, [STAGES, BLOCK_N, HEAD_DIM])
    value_ring, value_tiles = _ring(dtype, BOX, [STAGES, BLOCK_N, HEAD_DIM])
    queries = gl.allocate_shared_memory(
        dtype, [CONSUMERS, ROWS, HEAD_DIM], gl.NVMMASharedLayout(128, 16)
    )
    operands = (_ones(dtype, BLOCK_N), key_tiles, value_tiles)
    barriers = (
        _barriers(STAGES, 1), _barriers(STAGES, CONSUMERS),
        _barriers(STAGES, 1), _barriers(STAGES, CONSUMERS),
    )  # fmt: skip
    turns = _barriers(CONSUMERS, 1)
    span = (token, tokens, position)
    gl.warp_specialize(
        [
            (_consume, ((q, out), queries, operands, value_ring, barriers, turns, span, kv_head,
                        scale, GROUP, KV_HEADS, PER_SPLIT, 0, TURNS, HOLD)),
            (_consume, ((q, out), queries, operands, value_ring, barriers, turns, span, kv_head,
                        scale, GROUP, KV_HEADS, PER_SPLIT, 1, TURNS, HOLD)),
            (_produce, ((keys, values), (key_ring, value_ring), barriers, pages, kv_head,
                        position + tokens, KV_HEADS, PAGE_SIZE, HEAD_DIM // BAND, BLOCK_N,
                        STAGES)),
        ],
        [4, 1],
        [CONSUMER, REGISTERS - 2 * CONSUMER],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HopperLaunch:
    """How the kernel is compiled; decides speed only."""

    stages: int = 3  # tiles of keys, and of values, in the ring
    turns: bool = False  # the warpgroups queue their products in turn
    hold: bool = True  # queries in registers, not in shared memory
    registers: int = 240  # of a consumer's thread


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a cache lies: what a descriptor needs of a tensor, without keeping it alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def can_run(q: Tensor, inputs: PagedInputs, config: PagedConfig) -> bool:
    """Whether this kernel takes these tensors; the bits are those of `prefill_attention`."""
    _, kv_heads, page_size, head_dim = inputs.keys.shape
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == inputs.keys.dtype
        and head_dim in (64, 128)
        and page_size in (16, 32, 64, 128, 256)
        and (config.prefill.block_m, config.block_n) == (BLOCK_M, BLOCK_N)
        and q.shape[1] // kv_heads <= BLOCK_M
    )


_launch = Launcher(_hopper_kernel)


class HopperPrefill:
    """`prefill_attention` by this kernel. Keeps the descriptors of the caches it has seen, which
    cost more to make than to use."""

    def __init__(self, launch: HopperLaunch | None = None) -> None:
        self.launch = launch or HopperLaunch()
        self._descriptors: dict[tuple[int, torch.dtype, torch.Size], TensorDescriptor] = {}

    def __call__(
        self, q: Tensor, inputs: PagedInputs, tiles: Tensor, config: PagedConfig, out: Tensor
    ) -> None:
        if tiles.shape[0] == 0:
            return
        _, kv_heads, page_size, head_dim = inputs.keys.shape
        group = q.shape[1] // kv_heads
        assert q.is_contiguous() and out.is_contiguous() and inputs.keys.is_contiguous()
        table_stride = inputs.page_table.stride(0)
        _launch(
            (kv_heads, tiles.shape[0], 1),
            (
                q, self._descriptor(inputs.keys), self._descriptor(inputs.values),
                inputs.page_table, inputs.rows, inputs.query_starts, inputs.context_lens, tiles,
                out, inputs.scale * LOG2_E, table_stride,
            ),
            {
                "TOKENS": BLOCK_M // group,
                "GROUP": group,
                "KV_HEADS": kv_heads,
                "HEAD_DIM": head_dim,
                "PAGE_SIZE": page_size,
                "BLOCK_N": BLOCK_N,
                "SPLIT_SIZE": config.split_size,
                "STAGES": self.launch.stages,
                "TURNS": self.launch.turns,
                "HOLD": self.launch.hold,
                "CONSUMER": self.launch.registers,
                **early_options(),
                "num_warps": 4,
            },
            (inputs.kind, q.dtype, q.data_ptr() % 16 == 0, table_stride),
        )  # fmt: skip

    def _descriptor(self, cache: Tensor) -> TensorDescriptor:
        key = (cache.data_ptr(), cache.dtype, cache.shape)
        found = self._descriptors.get(key)
        if found is None:
            pages, kv_heads, page_size, head_dim = cache.shape
            found = self._descriptors[key] = TensorDescriptor(
                Memory(cache.data_ptr(), cache.dtype),
                [pages * kv_heads * page_size, head_dim],
                [head_dim, 1],
                [min(page_size, BLOCK_N), BAND.value],
                gl.NVMMASharedLayout(128, 16),
            )
        return found
