"""Totals that only grow: across engine restarts, by label, and as rates of the last seconds.

Prometheus counters must never fall, but a restarted engine counts from zero, and clients can make
up any number of paths. These three small classes keep both problems out of `metrics.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

MAX_SERIES = 200  # label sets of one metric; what comes later is counted as `other`
OTHER = "other"


class EngineTotals:
    """Totals summed over all engine processes so far.

    >>> totals = EngineTotals()
    >>> totals.update({"num_steps": 10}, pid=1)
    {'num_steps': 10}
    >>> totals.update({"num_steps": 3}, pid=2)
    {'num_steps': 3}
    >>> totals["num_steps"]
    13
    """

    def __init__(self) -> None:
        self._pid: int | None = None
        self._last: dict[str, float] = {}
        self._sums: dict[str, float] = {}

    def update(self, counts: Mapping[str, float], pid: int) -> dict[str, float]:
        """Take the latest counts of the process `pid`; returns what each grew by."""
        if pid != self._pid:
            self._pid, self._last = pid, {}
        growth = {}
        for key, value in counts.items():
            # Smaller than before from the same process: a recycled pid, it started again.
            before = self._last.get(key, 0)
            growth[key] = value - before if value >= before else value
            self._sums[key] = self._sums.get(key, 0) + growth[key]
        self._last = dict(counts)
        return growth

    def __getitem__(self, key: str) -> float:
        return self._sums.get(key, 0)

    @property
    def sums(self) -> dict[str, float]:
        return dict(self._sums)

    def raise_to(self, sums: Mapping[str, float]) -> None:
        """Somebody who listened longer knows of more."""
        for key, value in sums.items():
            self._sums[key] = max(self._sums.get(key, 0), value)


class LabelledCounts:
    """A counter for each label set, at most MAX_SERIES of them."""

    def __init__(self, *known: tuple[str, ...]) -> None:
        self.counts: dict[tuple[str, ...], int] = dict.fromkeys(known, 0)

    def add(self, *labels: str, times: int = 1) -> None:
        if labels not in self.counts and len(self.counts) >= MAX_SERIES:
            labels = (OTHER,) * len(labels)
        self.counts[labels] = self.counts.get(labels, 0) + times

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class Rates:
    """How fast totals grow, over the last few seconds.

    Counting stays free of clock reads: whoever looks also leaves a reading for the next look.
    """

    def __init__(self, clock: Callable[[], float], window_s: float = 5.0) -> None:
        self._clock, self._window_s = clock, window_s
        self._readings: deque[tuple[float, tuple[float, ...]]] = deque()

    def read(self, *totals: float) -> tuple[float, ...]:
        """Leave a reading; returns the growth per second of each total since the oldest kept."""
        now = self._clock()
        readings = self._readings
        while len(readings) > 1 and readings[1][0] <= now - self._window_s:
            readings.popleft()
        readings.append((now, totals))
        began, before = readings[0]
        seconds = now - began
        if seconds <= 0:
            return (0.0,) * len(totals)
        return tuple((new - old) / seconds for new, old in zip(totals, before, strict=True))
