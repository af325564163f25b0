"""Attention of few queries over a long context: programs share out the splits of the keys.

The parallel axis is (kv head, query tile, lane). Each lane of a tile takes a run of neighbouring
splits and writes their softmax states to fp32 scratch for `merge_splits.py`. Where tiles alone fill
the chip there is one lane, which folds the splits in registers and writes the output itself. The
grid follows from host integers and lengths are read on the device, so a captured graph stays right
as contexts grow; lanes without a split return. For many queries see `paged_prefill.py`.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.draft_paths import plain_end, walked
from quire.kernels.early import early_options, let_next_start, wait_for_last
from quire.kernels.head_parts import divided_parts, fold_parts, load_parts, store_parts
from quire.kernels.launch import Launcher, alignments
from quire.kernels.paged_inputs import PagedInputs, SplitGrid
from quire.kernels.paged_loads import load_cells, load_tile, scales_ahead
from quire.kernels.paged_tile import (
    INDEX_ARGS,
    PagedConfig,
    attend_split,
    attend_tile,
    empty_state,
    fold,
    fold_weights,
    row_positions,
    split_borders,
    split_span,
    with_sink,
)
from quire.kernels.splits import lane_splits, split_start

WIDEST_WALK = 128  # head dim


@triton.jit
def tile_span(
    tiles, query_starts, context_lens, tile, HAS_TILES: tl.constexpr, TOKENS: tl.constexpr
):
    """(sequence, first flat token, tokens, position of the first token) of a query tile."""
    if HAS_TILES:
        seq = tl.load(tiles + tile * 3)
        start = tl.load(tiles + tile * 3 + 1)
        begin = tl.load(query_starts + seq)
        length = tl.load(query_starts + seq + 1) - begin
        token = begin + start
        tokens = tl.minimum(length - start, TOKENS)
        position = tl.load(context_lens + seq) - length + start
    else:
        seq = tile
        token = tile
        tokens = 1
        position = tl.load(context_lens + tile) - 1
    return seq, token, tokens, position


@triton.jit
def sharers(
    page_table, rows, context_lens, paths, seq, split, num_seqs, table_stride,
    COMPANY: tl.constexpr, COMPANY_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, OCTAVE: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """(which members of the company of `seq` share this split, their page, how many they are).

    The split must end before each member's last key, and before its drafts. Then every query sees
    all of it, and its state goes to scratch.
    """
    first = seq // COMPANY * COMPANY
    member = first + tl.arange(0, COMPANY_PAD)
    is_member = (member < num_seqs) & (member < first + COMPANY)
    context = plain_end(context_lens, paths, member, is_member, PATH)
    row = tl.load(rows + member, mask=is_member, other=0).to(tl.int64)
    high = split_start(split + 1, SPLIT_SIZE, OCTAVE)
    is_behind = is_member & (context > high)
    column = high // PAGE_SIZE - 1
    page = tl.load(page_table + row * table_stride + column, mask=is_behind, other=-1)
    chosen = tl.max(page, 0)
    shares = is_behind & (page == chosen)
    return shares, chosen, tl.sum(shares.to(tl.int32), 0)


@triton.jit
def _leave(
    scratch, part, top, total, acc, is_row,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Store a split's state for `merge_splits.py`; part [BLOCK_M] are its rows in scratch."""
    acc_scratch, sums_scratch = scratch
    store_parts(acc_scratch, part, is_row, acc, HEAD_DIM, HEAD_PAD, BITS)
    tl.store(sums_scratch + part * 2, top, mask=is_row)
    tl.store(sums_scratch + part * 2 + 1, total, mask=is_row)


