"""Fused draw on the GPU: logits to tokens without a sort, a host sync or [S, V] temporaries.

Programs own one tile of one row, so a single row fills the device; tiles depend on V alone. A row
without filters takes two launches: each tile finds its first arrival (see `sample/gumbel.py` for
the race), then the row takes the earliest. With filters there are four: group statistics, a bound
on how far the edge can lie, the few tokens within it, and an exact search among those (the whole
row when they are many). Sums are over integers, masses in fixed point, so neither atomics nor
splits can change a bit, and `enable_fp_fusion` is off so neither can a recompilation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.params import GREEDY_BELOW

if TYPE_CHECKING:
    from torch import Tensor

TILE = 2048  # tokens for each program of the vocabulary-wide passes
GROUP = 128  # tokens for each statistic; 262144 / 128 = 2048 still fit one program
CHUNK = 2048  # candidates looked at together in the search
MAX_CANDIDATES = 16384  # kept for each row; rows with more search the logits themselves

_GREEDY = tl.constexpr(GREEDY_BELOW)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_FAR = tl.constexpr(3e38)  # farther than any finite logit, nearer than banned tokens (infinity)
_TINY = tl.constexpr(1e-37)  # keeps logarithms finite where their value is not used
_NO_TOKEN = tl.constexpr(2**31 - 1)
_MASS_ONE = tl.constexpr(float(2**40))  # fixed point: 2**18 tokens of mass 1 still fit 63 bits
_BOUND_SLACK = tl.constexpr(0.01)  # of distance; covers f32 rounding of the estimated bound
_BOUND_STEPS = tl.constexpr(14)

# The same numbers as in sample/gumbel.py.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)
_TOKEN_A = tl.constexpr(0x7FEB352D)
_TOKEN_B = tl.constexpr(0x846CA68B)
_FINAL = tl.constexpr(0x2C1B3C6D)
_SCALE = tl.constexpr(2.0**-31 * (1.0 - 2.0**-24))
_SHIFT = tl.constexpr(2.0**-33)


@dataclass(frozen=True, slots=True)
class DrawArgs:
    """How to draw: one entry for each row. Columns of a table work but cost a copy each."""

    temperature: Tensor  # [S] f32; < GREEDY_BELOW means argmax
    seeds: Tensor  # [S] int64
    positions: Tensor  # [S] int64
    top_k: Tensor  # [S] int64; <= 0 means off
    top_p: Tensor  # [S] f32; 1 means off
    min_p: Tensor  # [S] f32; 0 means off
    narrows: bool  # whether any row has one of the three on


def draw(logits: Tensor, args: DrawArgs) -> Tensor:
    """[S, V] f32, bf16 or f16 -> [S] int64 tokens. Leaves `logits` alone; does not wait."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"got strides {logits.stride()}, want contiguous rows"
    device, narrows = logits.device, args.narrows
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return tokens
    columns = (args.temperature, args.seeds, args.positions, args.top_k, args.top_p, args.min_p)
    rows = (logits, logits.stride(0), vocab_size, *(column.contiguous() for column in columns))
    num_tiles = triton.cdiv(vocab_size, TILE)
    shape = (num_rows, num_tiles)
    tile_floats = torch.empty(2, *shape, device=device)  # best logit, first arrival
    tile_tokens = torch.empty(shape, dtype=torch.int32, device=device)
    exact = {"enable_fp_fusion": False}
    groups = bounds = totals = near = None
    width = min(MAX_CANDIDATES, vocab_size)
    num_groups = num_tiles * (TILE // GROUP)
    if narrows:
        groups = torch.empty(2, num_rows, num_groups, device=device)  # best logit, mass to it
        bounds = torch.empty(num_rows, 2, device=device)  # best logit, farthest distance
        totals = torch.empty(num_rows, 2, dtype=torch.int64, device=device)  # candidates, mass
        near = torch.empty(num_rows, width, dtype=torch.int32, device=device)  # candidates' ids
    _scan_tiles[shape](*rows, tile_floats, tile_tokens, groups, narrows, TILE, GROUP, **exact)
    if narrows:
        pad = triton.next_power_of_2(num_groups)
        _bound_rows[(num_rows,)](*rows, groups, num_groups, bounds, totals, pad, **exact)
        _gather_near[shape](*rows, bounds, totals, near, width, TILE, **exact)
    pad = triton.next_power_of_2(num_tiles)
    _pick_rows[(num_rows,)](
        *rows, tile_floats, tile_tokens, num_tiles, bounds, totals, near, width, tokens,
        narrows, pad, CHUNK, num_warps=8, **exact,
    )  # fmt: skip
    return tokens


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * _MIX_A
    z = (z ^ (z >> 27)) * _MIX_B
    return z ^ (z >> 31)


@triton.jit
def _log_times(seed, position, ids):
    """log E of the race for each token id; seed and position are int64 scalars."""
    z = _mix64(seed.to(tl.uint64, bitcast=True) + _GAMMA)
    z = _mix64(z + position.to(tl.uint64, bitcast=True) * _GAMMA)
    low = (z & 0xFFFFFFFF).to(tl.uint32)
    high = (z >> 32).to(tl.uint32) | 1
    h = ids.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * _TOKEN_A
    h = (h ^ (h >> 15)) * _TOKEN_B
    h = h ^ (h >> 16)
    h = (h ^ low) * high
    h = (h ^ (h >> 15)) * _FINAL
    v = (h >> 1).to(tl.int32).to(tl.float32) * _SCALE + _SHIFT
    # -log(1 - v); the logarithm alone would lose the small v, which are the winners.
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3 + v * (0.25 + v * 0.2))))
    return tl.log(tl.where(v < 0.03125, series, -tl.log(1.0 - v)))


