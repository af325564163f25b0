"""Step times: how long steps of few tokens take on this machine, measured through `execute`.

One request feeds one token, two, and so on, drawing after each, as when drafts are verified, in
rounds (`rounds.py`). Each time includes the wait for the result, which on a GPU is the wait for the
device. With captured graphs a step takes as long as the size it is padded to, so those sizes are
measured. For engines that have not served anybody yet: row 0 and the first pages are written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner.rounds import affordable, least_of_rounds, seconds_of
from quire.runner.runner import ModelRunner
from quire.sched.costs import StepCosts
from quire.step import Admission, PageWrite, StepPlan, Work

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # each is captured, which takes a while
GUESSES = (1, 2, 4, 8, 16, 32)
CONTEXT = 128  # tokens before those fed
REPEATS = 6
IN_A_ROW = 20
GREEDY, DRAWING = SamplingParams(temperature=0.0), SamplingParams(seed=0)
ENOUGH_S = 1.5  # of measuring, without what is compiled; what is larger goes along the last line


@dataclass(frozen=True, slots=True)
class StepTimes:
    costs: StepCosts  # of steps that draw greedily after every token and are awaited
    draw: float  # seconds that a draw takes longer when it is not greedy
    wait: float  # seconds that a step of one token takes longer if its result is awaited at once


def measure(runner: ModelRunner, max_tokens: int) -> StepTimes:
    """Of an engine whose steps feed at most `max_tokens`."""
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
    room = min(max_tokens, min(most, num_pages * size) - context)
    measured = probe.measured([count for count in sizes if count <= room])
    draw = probe.draw_seconds(measured[-1][0])
    # On a CPU a step is over when it was launched.
    wait = probe.wait_seconds() if runner.model.device.type == "cuda" else 0.0
    runner.rows.page_tables.zero_()  # of pages that nobody holds
    costs = StepCosts.of(measured if runner.graphs is None else padded(measured))
    return StepTimes(costs, draw, wait)


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

    def guess(count: int) -> None:
        drafter.rehearse(count)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    steps = [partial(guess, count) for count in GUESSES]
    return StepCosts.of(zip(GUESSES, least_of_rounds(steps, ENOUGH_S / 4), strict=True))


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

    def measured(self, sizes: Sequence[int]) -> list[tuple[int, float]]:
        """Of greedy steps that feed so many tokens, as far as there is time for them."""
        self._admit(GREEDY)
        steps = [partial(self._run, count) for count in sizes]
        num = affordable(steps, ENOUGH_S, 3)
        return [*zip(sizes, least_of_rounds(steps[:num], ENOUGH_S), strict=False)]

    def draw_seconds(self, count: int) -> float:
        """That a draw takes longer when it is not greedy."""
        greedy, drawn = self._in_turn(
            (GREEDY, partial(self._run, count)), (DRAWING, partial(self._run, count))
        )
        return max(0.0, (drawn - greedy) / count)

    def wait_seconds(self) -> float:
        """That a step of one token takes longer than where only the last of several is awaited."""
        awaited, in_a_row = self._in_turn(
            (GREEDY, partial(self._run, 1)), (GREEDY, self._run_in_a_row)
        )
        return max(0.0, awaited - in_a_row / IN_A_ROW)

    def _in_turn(self, *steps: tuple[SamplingParams, Callable[[], object]]) -> list[float]:
        """The shortest time of each."""
        least = [float("inf")] * len(steps)
        for _ in range(REPEATS):
            for at, (params, run) in enumerate(steps):
                self._admit(params)
                least[at] = min(least[at], seconds_of(run))
        return least

    def _run(self, count: int) -> None:
        self.runner.execute(self._plan(count)).result()

    def _run_in_a_row(self) -> None:
        plan = self._plan(1)
        [self.runner.execute(plan) for _ in range(IN_A_ROW)][-1].result()

    def _admit(self, params: SamplingParams) -> None:
        self.runner.execute(StepPlan(admissions=(self._admission(params),))).result()

    def _plan(self, count: int) -> StepPlan:
        drafts = (0,) * (count - 1)
        work = Work(RequestId(0), 0, self.context, count, True, count - 1, drafts)
        return StepPlan((work,))

    def _admission(self, params: SamplingParams) -> Admission:
        tokens = [0] * (self.context + 1)
        return Admission(RequestId(0), 0, tokens, self.context, params, 0, ())
