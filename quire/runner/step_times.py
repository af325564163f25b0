"""Step times: how long steps of few tokens take on this machine, measured through `execute`.

One request feeds one token, two, and so on, drawing after each, as when drafts are verified. For
engines that have not served anybody yet: row 0 and the first pages are written to.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner.runner import ModelRunner
from quire.sched.costs import StepCosts
from quire.step import Admission, PageWrite, StepPlan, Work

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
GUESSES = (1, 2, 4, 8, 16, 32)
CONTEXT = 128  # tokens before those fed
REPEATS = 5
ENOUGH_S = 1.5  # of measuring; what is larger goes along the last line


@dataclass(frozen=True, slots=True)
class StepTimes:
    costs: StepCosts  # of steps that draw greedily after every token
    draw: float  # seconds that a draw takes longer when it is not greedy


def measure(runner: ModelRunner) -> StepTimes:
    size, most = runner.spec.page_size, runner.rows.max_len
    context = min(CONTEXT, most // 2)
    num_pages = -(-min(most, context + SIZES[-1]) // size)
    num_groups = len(runner.pool.groups)
    if runner.pool.num_pages <= num_groups * num_pages:
        num_pages = (runner.pool.num_pages - 1) // num_groups
        context = num_pages * size // 2
    probe = _Probe(runner, context)
    probe.begin(num_pages)
    greedy, drawing = SamplingParams(temperature=0.0), SamplingParams(seed=0)
    measured: list[tuple[int, float]] = []
    begun = time.perf_counter()
    for count in SIZES:
        is_late = time.perf_counter() - begun > ENOUGH_S
        if context + count > min(most, num_pages * size) or (is_late and len(measured) > 2):
            break
        measured.append((count, probe.seconds(count, greedy)))
    count = measured[-1][0]
    draw = (probe.seconds(count, drawing) - measured[-1][1]) / count
    runner.rows.page_tables.zero_()  # of pages that nobody holds
    return StepTimes(StepCosts.of(measured), max(0.0, draw))


class Rehearsed(Protocol):
    def rehearse(self, num_works: int) -> None:
        """One guess for so many requests."""
        ...


def rehearsed(drafter: Rehearsed) -> StepCosts:
    """What a head takes for a guess, by the number of requests."""

    def seconds(count: int) -> float:
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            drafter.rehearse(count)
            times.append(time.perf_counter() - begun)
        return min(times)

    return StepCosts.of((count, seconds(count)) for count in GUESSES)


@dataclass(frozen=True, slots=True)
class _Probe:
    runner: ModelRunner
    context: int

    def begin(self, num_pages: int) -> None:
        writes = [
            PageWrite(0, column, 1 + group * num_pages + column, group)
            for group in range(len(self.runner.pool.groups))
            for column in range(num_pages)
        ]
        plan = StepPlan(admissions=(self._admission(SamplingParams()),), page_writes=tuple(writes))
        self.runner.execute(plan).result()

    def seconds(self, count: int, params: SamplingParams) -> float:
        """Of a step that feeds so many tokens: the shortest of several, as others may run too."""
        admitted = StepPlan(admissions=(self._admission(params),))
        self.runner.execute(admitted).result()
        work = Work(RequestId(0), 0, self.context, count, True, count - 1, (0,) * (count - 1))
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            self.runner.execute(StepPlan((work,))).result()
            times.append(time.perf_counter() - begun)
        return min(times)

    def _admission(self, params: SamplingParams) -> Admission:
        tokens = [0] * (self.context + 1)
        return Admission(RequestId(0), 0, tokens, self.context, params, 0, ())