@triton.jit
def _load_logits(logits, ids, mask):
    """f32; NaN and masked tokens are -inf, +inf is the largest float."""
    x = tl.load(logits + ids, mask=mask, other=-float("inf")).to(tl.float32)
    return tl.minimum(tl.where(x == x, x, -float("inf")), _LARGEST)


@triton.jit
def _distances(best, x, temperature):
    """>= 0, and infinity for banned tokens, also when they are all there is."""
    # abs: logits of -0 would give a distance of -0, whose bits sort last.
    return tl.abs(tl.maximum(best, -_LARGEST) - x) / temperature


@triton.jit
def _fixed_mass(distance):
    return (tl.exp(-distance) * _MASS_ONE).to(tl.int64)


@triton.jit
def _is_narrow(row, temperature, top_k, top_p, min_p, vocab_size):
    k = tl.load(top_k + row)
    narrows = ((k > 0) & (k < vocab_size)) | (tl.load(top_p + row) < 1.0)
    return (narrows | (tl.load(min_p + row) > 0.0)) & (temperature >= _GREEDY)


@triton.jit
def _scan_tiles(
    logits, stride, vocab_size, temperatures, seeds, positions, top_k, top_p, min_p,
    tile_floats, tile_tokens, groups,
    NARROWS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (S, tiles). Rows with filters: statistics of groups; others: the tile's arrival."""
    row, tile = tl.program_id(0), tl.program_id(1)
    num_rows, num_tiles = tl.num_programs(0), tl.num_programs(1)
    ROWS: tl.constexpr = TILE // GROUP
    ids = tile * TILE + tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _load_logits(logits + row.to(tl.int64) * stride, ids, ids < vocab_size)  # [ROWS, GROUP]
    group_best = tl.max(x, axis=1)  # [ROWS]
    temperature = tl.load(temperatures + row)
    if NARROWS and _is_narrow(row, temperature, top_k, top_p, min_p, vocab_size):
        mass = tl.sum(tl.exp(-_distances(group_best[:, None], x, temperature)), axis=1)
        at = (row * num_tiles + tile) * ROWS + tl.arange(0, ROWS)
        tl.store(groups + at, group_best)
        tl.store(groups + num_rows * num_tiles * ROWS + at, mass)
        return
    best = tl.max(group_best, axis=0)
    if temperature < _GREEDY:
        times = _distances(best, x, 1.0)
    else:
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        times = _distances(best, x, temperature) + _log_times(seed, position, ids)
    first = tl.min(tl.min(times, axis=1), axis=0)
    token = tl.min(tl.min(tl.where(times == first, ids, _NO_TOKEN), axis=1), axis=0)
    at = row * num_tiles + tile
    tl.store(tile_floats + at, best)
    tl.store(tile_floats + num_rows * num_tiles + at, first)
    tl.store(tile_tokens + at, token)


@triton.jit
def _bound_rows(
    logits, stride, vocab_size, temperatures, seeds, positions, top_k, top_p, min_p,
    groups, num_groups, bounds, totals,
    PAD: tl.constexpr,
):  # fmt: skip
    """Grid (S,). A distance that no survivor exceeds; any such distance gives the same draw."""
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    tl.store(totals + 2 * row, 0)
    tl.store(totals + 2 * row + 1, 0)
    temperature = tl.load(temperatures + row)
    if _is_narrow(row, temperature, top_k, top_p, min_p, vocab_size):
        at = tl.arange(0, PAD)
        inside = at < num_groups
        group_best = tl.load(groups + row * num_groups + at, mask=inside, other=-float("inf"))
        best = tl.max(group_best, axis=0)
        nearest = _distances(best, group_best, temperature)  # [PAD]
        k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
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
    logits, stride, vocab_size, temperatures, seeds, positions, top_k, top_p, min_p,
    bounds, totals, near, width,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (S, tiles). Ids within the bound, in no order; with top_p alone, the row's mass."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    if _is_narrow(row, temperature, top_k, top_p, min_p, vocab_size):
        best, cut = tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1)
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        x = _load_logits(logits + row.to(tl.int64) * stride, ids, ids < vocab_size)
        distance = _distances(best, x, temperature)
        is_near = (distance <= cut).to(tl.int32)
        count = tl.sum(is_near, axis=0)
        if count > 0:
            start = tl.atomic_add(totals + 2 * row, count.to(tl.int64), sem="relaxed")
            slot = start + tl.cumsum(is_near, axis=0) - 1
            fits = (is_near > 0) & (slot < width)
            tl.store(near + row.to(tl.int64) * width + slot, ids, mask=fits)
        k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        if (p < 1.0) & (m <= 0.0) & ((k <= 0) | (k >= vocab_size)):
            mass = tl.sum(_fixed_mass(distance), axis=0)
            tl.atomic_add(totals + 2 * row + 1, mass, sem="relaxed")


