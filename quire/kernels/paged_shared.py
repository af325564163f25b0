"""Decode attention over pages that many sequences share, read once for all of them.

Sequences behind one long prefix have the same page ids at the front of their tables. Neighbours in
the batch form a company. For each split of keys that the members share, one program attends the
queries of all of them, as a tile of prefill does. It leaves each member the split state in scratch
that `paged_split.py` would have left, to the bit. The device reads from the page tables who shares
what, so a captured graph stays right as batches change. A page is in two tables only behind equal
prefixes, so one equal page id means that all pages before it are equal too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.draft_paths import plain_end
from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.head_parts import load_parts, store_parts
from quire.kernels.launch import Launcher, alignments
from quire.kernels.paged_inputs import PagedInputs, SplitGrid
from quire.kernels.paged_split import sharers
from quire.kernels.paged_tile import INDEX_ARGS, PagedConfig, attend, empty_state
from quire.kernels.splits import split_start

__all__ = ["company_size", "shared_attention"]


def company_size(config: PagedConfig, group: int) -> int:
    """Sequences whose queries fill one tile."""
    return config.prefill.block_m // group


@triton.jit(do_not_specialize=["num_seqs", "max_splits"], do_not_specialize_on_alignment=INDEX_ARGS)
def _shared_kernel(
    q,
    keys,
    values,
    page_table,
    rows,
    context_lens,
    paths,
    acc_scratch,
    sums_scratch,
    scale,
    table_stride,
    num_seqs,
    max_splits,
    COMPANY: tl.constexpr,
    COMPANY_PAD: tl.constexpr,
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
    CAP_SCALE: tl.constexpr,
    PATH: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    kv_head = tl.program_id(0)
    first = tl.program_id(1) * COMPANY
    split = tl.program_id(2)
    shares, page, count = sharers(
        page_table, rows, context_lens, paths, first, split, num_seqs, table_stride,
        COMPANY, COMPANY_PAD, PAGE_SIZE, SPLIT_SIZE, OCTAVE, PATH,
    )  # fmt: skip
    if count < 2:
        return
    lanes = tl.arange(0, COMPANY_PAD)
    leader = first + tl.min(tl.where(shares, lanes, COMPANY_PAD), 0)
    pages = (page_table + tl.load(rows + leader).to(tl.int64) * table_stride,)

    # Row r is query head r % GROUP of member r // GROUP.
    r = tl.arange(0, BLOCK_M)
    seq = first + r // GROUP
    is_row = (seq < num_seqs) & (r // GROUP < COMPANY)
    row = tl.load(rows + seq, mask=is_row, other=0).to(tl.int64)
    context = plain_end(context_lens, paths, seq, is_row, PATH)
    low = split_start(split, SPLIT_SIZE, OCTAVE)
    high = split_start(split + 1, SPLIT_SIZE, OCTAVE)
    is_row = is_row & (context > high)
    column = high // PAGE_SIZE - 1
    own = tl.load(page_table + row * table_stride + column, mask=is_row, other=-1)
    is_row = is_row & (own == page)

    head = seq.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + r % GROUP
    query = load_parts(q, head, is_row, HEAD_DIM, HEAD_PAD, BITS)
    top, total, acc = empty_state(BLOCK_M, HEAD_PAD, BITS)
    head_offset = kv_head * HEAD_STRIDE
    top, total, acc = attend(
        query, top, total, acc, keys + head_offset, values + head_offset, pages,
        low, high, context, 0, scale,
        HEAD_DIM, HEAD_PAD, PAGE_SIZE, PAGE_STRIDE, BLOCK_N, 0, CAP_SCALE, False, BITS,
    )  # fmt: skip
    part = (seq.to(tl.int64) * max_splits + split) * (KV_HEADS * GROUP) + kv_head * GROUP
    part += r % GROUP
    store_parts(acc_scratch, part, is_row, acc, HEAD_DIM, HEAD_PAD, BITS)
    tl.store(sums_scratch + part * 2, top, mask=is_row)
    tl.store(sums_scratch + part * 2 + 1, tl.max(total, 1), mask=is_row)


_launch = Launcher(_shared_kernel)


def shared_attention(q: Tensor, inputs: PagedInputs, grid: SplitGrid, config: PagedConfig) -> None:
    """Leave the states of the shared splits of [seqs, heads, dim] queries, one query a sequence.

    `split_attention` with `grid.company` set does the other splits."""
    kv_heads = inputs.heads[0]
    group = q.shape[1] // kv_heads
    assert grid.tiles is None and grid.company > 0, "sharing is for decode"
    assert not inputs.window, "a window moves on from what is shared"
    _launch(
        (kv_heads, triton.cdiv(grid.num_tiles, grid.company), grid.max_splits),
        (
            q, inputs.keys, inputs.values, inputs.page_table, inputs.rows, inputs.context_lens,
            inputs.any_paths,
            grid.acc, grid.sums, inputs.state_scale, inputs.table_stride, grid.num_tiles,
            grid.max_splits,
        ),
        {
            "COMPANY": grid.company,
            "COMPANY_PAD": triton.next_power_of_2(grid.company),
            "GROUP": group,
            **inputs.layout,
            "BLOCK_M": config.prefill.block_m,
            "BLOCK_N": config.block_n,
            "SPLIT_SIZE": config.split_size,
            "OCTAVE": config.octave,
            "CAP_SCALE": inputs.cap_scale,
            "PATH": inputs.path_width,
            **early_options(),
            "num_warps": config.prefill.num_warps,
            "num_stages": config.prefill.num_stages,
        },
        (
            inputs.kind, q.dtype, alignments(q, inputs.sinks), inputs.table_stride,
            alignments(grid.acc, grid.sums),
        ),
    )  # fmt: skip
