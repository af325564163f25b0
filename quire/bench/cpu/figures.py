"""Figures of a run: best and median of the rounds, and how Quire compares.

A ratio is the median of the rounds' own ratios: engines that were measured minutes apart are never
compared. Above 1 Quire is better, whether the figure is a speed, a time or a size.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.cpu.engines import OURS
from quire.bench.cpu.rounds import Values
from quire.bench.markdown import number


@dataclass(frozen=True, slots=True)
class Metric:
    title: str
    unit: str
    more_is_better: bool = True


METRICS = {
    "decode_tok_s": Metric("decode, batch 1", "tok/s"),
    "prefill_tok_s": Metric("prefill", "tok/s"),
    "output_tok_s": Metric("many requests, output", "tok/s"),
    "first_token_s": Metric("process start to first token", "s", more_is_better=False),
    "peak_mb": Metric("peak memory then", "MB", more_is_better=False),
}
COLUMNS = ("measurement", "engine", "best", "median", "unit", *(f"{name} is" for name in OURS))


@dataclass(frozen=True, slots=True)
class Figure:
    metric: str
    engine: str
    best: float
    median: float
    unit: str
    rounds: list[float]
    ratios: dict[str, float]  # our engine -> how many times as good it is

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def figures_of(values: Values) -> list[Figure]:
    found = []
    for name, metric in METRICS.items():
        engines = values.get(name, {})
        for engine, theirs in engines.items():
            rounds = list(theirs.values())
            best = max(rounds) if metric.more_is_better else min(rounds)
            ratios = {
                ours: _ratio(engines[ours], theirs, metric.more_is_better)
                for ours in OURS
                if ours in engines and ours != engine
            }
            found.append(
                Figure(
                    name,
                    engine,
                    round(best, 4),
                    round(statistics.median(rounds), 4),
                    metric.unit,
                    [round(value, 4) for value in rounds],
                    ratios,
                )
            )
    return found


def _ratio(ours: Mapping[int, float], theirs: Mapping[int, float], more_is_better: bool) -> float:
    each = [ours[at] / theirs[at] for at in theirs if at in ours]
    middle = statistics.median(each)
    return round(middle if more_is_better else 1 / middle, 3)


def table_rows(figures: list[Figure]) -> list[tuple[str, ...]]:
    return [
        (
            METRICS[figure.metric].title,
            figure.engine,
            number(figure.best, 3),
            number(figure.median, 3),
            figure.unit,
            *(f"{figure.ratios[name]:.2f}x" if name in figure.ratios else "-" for name in OURS),
        )
        for figure in figures
    ]
