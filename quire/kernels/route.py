"""Routing on the device: which experts a token visits, visits sorted by expert, and the way back.

A *pair* is one visit of a token to an expert, numbered token by token. `route` picks the experts,
`sort_pairs` groups the pairs by expert for `grouped_matmul.py`, `combine` adds up what came back.
Every shape and grid follows from the numbers of tokens and experts alone, never from the routing,
and nothing waits for the host: all of it may be captured in a graph. There are no atomics, so the
same step always gives the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher, alignments

if TYPE_CHECKING:
    from quire.models.spec import RouterSpec

__all__ = ["SortedPairs", "combine", "route", "sort_pairs"]

PAIR_BLOCK = 1024
HIDDEN_BLOCK = 1024


class SortedPairs(NamedTuple):
    """Pairs sorted by expert, then by token; expert e's pairs follow those of experts below e."""

    pairs: Tensor  # [pairs] int32
    counts: Tensor  # [experts] int32
    top_k: int


@triton.jit
def _scores(logits, is_expert, SIGMOID: tl.constexpr):
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        weights = tl.where(is_expert, tl.exp(logits - tl.max(logits, 0)), 0.0)
        scores = weights / tl.sum(weights, 0)
    return scores


@triton.jit
def _best(values, index, NUM: tl.constexpr):
    """Index of the largest value, the first of equals. Stays in range whatever the values are."""
    first = tl.min(tl.where(values == tl.max(values, 0), index, NUM), 0)
    return tl.minimum(first, NUM - 1)


@triton.jit
def _in_best_groups(
    choice, expert, NUM: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr, BEST: tl.constexpr
):
    """Scores, with -inf for the experts outside the best groups.

    The worth of a group is the sum of its BEST best scores. It is kept once for each expert of the
    group, so that all tensors have one shape."""
    size: tl.constexpr = NUM // GROUPS
    group = expert // size
    worth = tl.full(choice.shape, float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        members = tl.where(group == g, choice, float("-inf"))
        total = tl.max(members, 0)
        for _ in tl.static_range(1, BEST):
            members = tl.where(expert == _best(members, expert, NUM), float("-inf"), members)
            total += tl.max(members, 0)
        worth = tl.where(group == g, total, worth)
    is_in = expert < 0
    for _ in tl.static_range(TOP):
        best = _best(tl.where(is_in, float("-inf"), worth), expert, NUM) // size
        is_in = is_in | (group == best)
    return tl.where(is_in, choice, float("-inf"))


@triton.jit
def _route_kernel(
    logits, correction, experts_out, weights_out, stride, scale,
    NUM: tl.constexpr, PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, ROUNDS: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PAD)
    is_expert = expert < NUM
    row = tl.load(logits + token * stride + expert, mask=is_expert, other=float("-inf"))
    scores = _scores(row.to(tl.float32), is_expert, SIGMOID)
    choice = tl.where(is_expert, scores, float("-inf"))
    if HAS_CORRECTION:
        choice += tl.load(correction + expert, mask=is_expert, other=0.0)
    if GROUPS > 1:
        choice = _in_best_groups(choice, expert, NUM, GROUPS, TOP_GROUPS, GROUP_BEST)
    rank = tl.arange(0, TOP_K_PAD)
    chosen = tl.zeros([TOP_K_PAD], tl.int32)
    weights = tl.zeros([TOP_K_PAD], tl.float32)
    total = 0.0
    for k in tl.static_range(TOP_K):
        best = _best(choice, expert, NUM)
        weight = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        chosen = tl.where(rank == k, best, chosen)
        weights = tl.where(rank == k, weight, weights)
        choice = tl.where(expert == best, float("-inf"), choice)
        total += weight
    if NORMALIZE:
        weights /= total + 1e-20
    weights *= scale
    if ROUNDS:
        weights = weights.to(row.dtype).to(tl.float32)
    tl.store(experts_out + token * TOP_K + rank, chosen, mask=rank < TOP_K)
    tl.store(weights_out + token * TOP_K + rank, weights, mask=rank < TOP_K)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    experts, pairs, counts, loads, num_pairs, BLOCK: tl.constexpr, HAS_LOADS: tl.constexpr
):
    """One program per expert finds its pairs; those of lower experts tell where they begin."""
    own = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pair = start + offsets
        expert = tl.load(experts + pair, mask=pair < num_pairs, other=own)
        lower += (expert < own).to(tl.int32)
    place = tl.sum(lower, 0)
    count = 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + offsets
        expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
        is_own = (expert == own).to(tl.int32)
        before = tl.cumsum(is_own, 0) - is_own
        tl.store(pairs + place + count + before, pair, mask=is_own == 1)
        count += tl.sum(is_own, 0)
    tl.store(counts + own, count)
    if HAS_LOADS:
        tl.store(loads + own, tl.load(loads + own) + count)