@triton.jit
def _load_chunk(start, among, CHUNK: tl.constexpr):
    """Ids, distances, and distances as integers of the same order; infinity is not a member.

    `among` says which tokens of a row are searched: (how many, the row's logits, its listed ids,
    whether to take all tokens instead, the best logit, temperature, the farthest distance).
    """
    num, logits, near, is_all, best, temperature, cut = among
    slot = start + tl.arange(0, CHUNK)
    inside = slot < num
    ids = tl.where(is_all, slot, tl.load(near + slot, mask=inside & ~is_all, other=0))
    distance = _distances(best, _load_logits(logits, ids, inside), temperature)
    distance = tl.where(distance <= cut, distance, float("inf"))
    return ids, distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _search(target, edge, among, BY: tl.constexpr, CHUNK: tl.constexpr):
    """The smallest key within which `target` is reached, or the largest when it never is.

    BY "count" and "mass": keys are distances, tokens weigh 1 or their probability. BY "id": keys
    are the ids of the tokens at distance `edge`, which weigh 1. Bisection on integers that snaps to
    keys that exist, so it ends after about log2 of the number of tokens.
    """
    high = among[6].to(tl.int32, bitcast=True)
    if BY == "id":
        high = high * 0 + (_NO_TOKEN - 1)
    low = high * 0
    while low < high:
        middle = low + (high - low) // 2
        reached = tl.zeros((), tl.int64)
        last, following = low, high
        for start in range(0, among[0], CHUNK):
            ids, distance, key = _load_chunk(start, among, CHUNK)
            is_member = distance < float("inf")
            if BY == "id":
                is_member = key == edge
                key = ids
            weight = _fixed_mass(distance) if BY == "mass" else is_member.to(tl.int64)
            within = is_member & (key <= middle)
            reached += tl.sum(tl.where(within, weight, 0), axis=0)
            last = tl.maximum(last, tl.max(tl.where(within, key, low), axis=0))
            beyond = is_member & (key > middle)
            following = tl.minimum(following, tl.min(tl.where(beyond, key, high), axis=0))
        is_enough = reached >= target
        high = tl.where(is_enough, last, high)
        low = tl.where(is_enough, low, following)
    return high


