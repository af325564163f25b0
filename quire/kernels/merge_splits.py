"""Fold the split states that `paged_split.py` left in scratch into outputs.

A program of a few query rows walks their splits left to right with the formula prefill uses in
registers. Loads do not depend on the fold, so they are unrolled to overlap; the fold itself is two
dependent instructions a split. The split kernel has already finished tiles of a single split and
tiles of a single lane.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.launch import Launcher, alignments
from quire.kernels.paged_inputs import PagedInputs, SplitGrid
from quire.kernels.paged_split import tile_span
from quire.kernels.paged_tile import (
    INDEX_ARGS,
    PagedConfig,
    fold,
    fold_weights,
    head_pad,
    split_span,
    with_sink,
)


@triton.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=INDEX_ARGS)
def _merge_kernel(
    acc_scratch,
    sums_scratch,
    query_starts,
    context_lens,
    tiles,
    out,
    sinks,
    scale,
    max_splits,
    HAS_TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    OCTAVE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # kv head, token of the tile, query head
    tile = tl.program_id(1)
    kv_head = r // (TOKENS * GROUP)
    tile_token = r // GROUP % TOKENS
    _, token, tokens, position = tile_span(
        tiles, query_starts, context_lens, tile, HAS_TILES, TOKENS
    )
    _, num_splits = split_span(position, position + tokens, SPLIT_SIZE, OCTAVE, WINDOW)
    if num_splits <= 1:
        return
    scratch = tl.load(tiles + tile * 3 + 2) if HAS_TILES else tile * max_splits
    dims = tl.arange(0, HEAD_PAD)
    is_row = (tile_token < tokens) & (kv_head < KV_HEADS)
    keep = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    for base in range(0, num_splits, UNROLL):
        # All loads of a round before its first fold: a round then costs one latency, not many.
        tops = ()
        totals = ()
        accs = ()
        for i in tl.static_range(UNROLL):
            part = (scratch + base + i).to(tl.int64) * (KV_HEADS * TOKENS * GROUP) + r
            # A split past the last reads as one without keys, which folds as the identity.
            live = is_row & (base + i < num_splits)
            split_top = tl.load(sums_scratch + part * 2, mask=live, other=float("-inf"))
            split_total = tl.load(sums_scratch + part * 2 + 1, mask=live, other=0.0)
            place = part[:, None] * HEAD_DIM + dims[None, :]
            split_acc = tl.load(acc_scratch + place, mask=keep & live[:, None], other=0.0)
            tops += (split_top,)  # type: ignore[assignment]
            totals += (split_total,)  # type: ignore[assignment]
            accs += (split_acc,)  # type: ignore[assignment]
        for i in tl.static_range(UNROLL):
            top, old_weight, new_weight = fold_weights(top, tops[i], scale)
            total = fold(total, old_weight, totals[i], new_weight)
            acc = fold(acc, old_weight[:, None], accs[i], new_weight[:, None])
    head = kv_head * GROUP + r % GROUP
    if HAS_SINKS:
        total = with_sink(total, top, tl.load(sinks + head, mask=is_row, other=0.0), scale)
    place = ((token + tile_token).to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] + dims[None, :], result, mask=keep)


_launch = Launcher(_merge_kernel)
MANY_TILES = 32


def merge_splits(
    inputs: PagedInputs,
    grid: SplitGrid,
    config: PagedConfig,
    out: Tensor,
    unroll: int | None = None,
) -> None:
    """Write [tokens, heads, dim] outputs of every tile that has more than one split."""
    if grid.num_tiles == 0 or grid.max_splits <= 1 or grid.folds:
        return
    _, heads, head_dim = out.shape
    kv_heads = inputs.heads[0]
    num_rows = heads * grid.tile_tokens
    # Many tiles fill the chip with several rows a program; few tiles need a program for each row.
    rows = min(8, triton.next_power_of_2(num_rows)) if grid.num_tiles >= MANY_TILES else 1
    unroll = unroll or min(32 // rows, triton.next_power_of_2(grid.max_splits))
    _launch(
        (triton.cdiv(num_rows, rows), grid.num_tiles, 1),
        (
            grid.acc, grid.sums, inputs.query_starts, inputs.context_lens,
            grid.tiles if grid.tiles is not None else inputs.rows,  # unread without tiles
            out,
            grid.sums if inputs.sinks is None else inputs.sinks,  # unread without sinks
            inputs.state_scale, grid.max_splits,
        ),
        {
            "HAS_TILES": grid.tiles is not None,
            "TOKENS": grid.tile_tokens,
            "GROUP": heads // kv_heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "HEAD_PAD": head_pad(head_dim),
            "SPLIT_SIZE": config.split_size,
            "OCTAVE": config.octave,
            "WINDOW": inputs.window,
            "HAS_SINKS": inputs.sinks is not None,
            "ROWS": rows,
            "UNROLL": unroll,
            **early_options(),
            "num_warps": 4,  # a warp alone gets too few registers to hold a round's loads
        },
        (
            inputs.kind, out.dtype,
            alignments(grid.acc, grid.sums),
        ),
    )  # fmt: skip
