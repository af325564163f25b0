"""Depth: how many drafts of each request a step should feed, by what they bring and cost.

A draft survives if it and all before it are right. Drafts of all requests are taken in the order of
their survival, and the step is cut where tokens per second are highest; that may be at none. What
is drawn does not depend on it, so it may follow the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from quire.sched.costs import StepCosts

WORTH = 1.03  # times the speed without drafts that they must promise: costs are measured, not known


@dataclass(frozen=True, slots=True)
class Candidate:
    """One request's drafts."""

    chances: Sequence[float]  # of each, given those before
    is_made: bool = True  # False: a model makes them, one step of it for each
    is_drawn: bool = False  # after each a token is drawn, and not the likeliest taken


@dataclass(frozen=True, slots=True)
class Costs:
    step: StepCosts
    draft: StepCosts | None = None  # of the model that drafts
    draw: float = 0.0  # seconds a draw takes longer than taking the likeliest token


def best_depths(candidates: Sequence[Candidate], num_others: int, costs: Costs) -> list[int]:
    """A depth for each candidate; `num_others` requests decode in the same step without drafts."""
    num_base = len(candidates) + num_others
    offers = [
        (survival, index, depth)
        for index, candidate in enumerate(candidates)
        for depth, survival in enumerate(accumulate(candidate.chances, mul), 1)
    ]
    offers.sort(key=lambda offer: (-offer[0], offer[2]))  # shallower first, where they tie
    depths, best = [0] * len(candidates), [0] * len(candidates)
    tokens, drawing, seconds = float(num_base), 0.0, 0.0
    drawing = costs.draw * sum(candidate.is_drawn for candidate in candidates)
    best_rate = WORTH * tokens / (costs.step.seconds(num_base) + drawing)
    drafting: list[int] = []  # requests at each step of the model that drafts
    for count, (survival, index, depth) in enumerate(offers, 1):
        depths[index] = depth
        tokens += survival
        drawing += costs.draw * candidates[index].is_drawn
        if not candidates[index].is_made:
            assert costs.draft is not None, "drafts of a model without its costs"
            if depth > len(drafting):
                drafting.append(0)
            drafting[depth - 1] += 1
            seconds = sum(map(costs.draft.seconds, drafting))
        rate = tokens / (costs.step.seconds(num_base + count) + drawing + seconds)
        if rate > best_rate:
            best_rate, best = rate, depths.copy()
    return best
