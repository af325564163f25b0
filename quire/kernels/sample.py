"""Fused draw on the GPU: logits to tokens without a sort, a host sync or [S, V] temporaries.

Programs own one tile of one row, so a single row fills the device; tiles depend on V alone. A row
without filters takes two launches: each tile finds its first arrival (`sample_race.py`), then the
row takes the earliest. With filters there are four: group statistics, a bound on how far the edge
can lie, the few tokens within it, and an exact search among them (`sample_search.py`; among the
whole row when they are many). The last launch also stores the token where the next step reads it.
Sums are over integers and masses are in fixed point, so neither atomics nor splits change a bit.
`enable_fp_fusion` is off, so recompiling does not change one either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.launch import Launcher, alignments
from quire.kernels.sample_race import distances, fixed_mass, load_logits, log_times
from quire.kernels.sample_search import NO_TOKEN, edge_of, first_survivor
from quire.params import GREEDY_BELOW

if TYPE_CHECKING:
    from torch import Tensor

TILE = 2048  # tokens for each program of the vocabulary-wide passes
GROUP = 128  # tokens for each statistic; 262144 / 128 = 2048 still fit one program
CHUNK = 2048  # candidates looked at together in the search
MAX_CANDIDATES = 16384  # kept for each row; rows with more search the logits themselves

_GREEDY = tl.constexpr(GREEDY_BELOW)
_FAR = tl.constexpr(3e38)  # farther than any finite logit, nearer than banned tokens (infinity)
_TINY = tl.constexpr(1e-37)  # keeps logarithms finite where their value is not used
_BOUND_SLACK = tl.constexpr(0.01)  # of distance; covers f32 rounding of the estimated bound
_BOUND_STEPS = tl.constexpr(14)


@dataclass(frozen=True, slots=True)
class DrawArgs:
    """How to draw, and where the tokens go. Tensors that are not contiguous cost a copy each.

    With `rows` and `table`, which go together, sample i is row rows[i] of lasting tables: its
    settings are at index rows[i] of the columns, and its token goes to table[rows[i],
    positions[i]] too.
    """

    temperature: Tensor  # [S], or [N] with rows, f32; < GREEDY_BELOW means argmax
    seeds: Tensor  # [S] or [N] int64
    positions: Tensor  # [S] int32 or int64
    top_k: Tensor  # [S] or [N] int64; <= 0 means off
    top_p: Tensor  # [S] or [N] f32; 1 means off
    min_p: Tensor  # [S] or [N] f32; 0 means off
    narrows: bool  # whether any row has one of the three on
    rows: Tensor | None = None  # [S] int32
    table: Tensor | None = None  # [N, L] int32


@triton.jit
def _is_narrow(own, temperature, top_k, top_p, min_p, vocab_size):
    k = tl.load(top_k + own)
    narrows = ((k > 0) & (k < vocab_size)) | (tl.load(top_p + own) < 1.0)
    return (narrows | (tl.load(min_p + own) > 0.0)) & (temperature >= _GREEDY)


@triton.jit
def _own_row(rows, row, HAS_ROWS: tl.constexpr):
    """The index of this sample's settings in the columns."""
    own = row
    if HAS_ROWS:
        own = tl.load(rows + row)
    return own


