"""One reading of several API processes: what each counted, as a plain value, and their sum.

What clients did is added up. What the engine said is the same in all of them but for those that
joined late, so the largest is taken. A process that was restarted goes on from what its forerunner
wrote down, because Prometheus counters must not fall.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire.obs.histogram import Histogram
from quire.obs.totals import LabelledCounts


class HistogramState(msgspec.Struct, frozen=True, array_like=True):
    edges: list[float]
    counts: list[int]
    total: float

    @staticmethod
    def of(histogram: Histogram) -> HistogramState:
        return HistogramState(list(histogram.edges), list(histogram.counts), histogram.total)


class LabelledState(msgspec.Struct, frozen=True, array_like=True):
    labels: list[str]
    count: int


class MetricsState(msgspec.Struct, frozen=True):
    """All that one process counted."""

    sums: dict[str, int]
    histograms: dict[str, HistogramState]
    labelled: dict[str, list[LabelledState]]
    http_seconds: list[tuple[list[str], HistogramState]]
    engine_sums: dict[str, float]
    num_open: int = 0
    num_restarts: int = 0


def add_histogram(into: Histogram, state: HistogramState) -> None:
    if tuple(state.edges) != into.edges:  # another version of us wrote it
        return
    for index, count in enumerate(state.counts):
        into.counts[index] += count
    into.total += state.total


def add_labelled(into: LabelledCounts, states: Iterable[LabelledState]) -> None:
    for state in states:
        into.add(*state.labels, times=state.count)


def labelled(counts: LabelledCounts) -> list[LabelledState]:
    return [LabelledState(list(labels), count) for labels, count in counts.counts.items()]
