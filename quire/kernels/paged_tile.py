"""The arithmetic of paged attention, written once so that every path rounds alike.

Keys are walked in tiles of BLOCK_N from position 0; at the borders that `splits.py` sets the
softmax state starts afresh, and the states of the splits are folded left to right. Decode computes
splits in parallel and folds them in `merge_splits.py`, prefill folds them in registers: same tiles,
same order, same formulas, so a position's bits do not depend on the path, the batch or the chunk.
Products that feed a sum are explicit FMAs or matrix units, leaving the compiler nothing to
contract; the row sum is a product with ones, because a plain reduction's order follows the layout.
Windows, soft caps and sinks are compile-time branches: without them the kernels are the plain ones.
Nothing here is launched: see `paged_split.py` and `paged_prefill.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from quire.kernels.coded_tile import factors
from quire.kernels.half_queries import half_queries, takes_halves
from quire.kernels.head_parts import zero_parts
from quire.kernels.paged_loads import load_cells, load_tile, scales_ahead
from quire.kernels.splits import Splits, split_count, split_start

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)

# On an H200 each lane of a lone request takes a 32nd of its context. Splits may therefore grow with
# the position: as long as about 32 remain, no lane is left without work.
OCTAVE = 16

# Small integer arrays are slices of larger uploads: compiling for their alignment would compile
# again whenever a length shifts them.
INDEX_ARGS = ["rows", "query_starts", "context_lens", "tiles", "paths", "sinks"]


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is compiled."""

    block_m: int  # query rows of a program: tokens x query heads of one kv head
    num_warps: int
    num_stages: int
    max_registers: int = 0  # of a thread; 0: as many as it takes


@dataclass(frozen=True, slots=True)
class PagedConfig:
    """Constants of the backend. `block_n` and the splits decide bits and are shared by both
    paths; the two launches only decide speed as long as the matrix units agree across shapes."""

    block_n: int
    split_size: int
    split: Launch
    prefill: Launch
    # Split programs to aim for: lanes share out the splits of a context to get there.
    programs: int = 256  # two to a multiprocessor of an H200
    folds: bool = True  # a lane that has a tile to itself folds its splits, and nothing is merged
    octave: int = 0  # splits while the position doubles (decides bits too); 0: one size for all
    # Of codes: half the bytes and twice the work a byte, so more programs to a multiprocessor.
    coded_split: Launch | None = None  # None: as floats
    coded_programs: int = 256

    @property
    def splits(self) -> Splits:
        return Splits(self.split_size, self.octave)

    @property
    def for_codes(self) -> PagedConfig:
        """The same tiles and splits, launched as pages of codes want it. Wider tiles than usual,
        of many query heads to a kv head, want more registers and are launched as for floats."""
        if self.coded_split is None or self.coded_split.block_m != self.split.block_m:
            return self
        return replace(self, split=self.coded_split, programs=self.coded_programs)

    def __post_init__(self) -> None:
        assert self.split_size % self.block_n == 0, f"{self.split_size=} {self.block_n=}"
        assert self.block_n >= 16 and min(self.split.block_m, self.prefill.block_m) >= 16


def head_pad(head_dim: int) -> int:
    """Width of a tile that holds one head: the matrix units want a power of two, 16 or more."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def default_config(head_dim: int, dtype: torch.dtype) -> PagedConfig:
    if dtype == torch.float32:  # no matrix units in IEEE fp32, and larger tiles spill
        return PagedConfig(32, 512, Launch(16, 4, 1), Launch(16, 4, 1), octave=OCTAVE)
    if head_pad(head_dim) >= 256:
        return PagedConfig(64, 512, Launch(64, 8, 2), Launch(64, 8, 2), octave=OCTAVE)
    # A 16-row split tile reads at 4.0-4.2 TB/s on an H200 where 64 rows reach 3.0-3.3; its narrow
    # matrix instruction gives the bits of the wide one (`benchmarks/gpu_attention.py` checks).
    # With 128 registers four programs of codes fit a multiprocessor, at the price of 24 bytes that
    # spill.
    return PagedConfig(
        64, 512, Launch(16, 4, 3), Launch(128, 8, 3), octave=OCTAVE,
        coded_split=Launch(16, 4, 3, max_registers=128), coded_programs=512,
    )  # fmt: skip


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, HEAD_PAD: tl.constexpr, BITS: tl.constexpr):
    """Softmax state over no keys: row max, row sum, weighted sums of values by part."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, 16], tl.float32)  # sixteen equal columns: see attend
    return top, total, zero_parts(BLOCK_M, HEAD_PAD, BITS)


