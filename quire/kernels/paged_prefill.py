"""Attention of many queries: each program takes a tile of queries over all the keys it sees.

A tile packs the query heads of one kv head times several tokens into BLOCK_M rows, so grouped
queries share every key tile. Splits are walked in order and folded in registers, which is what
`paged_split.py` plus `merge_splits.py` do for few queries; the bits agree by construction.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.head_parts import (
    divided_parts,
    fold_parts,
    load_parts,
    store_parts,
    zero_parts,
)
from quire.kernels.launch import Launcher, alignments
from quire.kernels.paged_inputs import PagedInputs
from quire.kernels.paged_split import tile_span
from quire.kernels.paged_tile import (
    INDEX_ARGS,
    PagedConfig,
    attend_split,
    fold,
    fold_weights,
    row_positions,
    split_span,
    with_sink,
)


@triton.jit(do_not_specialize_on_alignment=INDEX_ARGS)
def _prefill_kernel(
    q,
    keys,
    values,
    page_table,
    rows,
    query_starts,
    context_lens,
    tiles,
    out,
    sinks,
    scale,
    table_stride,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
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
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    kv_head = tl.program_id(0)
    seq, token, tokens, position = tile_span(
        tiles, query_starts, context_lens, tl.program_id(1), True, TOKENS
    )
    end = position + tokens

    r = tl.arange(0, BLOCK_M)
    is_row = r // GROUP < tokens
    # Row r is query head r % GROUP of token r // GROUP.
    head = (token + r // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + r % GROUP
    query = load_parts(q, head, is_row, HEAD_DIM, HEAD_PAD, BITS)

    row = tl.load(rows + seq)
    pages = (page_table + row.to(tl.int64) * table_stride,)  # trees are few queries each
    head_offset = kv_head * HEAD_STRIDE
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_parts(BLOCK_M, HEAD_PAD, BITS)
    positions = row_positions(position, end, BLOCK_M, GROUP, WINDOW)
    first_split, num_splits = split_span(position, end, SPLIT_SIZE, OCTAVE, WINDOW)
    for split in range(num_splits):
        split_top, split_total, split_acc = attend_split(
            query, keys + head_offset, values + head_offset, pages, first_split + split,
            position + 1, end, positions, scale, HEAD_DIM, HEAD_PAD, PAGE_SIZE, PAGE_STRIDE,
            BLOCK_M, BLOCK_N, SPLIT_SIZE, OCTAVE, WINDOW, CAP_SCALE, True, BITS,
        )  # fmt: skip
        top, old_weight, new_weight = fold_weights(top, split_top, scale)
        total = fold(total, old_weight, split_total, new_weight)
        acc = fold_parts(acc, old_weight, split_acc, new_weight)
    if HAS_SINKS:
        total = with_sink(total, top, tl.load(sinks + kv_head * GROUP + r % GROUP), scale)
    store_parts(out, head, is_row, divided_parts(acc, total), HEAD_DIM, HEAD_PAD, BITS)


_launch = Launcher(_prefill_kernel)


def prefill_attention(
    q: Tensor, inputs: PagedInputs, tiles: Tensor, config: PagedConfig, out: Tensor
) -> None:
    """Attend [tokens, heads, dim] queries; `tiles` [num_tiles, 3] as in SplitGrid, with
    `block_m // group` tokens to a tile and the third column unused."""
    if tiles.shape[0] == 0:
        return
    kv_heads = inputs.heads[0]
    group = q.shape[1] // kv_heads
    assert q.is_contiguous() and out.is_contiguous() and inputs.keys.stride(-1) == 1
    _launch(
        (kv_heads, tiles.shape[0], 1),
        (
            q, inputs.keys, inputs.values, inputs.page_table, inputs.rows, inputs.query_starts,
            inputs.context_lens, tiles, out,
            q if inputs.sinks is None else inputs.sinks,  # unread without sinks
            inputs.state_scale, inputs.table_stride,
        ),
        {
            "TOKENS": config.prefill.block_m // group,
            "GROUP": group,
            **inputs.layout,
            "BLOCK_M": config.prefill.block_m,
            "BLOCK_N": config.block_n,
            "SPLIT_SIZE": config.split_size,
            "OCTAVE": config.octave,
            "WINDOW": inputs.window,
            "CAP_SCALE": inputs.cap_scale,
            "HAS_SINKS": inputs.sinks is not None,
            **early_options(),
            "num_warps": config.prefill.num_warps,
            "num_stages": config.prefill.num_stages,
        },
        (inputs.kind, q.dtype, alignments(q, inputs.sinks), inputs.table_stride),
    )  # fmt: skip