@triton.jit
def _before(edge, among, CHUNK: tl.constexpr):
    """Count and mass of the tokens nearer than `edge`, and the count of those at it."""
    count, mass, tied = tl.zeros((), tl.int64), tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, among[0], CHUNK):
        _, distance, key = _load_chunk(start, among, CHUNK)
        is_nearer = (key < edge) & (distance < float("inf"))
        count += tl.sum(is_nearer.to(tl.int64), axis=0)
        mass += tl.sum(tl.where(is_nearer, _fixed_mass(distance), 0), axis=0)
        tied += tl.sum((key == edge).to(tl.int64), axis=0)
    return count, mass, tied


@triton.jit
def _edge_of(k, p, m, total, vocab_size, among, CHUNK: tl.constexpr):
    """Where the survivors end: the distance of the last, and the highest id kept at it."""
    has_k = (k > 0) & (k < vocab_size)
    edge = among[6].to(tl.int32, bitcast=True)  # members are within the bound: min_p is done
    if has_k:
        edge = _search(k, edge, among, "count", CHUNK)
    count, head, tied = _before(edge, among, CHUNK)
    kept = tl.where(has_k, tl.minimum(k - count, tied), tied)
    if p < 1.0:
        survivors = head + kept * _fixed_mass(edge.to(tl.float32, bitcast=True))
        mass = tl.where(has_k | (m > 0.0), survivors, total)
        target = tl.maximum((p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)
        edge = _search(target, edge, among, "mass", CHUNK)
        count, head, tied = _before(edge, among, CHUNK)
        each = tl.maximum(_fixed_mass(edge.to(tl.float32, bitcast=True)), 1)
        kept = tl.minimum(tl.maximum((target - head + each - 1) // each, 1), tied)
    last_id = edge * 0 + _NO_TOKEN
    if kept < tied:
        last_id = _search(kept, edge, among, "id", CHUNK)
    return edge, last_id


@triton.jit
def _first_survivor(seed, position, edge, last_id, among, CHUNK: tl.constexpr):
    first = among[5] * 0 + float("inf")
    token = edge * 0 + _NO_TOKEN
    for start in range(0, among[0], CHUNK):
        ids, distance, key = _load_chunk(start, among, CHUNK)
        keep = (key < edge) | ((key == edge) & (ids <= last_id))
        times = tl.where(keep, distance + _log_times(seed, position, ids), float("inf"))
        chunk_first = tl.min(times, axis=0)
        chunk_token = tl.min(tl.where(keep & (times == chunk_first), ids, _NO_TOKEN), axis=0)
        # Candidates come in no order, so equal times must compare ids.
        is_tied = (chunk_first == first) & (chunk_token < token)
        token = tl.where((chunk_first < first) | is_tied, chunk_token, token)
        first = tl.minimum(first, chunk_first)
    return tl.where(token == _NO_TOKEN, 0, token)


@triton.jit
def _pick_rows(
    logits, stride, vocab_size, temperatures, seeds, positions, top_k, top_p, min_p,
    tile_floats, tile_tokens, num_tiles, bounds, totals, near, width, tokens,
    NARROWS: tl.constexpr, PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (S,). The earliest of the tiles' arrivals, or the first among a row's survivors."""
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    temperature = tl.load(temperatures + row)
    if NARROWS and _is_narrow(row, temperature, top_k, top_p, min_p, vocab_size):
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
        k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        edge, last_id = _edge_of(k, p, m, total, vocab_size, among, CHUNK)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        token = _first_survivor(seed, position, edge, last_id, among, CHUNK)
        tl.store(tokens + row, token.to(tl.int64))
        return
    at = tl.arange(0, PAD)
    inside = at < num_tiles
    bests = tl.load(tile_floats + row * num_tiles + at, mask=inside, other=-float("inf"))
    firsts = tile_floats + num_rows * num_tiles + row * num_tiles
    times = tl.load(firsts + at, mask=inside, other=float("inf"))
    scale = tl.where(temperature < _GREEDY, 1.0, temperature)
    times += _distances(tl.max(bests, axis=0), bests, scale)
    owners = tl.load(tile_tokens + row * num_tiles + at, mask=inside, other=_NO_TOKEN)
    earliest = tl.where(times == tl.min(times, axis=0), owners, _NO_TOKEN)
    tl.store(tokens + row, tl.min(earliest, axis=0).to(tl.int64))
