"""StepCosts: how long a step takes by the tokens it feeds. A plain value, measured at warm-up.

Few tokens cost little more than one, because the time goes into reading the weights; many cost
their number. Where the line bends is what speculation, chunking and simulation need to know.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class StepCosts:
    """
    >>> costs = StepCosts.of([(1, 10.0), (2, 11.0), (4, 15.0)])
    >>> costs.seconds(1), costs.seconds(3), costs.seconds(8)
    (10.0, 13.0, 23.0)
    """

    tokens: tuple[int, ...]  # ascending
    times: tuple[float, ...]  # seconds, never falling

    @staticmethod
    def of(measured: Iterable[tuple[int, float]]) -> StepCosts:
        """From measurements, in which more tokens may seem to take less time."""
        points = sorted(measured)
        assert points, "no step was measured"
        times = tuple(accumulate((time for _, time in points), max))
        return StepCosts(tuple(tokens for tokens, _ in points), times)

    def less(self, seconds: float) -> StepCosts:
        """Of steps that take so much less, whatever their size."""
        return StepCosts(self.tokens, tuple(max(0.0, time - seconds) for time in self.times))

    def seconds(self, num_tokens: int) -> float:
        """Between measurements along a line; beyond the last one along the last line."""
        tokens, times = self.tokens, self.times
        at = min(bisect_left(tokens, num_tokens), len(tokens) - 1)
        if at == 0 or tokens[at] == num_tokens:
            return times[at]
        slope = (times[at] - times[at - 1]) / (tokens[at] - tokens[at - 1])
        return times[at] + slope * (num_tokens - tokens[at])
