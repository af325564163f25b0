"""Attention of few queries over a long context: each program takes one split of the keys.

The parallel axis is (kv head, query tile, split). A program writes its split's softmax state to
fp32 scratch for `merge_splits.py`, or the output itself where the context is a single split. The
grid is fixed by host integers and lengths are read on the device, so a captured graph stays right
as contexts grow; lanes beyond a context's last split return at once. Many queries: see
`paged_prefill.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.launch import Launcher, alignments
from quire.kernels.paged_tile import (
    INDEX_ARGS,
    LOG2_E,
    PagedConfig,
    attend_split,
    head_pad,
    row_positions,
    split_span,
    with_sink,
)


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """What both attention kernels read; contiguous, int32 where integral."""

    keys: Tensor  # [pages, kv_heads, page_size, dim]
    values: Tensor
    page_table: Tensor  # [max_rows, max_pages]
    rows: Tensor  # [seqs]
    query_starts: Tensor  # [seqs + 1]
    context_lens: Tensor  # [seqs]
    scale: float
    window: int = 0  # last positions that a query sees, its own included; 0: all
    softcap: float = 0.0  # logits go through softcap * tanh(logit / softcap); 0: as they are
    sinks: Tensor | None = None  # [heads] f32 logits that take part in the softmax, no values

    @property
    def state_scale(self) -> float:
        """From the logits in a softmax state to powers of two: products of q and k, or tanh."""
        return (self.softcap or self.scale) * LOG2_E

    @property
    def cap_scale(self) -> float:
        """From products of q and k to what exp2 turns into tanh; 0: no cap."""
        return 2 * LOG2_E * self.scale / self.softcap if self.softcap else 0.0

    @property
    def kind(self) -> tuple[object, ...]:
        """What a compiled kernel depends on, for the launcher; the integers are int32."""
        aligned = alignments(self.keys, self.values, self.page_table)
        return self.keys.dtype, self.rows.dtype, aligned


@dataclass(frozen=True, slots=True)
class SplitGrid:
    """How the split kernel is laid out over a batch.

    `tiles` rows are (sequence, first query token of it, first scratch row): None means that tile i
    is the single token of sequence i and owns scratch rows [i * max_splits, (i + 1) * max_splits).
    """

    tiles: Tensor | None  # [num_tiles, 3]
    num_tiles: int
    tile_tokens: int  # most query tokens in a tile
    max_splits: int  # bound on splits of any one tile
    lanes: int  # programs that share the splits of a tile
    acc: Tensor  # [splits, kv_heads, tile_tokens * group, dim] fp32 scratch, flat
    sums: Tensor  # [splits, kv_heads, tile_tokens * group, 2] fp32 scratch, flat: row max, row sum
    # Neighbours in the batch whose shared splits `paged_shared.py` attends together; 0: none.
    company: int = 0


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
    page_table, rows, context_lens, seq, split, num_seqs, table_stride,
    COMPANY: tl.constexpr, COMPANY_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
):  # fmt: skip
    """(members, their page, how many) of the company of `seq` that share this split.

    The split must lie wholly behind each member, with at least one key after it: then every
    query sees all of it, and its state goes to scratch.
    """
    first = seq // COMPANY * COMPANY
    member = first + tl.arange(0, COMPANY_PAD)
    is_member = (member < num_seqs) & (member < first + COMPANY)
    context = tl.load(context_lens + member, mask=is_member, other=0)
    row = tl.load(rows + member, mask=is_member, other=0).to(tl.int64)
    is_behind = is_member & (context > (split + 1) * SPLIT_SIZE)
    column = (split + 1) * (SPLIT_SIZE // PAGE_SIZE) - 1
    page = tl.load(page_table + row * table_stride + column, mask=is_behind, other=-1)
    chosen = tl.max(page, 0)
    shares = is_behind & (page == chosen)
    return shares, chosen, tl.sum(shares.to(tl.int32), 0)


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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    COMPANY: tl.constexpr,  # sequences that may share splits, done by `paged_shared.py`; 0: none
    COMPANY_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    lane = tl.program_id(2)
    seq, token, tokens, position = tile_span(
        tiles, query_starts, context_lens, tile, HAS_TILES, TOKENS
    )
    row = tl.load(rows + seq)  # before the branch, to overlap the loads above
    end = position + tokens
    first_split, num_splits = split_span(position, end, SPLIT_SIZE, WINDOW)
    if lane >= num_splits:
        return
    scratch = tl.load(tiles + tile * 3 + 2) if HAS_TILES else tile * max_splits

    r = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PAD)
    is_row = r // GROUP < tokens
    keep = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    # Row r is query head r % GROUP of token r // GROUP.
    head = (token + r // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + r % GROUP
    place = head[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(q + place, mask=keep, other=0.0)

    pages = page_table + row.to(tl.int64) * table_stride
    head_offset = kv_head * PAGE_SIZE * HEAD_DIM
    positions = row_positions(position, end, BLOCK_M, GROUP, WINDOW)
    for split in range(lane, num_splits, tl.num_programs(2)):
        is_ours = True
        if COMPANY > 0:
            shares, _, count = sharers(
                page_table, rows, context_lens, tile, split, num_seqs, table_stride,
                COMPANY, COMPANY_PAD, PAGE_SIZE, SPLIT_SIZE,
            )  # fmt: skip
            own = shares & (tl.arange(0, COMPANY_PAD) == tile % COMPANY)
            is_ours = (count < 2) | (tl.sum(own.to(tl.int32), 0) == 0)
        if is_ours:
            top, total, acc = attend_split(
                query, keys + head_offset, values + head_offset, pages, first_split + split,
                position + 1, end, positions, scale, HEAD_DIM, HEAD_PAD, PAGE_SIZE,
                KV_HEADS * PAGE_SIZE * HEAD_DIM, BLOCK_M, BLOCK_N, SPLIT_SIZE, WINDOW, CAP_SCALE,
                False,
            )  # fmt: skip
            if num_splits == 1:
                # What merging a single split would give: its weight is exactly 1.
                if HAS_SINKS:
                    sink = tl.load(sinks + kv_head * GROUP + r % GROUP)
                    total = with_sink(total, top, sink, scale)
                tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=keep)
            else:
                part = (scratch + split).to(tl.int64) * (KV_HEADS * TOKENS * GROUP)
                part += kv_head * (TOKENS * GROUP) + r
                tl.store(acc_scratch + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=keep)
                tl.store(sums_scratch + part * 2, top, mask=is_row)
                tl.store(sums_scratch + part * 2 + 1, total, mask=is_row)


_launch = Launcher(_split_kernel)


def split_attention(
    q: Tensor, inputs: PagedInputs, grid: SplitGrid, config: PagedConfig, out: Tensor
) -> None:
    """Attend [tokens, heads, dim] queries of the tiles; follow with `merge_splits` unless
    `grid.max_splits` is 1."""
    if grid.num_tiles == 0:
        return
    _, kv_heads, page_size, head_dim = inputs.keys.shape
    group = q.shape[1] // kv_heads
    assert q.is_contiguous() and out.is_contiguous() and inputs.keys.is_contiguous()
    assert grid.tile_tokens * group <= config.split.block_m, f"{grid.tile_tokens=} {group=}"
    table_stride = inputs.page_table.stride(0)
    _launch(
        (kv_heads, grid.num_tiles, grid.lanes),
        (
            q, inputs.keys, inputs.values, inputs.page_table, inputs.rows, inputs.query_starts,
            inputs.context_lens,
            grid.tiles if grid.tiles is not None else inputs.rows,  # unread without tiles
            out, grid.acc, grid.sums,
            grid.sums if inputs.sinks is None else inputs.sinks,  # unread without sinks
            inputs.state_scale, table_stride, grid.num_tiles, grid.max_splits,
        ),
        {
            "HAS_TILES": grid.tiles is not None,
            "TOKENS": grid.tile_tokens,
            "GROUP": group,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "HEAD_PAD": head_pad(head_dim),
            "PAGE_SIZE": page_size,
            "BLOCK_M": config.split.block_m,
            "BLOCK_N": config.block_n,
            "SPLIT_SIZE": config.split_size,
            "WINDOW": inputs.window,
            "CAP_SCALE": inputs.cap_scale,
            "HAS_SINKS": inputs.sinks is not None,
            "COMPANY": grid.company,
            "COMPANY_PAD": triton.next_power_of_2(max(1, grid.company)),
            **early_options(),
            "num_warps": config.split.num_warps,
            "num_stages": config.split.num_stages,
        },
        (
            inputs.kind, q.dtype, alignments(q, inputs.sinks), table_stride,
            alignments(grid.acc, grid.sums),
        ),
    )  # fmt: skip
