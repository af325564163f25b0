"""Step times: how long steps of few tokens take on this machine, measured through `execute`.

One request feeds one token, two, and so on, drawing after each, as when drafts are verified. Each
time includes the wait for the result, which on a GPU is the wait for the device. With captured
graphs a step takes as long as the size it is padded to, so those sizes are measured. For engines
that have not served anybody yet: row 0 and the first pages are written to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner.runner import ModelRunner
from quire.sched.costs import StepCosts
from quire.step import Admission, PageWrite, StepPlan, Work

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # each is captured, which takes a while
GUESSES = (1, 2, 4, 8, 16, 32)
CONTEXT = 128  # tokens before those fed
REPEATS = 5
IN_A_ROW = 20
ENOUGH_S = 1.5  # of measuring, without what is compiled; what is larger goes along the last line


@dataclass(frozen=True, slots=True)
class StepTimes:
    costs: StepCosts  # of steps that draw greedily after every token and are awaited
    draw: float  # seconds that a draw takes longer when it is not greedy
    wait: float  # seconds that a step of one token takes longer if its result is awaited at once


def measure(runner: ModelRunner) -> StepTimes:
    size, most = runner.spec.page_size, runner.rows.max_len
    sizes = SIZES if runner.graphs is None else GRAPH_SIZES
    context = min(CONTEXT, most // 2)
    num_pages = -(-min(most, context + sizes[-1]) // size)
    num_groups = len(runner.pool.groups)
    if runner.pool.num_pages <= num_groups * num_pages:
        num_pages = (runner.pool.num_pages - 1) // num_groups
        context = num_pages * size // 2
    probe = _Probe(runner, context)
    probe.begin(num_pages)
    greedy, drawing = SamplingParams(temperature=0.0), SamplingParams(seed=0)
    measured: list[tuple[int, float]] = []
    spent = 0.0
    for count in sizes:
        is_late = spent > ENOUGH_S
        if context + count > min(most, num_pages * size) or (is_late and len(measured) > 2):
            break
        measured.append((count, probe.seconds(count, greedy)))
        spent += REPEATS * measured[-1][1]
    count = measured[-1][0]
    draw = (probe.seconds(count, drawing) - measured[-1][1]) / count
    wait = 0.0  # on a CPU a step is over when it was launched
    if runner.model.device.type == "cuda":
        wait = max(0.0, measured[0][1] - probe.seconds_in_a_row(greedy))
    runner.rows.page_tables.zero_()  # of pages that nobody holds
    costs = StepCosts.of(measured if runner.graphs is None else padded(measured))
    return StepTimes(costs, max(0.0, draw), wait)


def padded(measured: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """With the least that each size is padded from: it takes as long.

    >>> padded([(1, 5.0), (2, 6.0), (4, 7.0)])
    [(1, 5.0), (2, 6.0), (3, 7.0), (4, 7.0)]
    """
    made: dict[int, float] = {}
    last = 0
    for count, seconds in measured:
        made[last + 1] = made[count] = seconds
        last = count
    return list(made.items())


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
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
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
        self._admit(params)
        plan, times = self._plan(count), []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            self.runner.execute(plan).result()
            times.append(time.perf_counter() - begun)
        return min(times)

    def seconds_in_a_row(self, params: SamplingParams) -> float:
        """Of a step of one token where only the last result of several is awaited."""
        self._admit(params)
        plan = self._plan(1)
        self.runner.execute(plan).result()
        begun = time.perf_counter()
        last = [self.runner.execute(plan) for _ in range(IN_A_ROW)][-1]
        last.result()
        return (time.perf_counter() - begun) / IN_A_ROW

    def _admit(self, params: SamplingParams) -> None:
        self.runner.execute(StepPlan(admissions=(self._admission(params),))).result()

    def _plan(self, count: int) -> StepPlan:
        drafts = (0,) * (count - 1)
        work = Work(RequestId(0), 0, self.context, count, True, count - 1, drafts)
        return StepPlan((work,))

    def _admission(self, params: SamplingParams) -> Admission:
        tokens = [0] * (self.context + 1)
        return Admission(RequestId(0), 0, tokens, self.context, params, 0, ())