@triton.jit
def _answer(
    out, head, top, total, acc, sink, is_row, scale,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write what merging would write: the weight of a single split is exactly 1."""
    if HAS_SINKS:
        total = with_sink(total, top, tl.load(sink), scale)
    parts = divided_parts(acc, total)
    store_parts(out, head, is_row, parts, HEAD_DIM, HEAD_PAD, BITS)


@triton.jit
def _walk(
    query, keys, values, pages, cells, split, borders, positions, scale, scratch, part, is_row,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    OCTAVE: tl.constexpr, STATES: tl.constexpr, WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr,
    FOLDS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """(place, top, total, acc) of the last split of a run; earlier splits are stored or folded in.

    One loop covers the tiles of all splits, so the loads of the next tiles are always in flight.
    `cells` are those of the first tile; `attend` says why they run ahead."""
    oldest, low, high = borders
    ones = tl.full([BLOCK_N, 16], 1.0, tl.float32).to(query[0].dtype)
    top, total, acc = empty_state(query[0].shape[0], HEAD_PAD, BITS)
    folded = top, total, acc
    border = split_start(split + 1, SPLIT_SIZE, OCTAVE)
    n = low + tl.arange(0, BLOCK_N)
    scales, ahead = scales_ahead(
        keys, values, pages, cells, n, oldest, high, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, WINDOW, BITS
    )
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        here, these = cells, scales
        cells = load_cells(pages, n + BLOCK_N, oldest, high, PAGE_SIZE, WINDOW)
        tile = load_tile(
            keys, values, here, n, oldest, high, HEAD_DIM, HEAD_PAD, PAGE_SIZE, PAGE_STRIDE,
            WINDOW, True, BITS,
        )  # fmt: skip
        scales, ahead = scales_ahead(
            keys, values, pages, ahead, n + BLOCK_N, oldest, high, HEAD_DIM, PAGE_SIZE,
            PAGE_STRIDE, WINDOW, BITS,
        )  # fmt: skip
        if start == border:
            split += 1
            border = split_start(split + 1, SPLIT_SIZE, OCTAVE)
            if FOLDS:
                folded = _fold(folded, (top, total, acc), scale)
            else:
                _leave(scratch, part, top, tl.max(total, 1), acc, is_row, HEAD_DIM, HEAD_PAD, BITS)
                part += STATES
            top, total, acc = empty_state(query[0].shape[0], HEAD_PAD, BITS)
        top, total, acc = attend_tile(
            query, tile, these, ones, top, total, acc, n, positions, scale, WINDOW, CAP_SCALE,
            True, BITS,
        )  # fmt: skip
    if FOLDS:
        top, total, acc = _fold(folded, (top, total, acc), scale)
    return part, top, tl.max(total, 1), acc  # the columns are equal, so max picks, not reduces


@triton.jit
def _fold(folded, state, scale):
    """The state of the splits so far with that of the next one."""
    top, old, new = fold_weights(folded[0], state[0], scale)
    total = fold(folded[1], old[:, None], state[1], new[:, None])
    return top, total, fold_parts(folded[2], old, state[2], new)


@triton.jit(do_not_specialize=["num_seqs", "max_splits"], do_not_specialize_on_alignment=INDEX_ARGS)
def _split_kernel(
    q,
    keys,
    values,
    page_table,
    rows,
    query_starts,
    context_lens,
    tiles,
    paths,
    out,
    acc_scratch,
    sums_scratch,
    sinks,
    scale,
    table_stride,
    num_seqs,
    max_splits,
    HAS_TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one kv head
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    OCTAVE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WALKS: tl.constexpr,  # lanes take runs of splits, in one loop; else every n-th, one by one
    FOLDS: tl.constexpr,  # one lane does all splits of a tile and folds them itself
    COMPANY: tl.constexpr,  # sequences that may share splits, done by `paged_shared.py`; 0: none
    COMPANY_PAD: tl.constexpr,
    PATH: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    seq, token, tokens, position = tile_span(
        tiles, query_starts, context_lens, tile, HAS_TILES, TOKENS
    )
    row = tl.load(rows + seq)
    scratch_row = tl.load(tiles + tile * 3 + 2) if HAS_TILES else tile * max_splits
    end = position + tokens
    first_split, num_splits = split_span(position, end, SPLIT_SIZE, OCTAVE, WINDOW)
    lane = tl.program_id(2)
    lanes = tl.num_programs(2)
    split, stop = lane_splits(lane, lanes, first_split, num_splits, end, SPLIT_SIZE, OCTAVE)
    oldest, low, _, _ = split_borders(
        first_split + split, position + 1, end, BLOCK_N, SPLIT_SIZE, OCTAVE, WINDOW
    )
    high = tl.minimum(split_start(first_split + stop, SPLIT_SIZE, OCTAVE), end)
    pages = walked(page_table + row.to(tl.int64) * table_stride, paths, token, end, PATH)
    n = low + tl.arange(0, BLOCK_N)
    cells = load_cells(pages, n, oldest, high, PAGE_SIZE, WINDOW)
    wait_for_last(EARLY)  # nothing that the chain writes was read so far
    if (split >= stop) if WALKS else (lane >= num_splits):
        return

    r = tl.arange(0, BLOCK_M)
    is_row = r // GROUP < tokens
    # Row r is query head r % GROUP of token r // GROUP.
    head = (token + r // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + r % GROUP
    query = load_parts(q, head, is_row, HEAD_DIM, HEAD_PAD, BITS)
    sink = sinks + kv_head * GROUP + r % GROUP
    keys += kv_head * HEAD_STRIDE
    values += kv_head * HEAD_STRIDE
    positions = row_positions(position, end, BLOCK_M, GROUP, WINDOW)
    STATES: tl.constexpr = KV_HEADS * TOKENS * GROUP  # rows of scratch to a split
    scratch = (acc_scratch, sums_scratch)
    first_part = scratch_row.to(tl.int64) * STATES + kv_head * (TOKENS * GROUP) + r
    if WALKS:
        part = first_part + split * STATES
        part, top, total, acc = _walk(
            query, keys, values, pages, cells, first_split + split, (oldest, low, high),
            positions, scale, scratch, part, is_row, HEAD_DIM, HEAD_PAD, PAGE_SIZE, PAGE_STRIDE,
            BLOCK_N, SPLIT_SIZE, OCTAVE, STATES, WINDOW, CAP_SCALE, FOLDS, BITS,
        )  # fmt: skip
        if FOLDS or num_splits == 1:
            _answer(
                out, head, top, total, acc, sink, is_row, scale, HEAD_DIM, HEAD_PAD, BITS, HAS_SINKS
            )
        else:
            _leave(scratch, part, top, total, acc, is_row, HEAD_DIM, HEAD_PAD, BITS)
    else:
        for own in range(lane, num_splits, lanes):
            is_ours = True
            if COMPANY > 0:
                shares, _, count = sharers(
                    page_table, rows, context_lens, paths, tile, own, num_seqs, table_stride,
                    COMPANY, COMPANY_PAD, PAGE_SIZE, SPLIT_SIZE, OCTAVE, PATH,
                )  # fmt: skip
                is_sharer = shares & (tl.arange(0, COMPANY_PAD) == tile % COMPANY)
                is_ours = (count < 2) | (tl.sum(is_sharer.to(tl.int32), 0) == 0)
            if is_ours:
                top, total, acc = attend_split(
                    query, keys, values, pages, first_split + own, position + 1, end, positions,
                    scale, HEAD_DIM, HEAD_PAD, PAGE_SIZE, PAGE_STRIDE, BLOCK_M, BLOCK_N,
                    SPLIT_SIZE, OCTAVE, WINDOW, CAP_SCALE, False, BITS,
                )  # fmt: skip
                if num_splits == 1:
                    _answer(
                        out,
                        head,
                        top,
                        total,
                        acc,
                        sink,
                        is_row,
                        scale,
                        HEAD_DIM,
                        HEAD_PAD,
                        BITS,
                        HAS_SINKS,
                    )
                else:
                    part = first_part + own * STATES
                    _leave(scratch, part, top, total, acc, is_row, HEAD_DIM, HEAD_PAD, BITS)


_launch = Launcher(_split_kernel)


def split_attention(
    q: Tensor, inputs: PagedInputs, grid: SplitGrid, config: PagedConfig, out: Tensor
) -> None:
    """Attend [tokens, heads, dim] queries of the tiles; follow with `merge_splits`."""
    if grid.num_tiles == 0:
        return
    kv_heads, _, head_dim = inputs.heads
    group = q.shape[1] // kv_heads
    assert q.is_contiguous() and out.is_contiguous() and inputs.keys.stride(-1) == 1
    assert grid.tile_tokens * group <= config.split.block_m, f"{grid.tile_tokens=} {group=}"
    # In one loop the states of wide heads would not fit beside its tiles.
    walks = grid.folds or (not grid.company and head_dim <= WIDEST_WALK)
    _launch(
        (kv_heads, grid.num_tiles, grid.lanes),
        (
            q, inputs.keys, inputs.values, inputs.page_table, inputs.rows, inputs.query_starts,
            inputs.context_lens,
            grid.tiles if grid.tiles is not None else inputs.rows,  # unread without tiles
            inputs.any_paths,
            out, grid.acc, grid.sums,
            grid.sums if inputs.sinks is None else inputs.sinks,  # unread without sinks
            inputs.state_scale, inputs.table_stride, grid.num_tiles, grid.max_splits,
        ),
        {
            "HAS_TILES": grid.tiles is not None,
            "TOKENS": grid.tile_tokens,
            "GROUP": group,
            **inputs.layout,
            "BLOCK_M": config.split.block_m,
            "BLOCK_N": config.block_n,
            "SPLIT_SIZE": config.split_size,
            "OCTAVE": config.octave,
            "WINDOW": inputs.window,
            "CAP_SCALE": inputs.cap_scale,
            "HAS_SINKS": inputs.sinks is not None,
            "WALKS": walks,
            "FOLDS": grid.folds,
            "COMPANY": grid.company,
            "COMPANY_PAD": triton.next_power_of_2(max(1, grid.company)),
            "PATH": inputs.path_width,
            **early_options(),
            "num_warps": config.split.num_warps,
            "num_stages": _num_stages(grid, inputs, config),
            "maxnreg": _most_registers(inputs, config),
        },
        (
            inputs.kind, q.dtype, alignments(q, inputs.sinks), inputs.table_stride,
            alignments(grid.acc, grid.sums),
        ),
    )  # fmt: skip


def _most_registers(inputs: PagedInputs, config: PagedConfig) -> int | None:
    """Of a thread; None: as many as it takes. What is looked up of trees would spill."""
    return None if inputs.path_width else config.split.max_registers or None


def _num_stages(grid: SplitGrid, inputs: PagedInputs, config: PagedConfig) -> int:
    """Stages of the pipeline: one more where one or two programs share a multiprocessor.

    In larger grids its memory would cost a multiprocessor its third program, and codes their
    fourth."""
    kv_heads, _, head_dim = inputs.heads
    programs = grid.num_tiles * kv_heads
    is_few = grid.folds and config.programs // 2 < programs <= 2 * config.programs
    has_room = inputs.coded is None and head_dim <= WIDEST_WALK and _is_large_chip()
    return config.split.num_stages + (is_few and has_room)


@cache
def _is_large_chip() -> bool:
    """Whether the chip has as much shared memory as Hopper; consumer chips have less than half."""
    if not torch.cuda.is_available():
        return False
    chip = torch.cuda.get_device_properties(torch.cuda.current_device())
    return getattr(chip, "shared_memory_per_block_optin", 0) >= 200 << 10
