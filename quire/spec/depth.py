"""Depth: how many drafts of each request a step should feed, by what they bring and cost.

A draft survives if it and all before it are right. Drafts of all requests are taken in the order of
their survival, and the step is cut where tokens per second are highest; that may be at none. What
is drawn does not depend on it, so it may follow the clock. Of a tree this takes the best part there
is: no draft survives more often than the one it follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from quire.sched.costs import StepCosts
from quire.spec.tree import Parents, paths_of, survivals

WORTH = 1.05  # times the speed without drafts that they must promise: costs are measured, not known


@dataclass(frozen=True, slots=True)
class Candidate:
    """One request's drafts."""

    chances: Sequence[float]  # of each, given those before
    is_made: bool = True  # False: a model makes them, one step of it for each
    is_drawn: bool = False  # after each a token is drawn, and not the likeliest taken
    parents: Parents = ()  # of a tree, whose drafts are in the order of their survival

    def survivals(self) -> Iterable[float]:
        return (
            survivals(self.chances, self.parents) if self.parents else accumulate(self.chances, mul)
        )

    def step_of(self, draft: int) -> int:
        """The step of the model that makes this draft, from 1 on; 0: it comes with a sibling."""
        if not self.parents:
            return draft
        is_first = self.parents.index(self.parents[draft - 1]) == draft - 1
        return len(paths_of(self.parents)[draft]) if is_first else 0


@dataclass(frozen=True, slots=True)
class Costs:
    step: StepCosts
    draft: StepCosts | None = None  # of the model that drafts
    draw: float = 0.0  # seconds a draw takes longer than taking the likeliest token
    wait: float = 0.0  # seconds a step takes longer whose result is awaited before the next

    def plain(self, num_tokens: int) -> float:
        """Seconds of a step without drafts: nobody needs to wait for its result."""
        return self.step.seconds(num_tokens) - self.wait


def best_depths(candidates: Sequence[Candidate], num_others: int, costs: Costs) -> list[int]:
    """A depth for each candidate; `num_others` requests decode in the same step without drafts."""
    return weighed(candidates, num_others, costs)[1]


def weighed(
    candidates: Sequence[Candidate], num_others: int, costs: Costs
) -> tuple[float, list[int]]:
    """The depths, and the tokens per second that they promise; 0: drafts do not pay."""
    num_base = len(candidates) + num_others
    if not _can_pay(candidates, num_base, costs):  # soon said, and so for most large batches
        return 0.0, [0] * len(candidates)
    offers = [
        (survival, index, depth)
        for index, candidate in enumerate(candidates)
        for depth, survival in enumerate(candidate.survivals(), 1)
    ]
    offers.sort(key=lambda offer: (-offer[0], offer[2]))  # shallower first, where they tie
    depths, best = [0] * len(candidates), 0
    tokens, seconds = float(num_base), 0.0
    drawing = costs.draw * sum(candidate.is_drawn for candidate in candidates)
    best_rate = WORTH * tokens / (costs.plain(num_base) + drawing)
    drafting: list[int] = []  # requests at each step of the model that drafts
    for count, (survival, index, depth) in enumerate(offers, 1):
        tokens += survival
        # A model that drafts draws as well.
        drawing += costs.draw * candidates[index].is_drawn * (2 - candidates[index].is_made)
        if not candidates[index].is_made and (step := candidates[index].step_of(depth)):
            assert costs.draft is not None, "drafts of a model without its costs"
            if step > len(drafting):
                drafting.append(0)
            drafting[step - 1] += 1
            seconds = sum(map(costs.draft.seconds, drafting))
        rate = tokens / (costs.step.seconds(num_base + count) + drawing + seconds)
        if rate > best_rate:
            best_rate, best = rate, count
    for _, index, depth in offers[:best]:
        depths[index] = depth
    return best_rate if best else 0.0, depths


def _can_pay(candidates: Sequence[Candidate], num_base: int, costs: Costs) -> bool:
    """Whether drafts could pay if all were as good as the best and cost nothing to make. Between
    two measurements that rate only rises or only falls, so the measurements are looked at."""
    top = max((chance for c in candidates for chance in c.chances[:1]), default=0.0)
    drawing = costs.draw * sum(candidate.is_drawn for candidate in candidates)
    wanted = WORTH * num_base / (costs.plain(num_base) + drawing)
    last = num_base + sum(len(candidate.chances) for candidate in candidates)
    sizes = {num_base + 1, last, *costs.step.tokens}
    return any(
        (num_base + top * (size - num_base)) / (costs.step.seconds(size) + drawing) > wanted
        for size in sizes
        if num_base < size <= last
    )
