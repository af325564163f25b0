"""Rounds: engines take turns, so a machine that slows down slows everyone.

Within a round every workload goes once through all engines, A B C, before the next round begins.
A peer that fails at a workload is left out of it from then on, and said so; Quire may not fail.
Figures are told as they come, and Ctrl-C ends the rounds with what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from quire.bench.cpu.engines import ENGINES, OURS
from quire.bench.cpu.neighbours import NOTABLE, Neighbours
from quire.bench.startup import ChildFailed


class Turn(NamedTuple):
    round: int  # from 1
    workload: str
    engine: str


Values = dict[str, dict[str, dict[int, float]]]  # metric -> engine -> round -> figure


class Measured(NamedTuple):
    values: Values
    failed: dict[str, str]  # "engine workload" -> its last words
    neighbours: dict[str, list[float]]  # "engine workload" -> cores others used, by round


def turns(engines: Iterable[str], workloads: Iterable[str], rounds: int) -> Iterator[Turn]:
    engines, workloads = tuple(engines), tuple(workloads)
    for number in range(1, rounds + 1):
        for workload in workloads:
            for engine in engines:
                if workload in ENGINES[engine].workloads:
                    yield Turn(number, workload, engine)


def run_rounds(
    planned: Iterable[Turn],
    measure: Callable[[Turn], dict[str, float]],
    say: Callable[[str], None],
) -> Measured:
    """`measure` gives a turn's figures by metric, or raises ChildFailed."""
    measured = Measured({}, {}, {})
    for turn in planned:
        name = f"{turn.engine} {turn.workload}"
        if name in measured.failed:
            continue
        say(f"round {turn.round}: {name}")
        neighbours = Neighbours()
        try:
            figures = measure(turn)
        except KeyboardInterrupt:
            say("stopped; these are the figures so far")
            break
        except ChildFailed as error:
            if turn.engine in OURS:
                raise
            measured.failed[name] = str(error)
            say(f"{name}: {error}")
            continue
        if (cores := neighbours.cores()) is not None:
            measured.neighbours.setdefault(name, []).append(round(cores, 2))
            if cores > NOTABLE:
                say(f"{name}: other programs kept {cores:.1f} cores busy meanwhile")
        say(", ".join(f"{metric} {value:.5g}" for metric, value in figures.items()))
        for metric, value in figures.items():
            engines = measured.values.setdefault(metric, {})
            engines.setdefault(turn.engine, {})[turn.round] = value
    return measured