@triton.jit
def tanh(products, CAP_SCALE: tl.constexpr):
    """tanh(products * CAP_SCALE / 2 log2(e)).

    Near zero the quotient loses digits, and caps of fifty and more magnify the error. So a
    polynomial is used there."""
    x = products * (CAP_SCALE / (2 * _LOG2_E))
    u = x * x
    p = tl.fma(u, -0.00671510768, 0.0213668603)
    p = tl.fma(u, p, -0.0539191103)
    p = tl.fma(u, p, 0.133331647)
    p = tl.fma(u, p, -0.333333324)
    near = tl.fma(p * u, x, x)
    far = tl.fma(1.0 / (tl.exp2(products * CAP_SCALE) + 1.0), -2.0, 1.0)
    return tl.where(u < 0.3025, near, far)


@triton.jit
def _logits(q, k, dtype: tl.constexpr, BITS: tl.constexpr):
    """[BLOCK_M, BLOCK_N] products of queries and keys, part after part."""
    HALVES: tl.constexpr = takes_halves(BITS, k.dtype, dtype)
    if HALVES:
        q, back = half_queries(q)
        parts = factors(k, tl.float16, BITS)
    else:
        parts = factors(k, dtype, BITS)
    logits = tl.dot(q[0], tl.trans(parts[0]), input_precision="ieee")
    for i in tl.static_range(1, len(parts)):
        logits = tl.dot(q[i], tl.trans(parts[i]), logits, input_precision="ieee")
    if HALVES:
        logits = logits * back[:, None]
    return logits


@triton.jit
def _weighed(p, v, acc, decay, dtype: tl.constexpr, BITS: tl.constexpr):
    """The sums, decayed, and the weighted values of a tile, by part."""
    parts = factors(v, dtype, BITS)
    sums = tl.tuple([])
    for i in tl.static_range(len(parts)):
        added = tl.dot(p, parts[i], acc[i] * decay[:, None], input_precision="ieee")
        sums = sums + (added,)  # noqa: RUF005
    return sums


