"""Histogram: counts between fixed edges, cheap enough for every streamed token.

Counts are kept per bucket and summed up only when somebody looks, so an observation is one binary
search and two additions. A coarser view of the same counts costs nothing if its edges are among
these: so our finer buckets also appear under vLLM's names, with its edges.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """
    >>> h = Histogram((0.1, 1.0))
    >>> h.observe(0.1); h.observe(0.5); h.observe(7.0)
    >>> h.counts, h.cumulative(), h.count
    ([1, 1, 1], [1, 2, 3], 3)
    """

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        assert list(edges) == sorted(set(edges)), f"edges must ascend: {edges}"
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)  # the last one: above all edges
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times; a value on an edge belongs below it."""
        self.counts[bisect_left(self.edges, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def cumulative(self, edges: Sequence[float] | None = None) -> list[int]:
        """Values at or below each edge, then all of them. `edges`: some of our own."""
        sums = list(accumulate(self.counts))
        if edges is None:
            return sums
        return [sums[self.edges.index(edge)] for edge in edges] + sums[-1:]