@triton.jit
def _combine_kernel(results, weights, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        result = tl.load(results + (token * TOP_K + k) * width + cols, mask=keep, other=0.0)
        total += result.to(tl.float32) * tl.load(weights + token * TOP_K + k)
    tl.store(out + token * width + cols, total.to(out.dtype.element_ty), mask=keep)


_launch_route, _launch_sort = Launcher(_route_kernel), Launcher(_sort_kernel)
_launch_combine = Launcher(_combine_kernel)


def route(
    logits: Tensor, rule: RouterSpec, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Experts of each row of logits [tokens, experts], best first, [tokens, top_k] int32, and
    their weights, f32. Equal scores go to the lower number."""
    num_tokens, num_experts = logits.shape
    assert num_experts == rule.num_experts and logits.stride(1) == 1, f"{logits.shape=} {rule=}"
    assert correction is None or correction.dtype == torch.float32, "a correction stays in fp32"
    shape = (num_tokens, rule.top_k)
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if num_tokens:
        stride = logits.stride(0)
        added = weights if correction is None else correction  # unread without one
        _launch_route(
            (num_tokens, 1, 1),
            (logits, added, experts, weights, stride, rule.scale),
            {
                "NUM": num_experts,
                "PAD": triton.next_power_of_2(num_experts),
                "TOP_K": rule.top_k,
                "TOP_K_PAD": triton.next_power_of_2(rule.top_k),
                "SIGMOID": rule.score == "sigmoid",
                "NORMALIZE": rule.normalize,
                "ROUNDS": rule.rounds,
                "GROUPS": rule.num_groups,
                "TOP_GROUPS": rule.top_groups,
                "GROUP_BEST": min(rule.group_best, num_experts // rule.num_groups),
                "HAS_CORRECTION": correction is not None,
                "num_warps": 1,  # a row is summed in one order, by one warp
            },
            (logits.dtype, stride, alignments(logits, added)),
        )
    return experts, weights


def sort_pairs(experts: Tensor, num_experts: int, loads: Tensor | None = None) -> SortedPairs:
    """Group the pairs of [tokens, top_k] int32 experts; adds the counts to int64 `loads`."""
    assert experts.dtype == torch.int32 and experts.is_contiguous()
    assert loads is None or loads.dtype == torch.int64
    pairs = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    _launch_sort(
        (num_experts, 1, 1),
        (experts, pairs, counts, counts if loads is None else loads, experts.numel()),
        {"BLOCK": PAIR_BLOCK, "HAS_LOADS": loads is not None, "num_warps": 4},
        (experts.data_ptr() % 16 == 0, loads is None or loads.data_ptr() % 16 == 0),
    )
    return SortedPairs(pairs, counts, experts.shape[1])


def combine(results: Tensor, weights: Tensor) -> Tensor:
    """[pairs, width] times [tokens, top_k] -> [tokens, width], added in f32 in rank order."""
    num_tokens, top_k = weights.shape
    width = results.shape[1]
    assert results.is_contiguous() and weights.is_contiguous()
    out = torch.empty((num_tokens, width), dtype=results.dtype, device=results.device)
    if num_tokens:
        _launch_combine(
            (num_tokens, triton.cdiv(width, HIDDEN_BLOCK), 1),
            (results, weights, out, width),
            {"TOP_K": top_k, "BLOCK": HIDDEN_BLOCK, "num_warps": 4},
            (results.dtype, width, results.data_ptr() % 16 == 0),
        )
    return out
