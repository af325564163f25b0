"""Attention of few queries over latent pages: each program takes one split of the keys.

The parallel axis is (part of the query heads, query tile, split); all heads of a part are rows of
one tile, so a page is read once for them, and once for keys and values. States go to the scratch
that `merge_splits.py` folds, laid out as for one kv head; grids follow host integers alone, as in
`paged_split.py`, and may be captured.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.draft_paths import walked
from quire.kernels.latent_tile import attend_latent_split, load_query
from quire.kernels.launch import Launcher, alignments
from quire.kernels.paged_inputs import PagedInputs, SplitGrid
from quire.kernels.paged_split import tile_span
from quire.kernels.paged_tile import INDEX_ARGS, LOG2_E, Launch, PagedConfig, head_pad


@triton.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=INDEX_ARGS)
def _latent_split_kernel(
    q, keys, page_table, rows, query_starts, context_lens, tiles, paths, out, acc_scratch,
    sums_scratch, scale, table_stride, max_splits,
    HAS_TILES: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    part, tile, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, token, tokens, position = tile_span(
        tiles, query_starts, context_lens, tile, HAS_TILES, TOKENS
    )
    row = tl.load(rows + seq)
    end = position + tokens
    num_splits = tl.cdiv(end, SPLIT_SIZE)
    if lane >= num_splits:
        return
    scratch = tl.load(tiles + tile * 3 + 2) if HAS_TILES else tile * max_splits

    r = tl.arange(0, BLOCK_M)
    is_row = r // GROUP < tokens
    # Row r is head r % GROUP of this part, of token r // GROUP.
    in_tile = r // GROUP * HEADS + part * GROUP + r % GROUP
    q_row = token.to(tl.int64) * HEADS + in_tile
    q_latent, q_rope = load_query(q, q_row, is_row, RANK, RANK_PAD, ROPE, ROPE_PAD)
    dims = tl.arange(0, RANK_PAD)[:, None]
    keep = is_row[None, :] & (dims < RANK)
    pages = walked(page_table + row.to(tl.int64) * table_stride, paths, token, end, PATH)
    for split in range(lane, num_splits, tl.num_programs(2)):
        top, total, acc = attend_latent_split(
            q_latent, q_rope, keys, pages, split, position + 1, end, position + r // GROUP, scale,
            RANK, RANK_PAD, ROPE, ROPE_PAD, PAGE_SIZE, BLOCK_M, BLOCK_N, SPLIT_SIZE, False,
        )  # fmt: skip
        if num_splits == 1:
            # What merging a single split would give: its weight is exactly 1.
            y = (acc / total[None, :]).to(out.dtype.element_ty)
            tl.store(out + q_row[None, :] * RANK + dims, y, mask=keep)
        else:
            state = (scratch + split).to(tl.int64) * (TOKENS * HEADS) + in_tile
            tl.store(acc_scratch + state[None, :] * RANK + dims, acc, mask=keep)
            tl.store(sums_scratch + state * 2, top, mask=is_row)
            tl.store(sums_scratch + state * 2 + 1, total, mask=is_row)


_launch = Launcher(_latent_split_kernel)


def latent_constants(
    q: Tensor, inputs: PagedInputs, rank: int, config: PagedConfig, launch: Launch
) -> dict[str, object]:
    """Compile-time sizes that both paths share."""
    _, kv_heads, page_size, width = inputs.keys.shape
    assert kv_heads == 1 and q.shape[2] == width, f"{q.shape=} {inputs.keys.shape=}"
    assert q.is_contiguous() and inputs.keys.is_contiguous()
    return {
        "HEADS": q.shape[1],
        "RANK": rank,
        "RANK_PAD": head_pad(rank),
        "ROPE": width - rank,
        "ROPE_PAD": head_pad(width - rank),
        "PAGE_SIZE": page_size,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": config.block_n,
        "SPLIT_SIZE": config.split_size,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }


def latent_split_attention(
    q: Tensor, inputs: PagedInputs, grid: SplitGrid, config: PagedConfig, parts: int, out: Tensor
) -> None:
    """Attend [tokens, heads, rank + rope] queries of the tiles into [tokens, heads, rank]; follow
    with `merge_splits` unless `grid.max_splits` is 1."""
    if grid.num_tiles == 0:
        return
    group = q.shape[1] // parts
    assert out.is_contiguous() and grid.tile_tokens * group <= config.split.block_m, f"{grid=}"
    table_stride = inputs.page_table.stride(0)
    constants = latent_constants(q, inputs, out.shape[2], config, config.split)
    _launch(
        (parts, grid.num_tiles, grid.lanes),
        (
            q, inputs.keys, inputs.page_table, inputs.rows, inputs.query_starts,
            inputs.context_lens,
            grid.tiles if grid.tiles is not None else inputs.rows,  # unread without tiles
            inputs.any_paths,
            out, grid.acc, grid.sums, inputs.scale * LOG2_E, table_stride, grid.max_splits,
        ),
        {
            "HAS_TILES": grid.tiles is not None,
            "TOKENS": grid.tile_tokens,
            "GROUP": group,
            **constants,
            "PATH": inputs.path_width,
        },
        (
            inputs.kind, q.dtype, alignments(q, out), table_stride,
            alignments(grid.acc, grid.sums),
        ),
    )  # fmt: skip
