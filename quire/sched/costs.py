"""StepCosts: how long a step takes by the tokens it feeds. A plain value, measured at warm-up.

Few tokens cost little more than one, because the time goes into reading the weights; many cost
their number. Where the line bends is what speculation, chunking and simulation need to know.
`costs_in_use.py` corrects it by the steps that follow.
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
        """From measurements, in which more tokens may seem to take less time. Whatever disturbs a
        step makes it longer, so the smaller one was disturbed.

        >>> StepCosts.of([(1, 10.0), (2, 30.0), (4, 15.0)]).times
        (10.0, 15.0, 15.0)
        """
        points = sorted(measured)
        assert points, "no step was measured"
        times = [*accumulate((time for _, time in reversed(points)), min)]
        return StepCosts(tuple(tokens for tokens, _ in points), tuple(reversed(times)))

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

    def shares(self, num_tokens: int) -> tuple[tuple[int, float], ...]:
        """The measurements a size lies between, by index, and how much each has to say about it.

        >>> StepCosts.of([(1, 10.0), (2, 11.0), (6, 15.0)]).shares(3)
        ((1, 0.75), (2, 0.25))
        """
        tokens = self.tokens
        at = bisect_left(tokens, num_tokens)
        if at == len(tokens):
            return ((at - 1, 1.0),)
        if at == 0 or tokens[at] == num_tokens:
            return ((at, 1.0),)
        share = (num_tokens - tokens[at - 1]) / (tokens[at] - tokens[at - 1])
        return ((at - 1, 1.0 - share), (at, share))