@triton.jit
def _scan_tiles(
    logits, stride, vocab_size, temperatures, seeds, positions, top_k, top_p, min_p, rows,
    tile_floats, tile_tokens, groups,
    NARROWS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, HAS_ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (S, tiles). Rows with filters: statistics of groups; others: the tile's arrival."""
    wait_for_inputs(EARLY)
    row, tile = tl.program_id(0), tl.program_id(1)
    num_rows, num_tiles = tl.num_programs(0), tl.num_programs(1)
    ROWS: tl.constexpr = TILE // GROUP
    ids = tile * TILE + tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = load_logits(logits + row.to(tl.int64) * stride, ids, ids < vocab_size)  # [ROWS, GROUP]
    group_best = tl.max(x, axis=1)  # [ROWS]
    own = _own_row(rows, row, HAS_ROWS)
    temperature = tl.load(temperatures + own)
    if NARROWS and _is_narrow(own, temperature, top_k, top_p, min_p, vocab_size):
        mass = tl.sum(tl.exp(-distances(group_best[:, None], x, temperature)), axis=1)
        at = (row * num_tiles + tile) * ROWS + tl.arange(0, ROWS)
        tl.store(groups + at, group_best)
        tl.store(groups + num_rows * num_tiles * ROWS + at, mass)
        return
    best = tl.max(group_best, axis=0)
    if temperature < _GREEDY:
        times = distances(best, x, 1.0)
    else:
        seed, position = tl.load(seeds + own), tl.load(positions + row).to(tl.int64)
        times = distances(best, x, temperature) + log_times(seed, position, ids)
    first = tl.min(tl.min(times, axis=1), axis=0)
    token = tl.min(tl.min(tl.where(times == first, ids, NO_TOKEN), axis=1), axis=0)
    at = row * num_tiles + tile
    tl.store(tile_floats + at, best)
    tl.store(tile_floats + num_rows * num_tiles + at, first)
    tl.store(tile_tokens + at, token)


@triton.jit
def _bound_rows(
    logits, stride, vocab_size, temperatures, seeds, positions, top_k, top_p, min_p, rows,
    groups, num_groups, bounds, totals,
    PAD: tl.constexpr, HAS_ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (S,). A distance that no survivor exceeds; any such distance gives the same draw."""
    wait_for_inputs(EARLY)
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    tl.store(totals + 2 * row, 0)
    tl.store(totals + 2 * row + 1, 0)
    own = _own_row(rows, row, HAS_ROWS)
    temperature = tl.load(temperatures + own)
    if _is_narrow(own, temperature, top_k, top_p, min_p, vocab_size):
        at = tl.arange(0, PAD)
        inside = at < num_groups
        group_best = tl.load(groups + row * num_groups + at, mask=inside, other=-float("inf"))
        best = tl.max(group_best, axis=0)
        nearest = distances(best, group_best, temperature)  # [PAD]
        k, p, m = tl.load(top_k + own), tl.load(top_p + own), tl.load(min_p + own)
        has_k = (k > 0) & (k < vocab_size)
        cut = tl.where(m > 0.0, -tl.log(tl.maximum(m, _TINY)), _FAR)
        if has_k:
            # k groups whose nearest token is within x hold k tokens within x between them.
            low = 0.0
            high = tl.max(tl.where(nearest < _FAR, nearest, 0.0), axis=0)
            for _ in range(_BOUND_STEPS):
                middle = 0.5 * (low + high)
                enough = tl.sum((nearest <= middle).to(tl.int32), axis=0) >= k
                high = tl.where(enough, middle, high)
                low = tl.where(enough, low, middle)
            enough = tl.sum((nearest <= high).to(tl.int32), axis=0) >= k
            cut = tl.minimum(cut, tl.where(enough, high, _FAR))
        elif m <= 0.0:
            # Tokens beyond x weigh V * exp(-x) at most: when that fits 1 - top_p, none survives.
            masses = groups + num_rows * num_groups + row * num_groups
            mass = tl.load(masses + at, mask=inside, other=0.0) * tl.exp(-nearest)
            spare = (1.0 - p) * tl.sum(mass, axis=0) / vocab_size
            cut = _BOUND_SLACK - tl.log(tl.maximum(spare, _TINY))
        tl.store(bounds + 2 * row, best)
        tl.store(bounds + 2 * row + 1, tl.minimum(cut, _FAR))


@triton.jit
def _gather_near(
    logits, stride, vocab_size, temperatures, seeds, positions, top_k, top_p, min_p, rows,
    bounds, totals, near, width,
    TILE: tl.constexpr, HAS_ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (S, tiles). Ids within the bound, in no order; with top_p alone, the row's mass."""
    wait_for_inputs(EARLY)
    row = tl.program_id(0)
    own = _own_row(rows, row, HAS_ROWS)
    temperature = tl.load(temperatures + own)
    if _is_narrow(own, temperature, top_k, top_p, min_p, vocab_size):
        best, cut = tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1)
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        x = load_logits(logits + row.to(tl.int64) * stride, ids, ids < vocab_size)
        distance = distances(best, x, temperature)
        is_near = (distance <= cut).to(tl.int32)
        count = tl.sum(is_near, axis=0)
        if count > 0:
            start = tl.atomic_add(totals + 2 * row, count.to(tl.int64), sem="relaxed")
            slot = start + tl.cumsum(is_near, axis=0) - 1
            fits = (is_near > 0) & (slot < width)
            tl.store(near + row.to(tl.int64) * width + slot, ids, mask=fits)
        k, p, m = tl.load(top_k + own), tl.load(top_p + own), tl.load(min_p + own)
        if (p < 1.0) & (m <= 0.0) & ((k <= 0) | (k >= vocab_size)):
            mass = tl.sum(fixed_mass(distance), axis=0)
            tl.atomic_add(totals + 2 * row + 1, mass, sem="relaxed")


@triton.jit
def _earliest(tiles, num_tiles, temperature, PAD: tl.constexpr):
    """The token that arrives first in one row.

    `tiles` is (best logit of each tile, offset from there to each tile's first arrival, token of
    each arrival)."""
    bests, to_firsts, owners = tiles
    at = tl.arange(0, PAD)
    inside = at < num_tiles
    best = tl.load(bests + at, mask=inside, other=-float("inf"))
    times = tl.load(bests + to_firsts + at, mask=inside, other=float("inf"))
    scale = tl.where(temperature < _GREEDY, 1.0, temperature)
    times += distances(tl.max(best, axis=0), best, scale)
    owner = tl.load(owners + at, mask=inside, other=NO_TOKEN)
    return tl.min(tl.where(times == tl.min(times, axis=0), owner, NO_TOKEN), axis=0)


@triton.jit
def _pick_rows(
    logits, stride, vocab_size, temperatures, seeds, positions, top_k, top_p, min_p, rows,
    tile_floats, tile_tokens, num_tiles, bounds, totals, near, width, tokens, table, table_stride,
    NARROWS: tl.constexpr, PAD: tl.constexpr, CHUNK: tl.constexpr, HAS_ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (S,). The earliest of the tiles' arrivals, or the first among a row's survivors."""
    wait_for_inputs(EARLY)
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    own = _own_row(rows, row, HAS_ROWS)
    temperature = tl.load(temperatures + own)
    if NARROWS and _is_narrow(own, temperature, top_k, top_p, min_p, vocab_size):
        found, total = tl.load(totals + 2 * row), tl.load(totals + 2 * row + 1)
        is_all = found > width
        among = (
            tl.where(is_all, vocab_size, found.to(tl.int32)),
            logits + row.to(tl.int64) * stride,
            near + row.to(tl.int64) * width,
            is_all,
            tl.load(bounds + 2 * row),
            temperature,
            tl.load(bounds + 2 * row + 1),
        )
        k, p, m = tl.load(top_k + own), tl.load(top_p + own), tl.load(min_p + own)
        edge, last_id = edge_of(k, p, m, total, vocab_size, among, CHUNK)
        seed, position = tl.load(seeds + own), tl.load(positions + row).to(tl.int64)
        token = first_survivor(seed, position, edge, last_id, among, CHUNK)
    else:
        tiles = (tile_floats + row * num_tiles, num_rows * num_tiles, tile_tokens + row * num_tiles)
        token = _earliest(tiles, num_tiles, temperature, PAD)
    tl.store(tokens + row, token.to(tl.int64))
    if HAS_ROWS:
        place = own.to(tl.int64) * table_stride + tl.load(positions + row)
        tl.store(table + place, token)


_scan, _bound = Launcher(_scan_tiles), Launcher(_bound_rows)
_gather, _pick = Launcher(_gather_near), Launcher(_pick_rows)


def draw(logits: Tensor, args: DrawArgs) -> Tensor:
    """[S, V] f32, bf16 or f16 -> [S] int64 tokens. Leaves `logits` alone; does not wait."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"got strides {logits.stride()}, want contiguous rows"
    assert (args.rows is None) == (args.table is None), "rows and table go together"
    device, narrows = logits.device, args.narrows
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return tokens
    wishes = (args.temperature, args.seeds, args.positions, args.top_k, args.top_p, args.min_p)
    columns = [column.contiguous() for column in wishes]
    rows = args.positions if args.rows is None else args.rows  # unread without rows
    table = tokens[:, None] if args.table is None else args.table
    common = (logits, logits.stride(0), vocab_size, *columns, rows)
    num_tiles = triton.cdiv(vocab_size, TILE)
    tile_floats = torch.empty(2, num_rows, num_tiles, device=device)  # best logit, first arrival
    tile_tokens = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    groups = bounds = totals = near = tile_floats  # unread without filters
    width = min(MAX_CANDIDATES, vocab_size)
    num_groups = num_tiles * (TILE // GROUP)
    if narrows:
        groups = torch.empty(2, num_rows, num_groups, device=device)  # best logit, mass to it
        bounds = torch.empty(num_rows, 2, device=device)  # best logit, farthest distance
        totals = torch.empty(num_rows, 2, dtype=torch.int64, device=device)  # candidates, mass
        near = torch.empty(num_rows, width, dtype=torch.int32, device=device)  # candidates' ids
    kind = (
        logits.dtype, args.positions.dtype, rows.dtype, logits.stride(0), table.stride(0),
        vocab_size, num_tiles, width, alignments(logits, *columns, rows, table),
    )  # fmt: skip
    each, tiled = (num_rows, 1, 1), (num_rows, num_tiles, 1)
    form = {"HAS_ROWS": args.rows is not None, "enable_fp_fusion": False, **early_options()}
    first = {**form, "NARROWS": narrows, "TILE": TILE, "GROUP": GROUP}
    _scan(tiled, (*common, tile_floats, tile_tokens, groups), first, kind)
    if narrows:
        pad = triton.next_power_of_2(num_groups)
        _bound(each, (*common, groups, num_groups, bounds, totals), {**form, "PAD": pad}, kind)
        _gather(tiled, (*common, bounds, totals, near, width), {**form, "TILE": TILE}, kind)
    last = {"NARROWS": narrows, "PAD": triton.next_power_of_2(num_tiles), "CHUNK": CHUNK}
    tiles = (tile_floats, tile_tokens, num_tiles)
    ends = (bounds, totals, near, width, tokens, table, table.stride(0))
    _pick(each, (*common, *tiles, *ends), {**form, **last, "num_warps": 8}, kind)
    return tokens
