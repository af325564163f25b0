"""Clock and TimedRunner: an engine's device that does nothing but take its time.

The clock stands still until somebody moves it. A plan's result is there when the device, which
takes steps one behind another, is done with it: with overlap the host has gone on meanwhile, as it
has with a real device. Of several stages each takes its step when the stage before is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from quire.sched.cost_table import CostTable, Load
from quire.step import PageLoad, PageSave, StepPlan, StepResult

TOKEN = 1  # what everybody draws; nobody ends at it


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def move_to(self, then: float) -> None:
        """Never back."""
        self.now = max(self.now, then)


class Store(Protocol):
    """Places outside the pool (`outside.py`)."""

    def save(self, saves: Sequence[PageSave]) -> None: ...

    def load(self, loads: Sequence[PageLoad]) -> None: ...


class TimedRunner:
    """`step.Runner`."""

    def __init__(
        self,
        costs: CostTable,
        clock: Clock,
        store: Store | None = None,
        shared: Callable[[StepPlan], int] | None = None,
    ) -> None:
        """`shared`: tokens of a step's contexts that are read for another request already."""
        self.costs, self.clock, self.store, self.shared = costs, clock, store, shared
        self.busy_s = 0.0  # of each device, in the mean
        self.num_steps = 0
        self._free_at = [0.0] * costs.engine.stages  # when a stage has done all it was given

    def execute(self, plan: StepPlan) -> TimedStep:
        load = Load.of(plan)
        if self.shared is not None and (shared := self.shared(plan)):
            load = msgspec.structs.replace(load, context=load.context - shared)
        if self.store is not None:
            self.store.save(plan.saves)
            self.store.load(plan.loads)
        self.clock.move_to(self.clock.now + self.costs.host_seconds(load))
        stages = len(self._free_at)
        takes = self.costs.seconds(load) / stages if plan.works else 0.0
        begin = self.clock.now
        for stage in range(stages):
            if stage and plan.works:
                begin += self.costs.hop_seconds(load)
            begin = self._free_at[stage] = max(self._free_at[stage], begin) + takes
        self.busy_s += takes
        self.num_steps += bool(plan.works)
        return TimedStep(plan, begin, self.clock)


class TimedStep:
    """`step.Pending`."""

    def __init__(self, plan: StepPlan, done_at: float, clock: Clock) -> None:
        self._plan, self._done_at, self._clock = plan, done_at, clock

    def result(self) -> StepResult:
        self._clock.move_to(self._done_at)
        sampled: list[Sequence[int]] = [
            (TOKEN,) if work.sample else () for work in self._plan.works
        ]
        return StepResult(sampled)
