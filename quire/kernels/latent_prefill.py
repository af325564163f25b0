"""Attention of many queries over latent pages, in absorbed form: a tile of queries sees all keys.

Splits are walked in order and folded in registers, which is what `latent_split.py` plus
`merge_splits.py` do for few queries; the bits agree by construction.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.latent_split import latent_constants
from quire.kernels.latent_tile import attend_latent_split, load_query
from quire.kernels.launch import Launcher, alignments
from quire.kernels.paged_inputs import PagedInputs
from quire.kernels.paged_split import tile_span
from quire.kernels.paged_tile import INDEX_ARGS, LOG2_E, PagedConfig, fold, fold_weights


@triton.jit(do_not_specialize_on_alignment=INDEX_ARGS)
def _latent_prefill_kernel(
    q, keys, page_table, rows, query_starts, context_lens, tiles, out, scale, table_stride,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    seq, token, tokens, position = tile_span(
        tiles, query_starts, context_lens, tl.program_id(1), True, TOKENS
    )
    end = position + tokens
    r = tl.arange(0, BLOCK_M)
    is_row = r // GROUP < tokens
    # Row r is head r % GROUP of this part, of token r // GROUP.
    q_row = (token + r // GROUP).to(tl.int64) * HEADS + part * GROUP + r % GROUP
    q_latent, q_rope = load_query(q, q_row, is_row, RANK, RANK_PAD, ROPE, ROPE_PAD)
    row = tl.load(rows + seq)
    pages = (page_table + row.to(tl.int64) * table_stride,)  # trees are few queries each
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([RANK_PAD, BLOCK_M], tl.float32)
    for split in range(tl.cdiv(end, SPLIT_SIZE)):
        split_top, split_total, split_acc = attend_latent_split(
            q_latent, q_rope, keys, pages, split, position + 1, end, position + r // GROUP, scale,
            RANK, RANK_PAD, ROPE, ROPE_PAD, PAGE_SIZE, BLOCK_M, BLOCK_N, SPLIT_SIZE, True,
        )  # fmt: skip
        top, old_weight, new_weight = fold_weights(top, split_top, scale)
        total = fold(total, old_weight, split_total, new_weight)
        acc = fold(acc, old_weight[None, :], split_acc, new_weight[None, :])
    dims = tl.arange(0, RANK_PAD)[:, None]
    y = (acc / total[None, :]).to(out.dtype.element_ty)
    tl.store(out + q_row[None, :] * RANK + dims, y, mask=is_row[None, :] & (dims < RANK))


_launch = Launcher(_latent_prefill_kernel)


def latent_prefill_attention(
    q: Tensor, inputs: PagedInputs, tiles: Tensor, config: PagedConfig, parts: int, out: Tensor
) -> None:
    """Attend [tokens, heads, rank + rope] queries into [tokens, heads, rank]; `tiles`
    [num_tiles, 3] as in SplitGrid, with `block_m // group` tokens to a tile."""
    if tiles.shape[0] == 0:
        return
    group = q.shape[1] // parts
    assert out.is_contiguous()
    table_stride = inputs.page_table.stride(0)
    constants = latent_constants(q, inputs, out.shape[2], config, config.prefill)
    _launch(
        (parts, tiles.shape[0], 1),
        (
            q, inputs.keys, inputs.page_table, inputs.rows, inputs.query_starts,
            inputs.context_lens, tiles, out, inputs.scale * LOG2_E, table_stride,
        ),
        {"TOKENS": config.prefill.block_m // group, "GROUP": group, **constants},
        (inputs.kind, q.dtype, alignments(q, out), table_stride),
    )  # fmt: skip