@triton.jit
def attend_tile(
    q, tile, scales, ones, top, total, acc, n, positions, scale,
    WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr, MASKED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Extend a state by one tile that `load_tile` gave, at positions n."""
    k, v = tile
    k_scale, v_scale = scales
    dtype: tl.constexpr = q[0].dtype
    logits = _logits(q, k, dtype, BITS)  # [BLOCK_M, BLOCK_N] unscaled
    if BITS > 0:
        logits = logits * k_scale.to(tl.float32)[None, :]
    if CAP_SCALE > 0:
        logits = tanh(logits, CAP_SCALE)
    if MASKED:
        logits = tl.where(n[None, :] <= positions[:, None], logits, float("-inf"))
        if WINDOW > 0:
            logits = tl.where(n[None, :] > positions[:, None] - WINDOW, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    # A row that has seen no key yet keeps top = -inf; 0 in its place avoids inf - inf.
    ref = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    decay = tl.exp2((top - ref) * scale)
    weights = tl.exp2(tl.fma(logits, scale, (ref * -scale)[:, None]))
    p = weights.to(dtype)
    shares = p
    if BITS > 0:
        shares = (weights * v_scale.to(tl.float32)[None, :]).to(dtype)
    total = tl.dot(p, ones, total * decay[:, None], input_precision="ieee")
    return new_top, total, _weighed(shares, v, acc, decay, dtype, BITS)


@triton.jit
def attend(
    q,  # [BLOCK_M, HEAD_PAD], by part
    top,
    total,
    acc,
    keys,
    values,  # this kv head in page 0
    pages,  # this sequence's row of the page table, from `draft_paths.walked`
    first,
    last,  # positions, first on a tile border
    positions,  # [BLOCK_M] of the query rows
    oldest,  # no row sees a key before this position; unread unless WINDOW
    scale,  # from logits to powers of two
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    BITS: tl.constexpr,
):
    """Extend a state by the keys of [first, last). MASKED=False promises that every row sees
    every key of every tile; masking such a tile would change no bit."""
    ones = tl.full([BLOCK_N, 16], 1.0, tl.float32).to(q[0].dtype)
    # Page ids run one tile ahead of what they find: a load whose address waits for another load
    # would halve the pipeline. They are read once per token; equal addresses coalesce.
    n = first + tl.arange(0, BLOCK_N)
    cells = load_cells(pages, n, oldest, last, PAGE_SIZE, WINDOW)
    scales, ahead = scales_ahead(
        keys, values, pages, cells, n, oldest, last, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, WINDOW, BITS
    )
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        here, these = cells, scales
        cells = load_cells(pages, n + BLOCK_N, oldest, last, PAGE_SIZE, WINDOW)
        tile = load_tile(
            keys, values, here, n, oldest, last, HEAD_DIM, HEAD_PAD, PAGE_SIZE, PAGE_STRIDE,
            WINDOW, MASKED, BITS,
        )  # fmt: skip
        scales, ahead = scales_ahead(
            keys, values, pages, ahead, n + BLOCK_N, oldest, last, HEAD_DIM, PAGE_SIZE,
            PAGE_STRIDE, WINDOW, BITS,
        )  # fmt: skip
        top, total, acc = attend_tile(
            q, tile, these, ones, top, total, acc, n, positions, scale, WINDOW, CAP_SCALE,
            MASKED, BITS,
        )  # fmt: skip
    return top, total, acc


@triton.jit
def split_span(position, end, SPLIT_SIZE: tl.constexpr, OCTAVE: tl.constexpr, WINDOW: tl.constexpr):
    """(first split, number of splits) that queries at positions [position, end) see."""
    first = 0
    if WINDOW > 0:
        oldest = tl.maximum(position + 1 - WINDOW, 0)
        first = split_count(oldest + 1, SPLIT_SIZE, OCTAVE) - 1
    return first, split_count(end, SPLIT_SIZE, OCTAVE) - first


@triton.jit
def split_borders(
    split, full, end, BLOCK_N: tl.constexpr, SPLIT_SIZE: tl.constexpr, OCTAVE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """(oldest, low, inner, high) of a split; `oldest` is the first key that any row sees.

    |low ... the windows' edge ... inner ... every row sees all ... the causal edge ... high|"""
    low = split_start(split, SPLIT_SIZE, OCTAVE)
    high = tl.minimum(split_start(split + 1, SPLIT_SIZE, OCTAVE), end)
    oldest = low
    inner = low
    if WINDOW > 0:
        oldest = tl.maximum(full - WINDOW, 0)
        low = tl.maximum(low, oldest // BLOCK_N * BLOCK_N)
        inner = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
        inner = tl.minimum(tl.maximum(low, inner), high)
    return oldest, low, inner, high


@triton.jit
def row_positions(position, end, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr):
    """[BLOCK_M] positions of a tile's query rows, GROUP rows to a token."""
    positions = position + tl.arange(0, BLOCK_M) // GROUP
    if WINDOW > 0:  # rows beyond the last token see what it sees, not nothing
        positions = tl.minimum(positions, end - 1)
    return positions


@triton.jit
def attend_split(
    q,
    keys,
    values,
    pages,
    split,
    full,  # no row's causal edge lies before this position: one past the first query token's
    end,  # one past the last query token's position
    positions,
    scale,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    OCTAVE: tl.constexpr,
    WINDOW: tl.constexpr,  # last positions that a query sees, its own included; 0: all
    CAP_SCALE: tl.constexpr,  # logits are tanh(product * CAP_SCALE / 2 log2(e)); 0: the product
    TWO_LOOPS: tl.constexpr,
    BITS: tl.constexpr,  # of a code in the cache; 0: floats
):
    """The state of one split: (top [M], total [M], acc [M, HEAD_PAD] by part).

    TWO_LOOPS walks the keys that need no mask apart: less work a tile, one more pipeline drain.
    """
    oldest, low, inner, high = split_borders(split, full, end, BLOCK_N, SPLIT_SIZE, OCTAVE, WINDOW)
    edge = low
    top, total, acc = empty_state(BLOCK_M, HEAD_PAD, BITS)
    if TWO_LOOPS:
        if WINDOW > 0:
            top, total, acc = attend(
                q, top, total, acc, keys, values, pages, low, inner, positions, oldest, scale,
                HEAD_DIM, HEAD_PAD, PAGE_SIZE, PAGE_STRIDE, BLOCK_N, WINDOW, CAP_SCALE, True, BITS,
            )  # fmt: skip
        edge = tl.maximum(inner, tl.minimum(full, high) // BLOCK_N * BLOCK_N)
        top, total, acc = attend(
            q, top, total, acc, keys, values, pages, inner, edge, positions, oldest, scale,
            HEAD_DIM, HEAD_PAD, PAGE_SIZE, PAGE_STRIDE, BLOCK_N, WINDOW, CAP_SCALE, False, BITS,
        )  # fmt: skip
    top, total, acc = attend(
        q, top, total, acc, keys, values, pages, edge, high, positions, oldest, scale,
        HEAD_DIM, HEAD_PAD, PAGE_SIZE, PAGE_STRIDE, BLOCK_N, WINDOW, CAP_SCALE, True, BITS,
    )  # fmt: skip
    return top, tl.max(total, 1), acc  # the columns are equal, so max picks, not reduces


@triton.jit
def fold_weights(top, split_top, scale):
    """(new running max, weight of the running sums, weight of the split's sums).

    A split without keys (split_top = -inf) gets weight 0 and leaves the other at exactly 1."""
    new_top = tl.maximum(top, split_top)
    ref = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp2((top - ref) * scale), tl.exp2((split_top - ref) * scale)


@triton.jit
def fold(old, old_weight, new, new_weight):
    return tl.fma(new, new_weight, old * old_weight)


@triton.jit
def with_sink(total, top, sink, scale):
    """The row sum with a head's sink added.

    The row max stays as it is. If the sink lies so far above it that its share overflows, the
    weights of all values become 0, which is right."""
    return total + tl.exp2(tl.fma(sink, _LOG2_E, top * -scale))
