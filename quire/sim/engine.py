"""SimEngine and Node: one engine of a simulation, with the real scheduler and a clock of its own.

What is simulated is the device alone: who runs, which pages are shared, who is preempted and when a
prompt is cut into chunks are decided by the code that decides it in an engine. `simulate.py` sends
requests to one or to several nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import SchedConfig
from quire.engine.core import EngineCore
from quire.kv.manager import KVManager
from quire.request import Request
from quire.sched.cost_table import CostTable
from quire.sched.costs import StepCosts
from quire.sched.scheduler import Scheduler
from quire.sched.stats import SchedStats
from quire.sim.clock import Clock, TimedRunner
from quire.step import TokenEvent


@dataclass(frozen=True, slots=True)
class SimEngine:
    """What an engine of this table would be, unless told otherwise."""

    costs: CostTable
    sched: SchedConfig
    num_pages: int
    prefix_caching: bool = True

    @staticmethod
    def of(costs: CostTable) -> SimEngine:
        facts = costs.engine
        sched = SchedConfig(
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            max_model_len=facts.max_model_len,
            waits_for_draws=facts.stages > 1,
        )
        return SimEngine(costs, sched, facts.num_pages)


@dataclass(frozen=True, slots=True)
class NodeRun:
    """What one engine did."""

    stats: SchedStats
    busy_s: float  # of its device


class Node:
    """An engine at work. Its clock is where its host is: further on than the world's in a step."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine, facts = engine, engine.costs.engine
        self.clock = Clock()
        self.kv = KVManager(
            engine.num_pages, facts.page_size, engine.prefix_caching, facts.windows or (None,)
        )
        self._runner = TimedRunner(engine.costs, self.clock)
        times = None
        if engine.sched.target_gap_ms:
            times = StepCosts(engine.costs.tokens, engine.costs.times)
        self._scheduler = Scheduler(engine.sched, self.kv, self.clock, times)
        self._core = EngineCore(self._scheduler, self._runner, facts.overlaps + facts.stages - 1)

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    def send(self, request: Request, now: float) -> None:
        if not self.has_work:
            self.clock.move_to(now)
        self._core.add(request)

    def step(self) -> list[TokenEvent]:
        """The events happen at the clock's new time."""
        self.clock.move_to(self.clock.now + self._scheduler.seconds_held())
        return self._core.step()

    def run(self) -> NodeRun:
        return NodeRun(self._scheduler.stats(), self._runner.busy_s)
