"""Where a row's survivors end: an exact search among the tokens that a bound has left.

Device functions only, for the last pass of `sample.py`. The search bisects integers that sort like
the distances. Sums are over integers and masses in fixed point, so their order changes no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.sample_race import distances, fixed_mass, load_logits, log_times

NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _load_chunk(start, among, CHUNK: tl.constexpr):
    """Ids, distances, and distances as integers that sort alike; infinity marks tokens left out.

    `among` says which tokens of a row are searched: (how many, the row's logits, its listed ids,
    whether to take all tokens instead, the best logit, temperature, the farthest distance).
    """
    num, logits, near, is_all, best, temperature, cut = among
    slot = start + tl.arange(0, CHUNK)
    inside = slot < num
    ids = tl.where(is_all, slot, tl.load(near + slot, mask=inside & ~is_all, other=0))
    distance = distances(best, load_logits(logits, ids, inside), temperature)
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
        high = high * 0 + (NO_TOKEN - 1)
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
            weight = fixed_mass(distance) if BY == "mass" else is_member.to(tl.int64)
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
        mass += tl.sum(tl.where(is_nearer, fixed_mass(distance), 0), axis=0)
        tied += tl.sum((key == edge).to(tl.int64), axis=0)
    return count, mass, tied


@triton.jit
def edge_of(k, p, m, total, vocab_size, among, CHUNK: tl.constexpr):
    """Where the survivors end: the distance of the last, and the highest id kept at it."""
    has_k = (k > 0) & (k < vocab_size)
    edge = among[6].to(tl.int32, bitcast=True)  # members are within the bound: min_p is done
    if has_k:
        edge = _search(k, edge, among, "count", CHUNK)
    count, head, tied = _before(edge, among, CHUNK)
    kept = tl.where(has_k, tl.minimum(k - count, tied), tied)
    if p < 1.0:
        survivors = head + kept * fixed_mass(edge.to(tl.float32, bitcast=True))
        mass = tl.where(has_k | (m > 0.0), survivors, total)
        target = tl.maximum((p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)
        edge = _search(target, edge, among, "mass", CHUNK)
        count, head, tied = _before(edge, among, CHUNK)
        each = tl.maximum(fixed_mass(edge.to(tl.float32, bitcast=True)), 1)
        kept = tl.minimum(tl.maximum((target - head + each - 1) // each, 1), tied)
    last_id = edge * 0 + NO_TOKEN
    if kept < tied:
        last_id = _search(kept, edge, among, "id", CHUNK)
    return edge, last_id


@triton.jit
def first_survivor(seed, position, edge, last_id, among, CHUNK: tl.constexpr):
    first = among[5] * 0 + float("inf")
    token = edge * 0 + NO_TOKEN
    for start in range(0, among[0], CHUNK):
        ids, distance, key = _load_chunk(start, among, CHUNK)
        keep = (key < edge) | ((key == edge) & (ids <= last_id))
        times = tl.where(keep, distance + log_times(seed, position, ids), float("inf"))
        chunk_first = tl.min(times, axis=0)
        chunk_token = tl.min(tl.where(keep & (times == chunk_first), ids, NO_TOKEN), axis=0)
        # Candidates come in no order, so equal times must compare ids.
        is_tied = (chunk_first == first) & (chunk_token < token)
        token = tl.where((chunk_first < first) | is_tied, chunk_token, token)
        first = tl.minimum(first, chunk_first)
    return tl.where(token == NO_TOKEN, 0, token)
