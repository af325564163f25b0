"""The arithmetic of attention over latent pages, written once so that every path rounds alike.

One kv head serves all query heads, and its values are the first RANK numbers of its keys: a tile
of BLOCK_N slots is read once for both. Tiles, splits and folds are those of `paged_tile.py`, turned
on their side: keys stand on the row side of the matrix units and queries on the column side, so
that 16 query rows and 32 take the same instruction and give the same bits. The row sum is a
product with ones as there. Nothing here is launched: see `latent_split.py` and
`latent_prefill.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.paged_loads import load_cells, row_of
from quire.kernels.paged_tile import Launch, PagedConfig

PROGRAMS = 4096  # so many that nearly every split has a lane of its own
SUM_ROWS = tl.constexpr(64)  # equal rows of the sum: as many as the wide matrix instruction wants


def latent_config(num_heads: int, dtype: torch.dtype) -> PagedConfig:
    """Constants of the backend; `block_n` and `split_size` decide bits, launches only speed."""
    if dtype == torch.float32:  # no matrix units in IEEE fp32: for tests, not for speed
        return PagedConfig(16, 512, Launch(16, 4, 1), Launch(16, 4, 1), PROGRAMS)
    # A tile of keys is 72 KiB (DeepSeek): two in flight leave room for 32 query rows beside them.
    # Prefill holds two states of [rank, rows] in registers, and with fewer than eight warps either
    # path spills.
    wide = Launch(32, 8, 2)
    few = Launch(16, 8, 2) if num_heads <= 16 else wide
    return PagedConfig(64, 512, few, wide, PROGRAMS)


def head_blocks(num_heads: int, config: PagedConfig) -> int:
    """Equal parts of the query heads, none larger than a tile of either path.

    >>> small = PagedConfig(64, 512, Launch(16, 4, 2), Launch(32, 4, 2))
    >>> head_blocks(16, small), head_blocks(128, small), head_blocks(40, small)
    (1, 8, 4)
    """
    most = min(config.split.block_m, config.prefill.block_m)
    return next(n for n in range(1, num_heads + 1) if num_heads % n == 0 and num_heads // n <= most)


@triton.jit
def empty_latent_state(RANK_PAD: tl.constexpr, BLOCK_M: tl.constexpr):
    """Softmax state over no keys: max, sum and weighted sum of values of each query row."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([SUM_ROWS, BLOCK_M], tl.float32)
    acc = tl.zeros([RANK_PAD, BLOCK_M], tl.float32)
    return top, total, acc


@triton.jit
def load_query(
    q, row, keep, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
):  # fmt: skip
    """Query rows [row] of width RANK + ROPE as columns: [RANK_PAD, M] and [ROPE_PAD, M]."""
    latent, rope = tl.arange(0, RANK_PAD)[:, None], tl.arange(0, ROPE_PAD)[:, None]
    start = q + row[None, :] * (RANK + ROPE)
    low = tl.load(start + latent, mask=keep[None, :] & (latent < RANK), other=0.0)
    high = tl.load(start + RANK + rope, mask=keep[None, :] & (rope < ROPE), other=0.0)
    return low, high


@triton.jit
def attend_latent(
    q_latent,  # [RANK_PAD, BLOCK_M]
    q_rope,  # [ROPE_PAD, BLOCK_M]
    top, total, acc, keys, pages,
    first, last,  # positions [first, last), first on a tile border
    positions,  # [BLOCK_M] of the query rows
    scale,  # softmax scale x log2(e)
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Extend a state by the keys of [first, last). MASKED=False promises that every row sees
    every key of every tile; masking such a tile would change no bit."""
    latent_dims, rope_dims = tl.arange(0, RANK_PAD)[None, :], tl.arange(0, ROPE_PAD)[None, :]
    ones = tl.full([SUM_ROWS, BLOCK_N], 1.0, tl.float32).to(q_latent.dtype)
    # Page ids run one tile ahead of the keys, as in `paged_tile.attend`.
    n = first + tl.arange(0, BLOCK_N)
    cells = load_cells(pages, n, 0, last, PAGE_SIZE, 0)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        row = row_of(cells, n, PAGE_SIZE)
        slot = (cells[0].to(tl.int64) * PAGE_SIZE + row)[:, None] * (RANK + ROPE)
        cells = load_cells(pages, n + BLOCK_N, 0, last, PAGE_SIZE, 0)
        # Slots past the end hold anything, NaN too, and 0 * NaN would leak into acc.
        is_live = (n < last)[:, None] if MASKED else (n >= 0)[:, None]
        if MASKED or RANK != RANK_PAD:
            latent = tl.load(keys + slot + latent_dims, is_live & (latent_dims < RANK), other=0.0)
        else:
            latent = tl.load(keys + slot + latent_dims)
        if MASKED or ROPE != ROPE_PAD:
            rope = tl.load(keys + slot + RANK + rope_dims, is_live & (rope_dims < ROPE), other=0.0)
        else:
            rope = tl.load(keys + slot + RANK + rope_dims)
        logits = tl.dot(latent, q_latent, input_precision="ieee")  # [BLOCK_N, BLOCK_M] unscaled
        logits = tl.dot(rope, q_rope, logits, input_precision="ieee")
        if MASKED:
            logits = tl.where(n[:, None] <= positions[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 0))
        # A row that has seen no key yet keeps top = -inf; 0 in its place avoids inf - inf.
        ref = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        decay = tl.exp2((top - ref) * scale)[None, :]
        p = tl.exp2(tl.fma(logits, scale, (ref * -scale)[None, :])).to(latent.dtype)
        total = tl.dot(ones, p, total * decay, input_precision="ieee")
        acc = tl.dot(tl.trans(latent), p, acc * decay, input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def attend_latent_split(
    q_latent, q_rope, keys, pages, split,
    full,  # every row sees all keys before this position; unread unless TWO_LOOPS
    end,  # one past the last query token's position
    positions, scale,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, TWO_LOOPS: tl.constexpr,
):  # fmt: skip
    """The state of one split: (top [M], total [M], acc [RANK_PAD, M]). TWO_LOOPS walks the keys
    that need no mask apart: less work a tile, one more pipeline drain."""
    # |low ... every row sees all keys ... edge ... the causal edge runs through here ... high|
    low = split * SPLIT_SIZE
    high = tl.minimum(low + SPLIT_SIZE, end)
    edge = low
    top, total, acc = empty_latent_state(RANK_PAD, BLOCK_M)
    if TWO_LOOPS:
        edge = tl.maximum(low, tl.minimum(full, high) // BLOCK_N * BLOCK_N)
        top, total, acc = attend_latent(
            q_latent, q_rope, top, total, acc, keys, pages, low, edge, positions, scale,
            RANK, RANK_PAD, ROPE, ROPE_PAD, PAGE_SIZE, BLOCK_N, False,
        )  # fmt: skip
    top, total, acc = attend_latent(
        q_latent, q_rope, top, total, acc, keys, pages, edge, high, positions, scale,
        RANK, RANK_PAD, ROPE, ROPE_PAD, PAGE_SIZE, BLOCK_N, True,
    )  # fmt: skip
    return top, tl.max(total, 0), acc  # the rows are equal, so max picks, not reduces
