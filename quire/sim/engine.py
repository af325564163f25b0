"""SimEngine and Node: one engine of a simulation, with the real scheduler and a clock of its own.

What is simulated is the device alone: who runs, which pages are shared, who is preempted and when a
prompt is cut into chunks are decided by the code that decides it in an engine. `simulate.py` sends
requests to one or to several nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from quire.config import SchedConfig
from quire.engine.core import EngineCore
from quire.errors import BadRequest
from quire.kv.manager import KVManager
from quire.request import Request
from quire.sched.cost_table import CostTable
from quire.sched.costs import StepCosts
from quire.sched.scheduler import Scheduler
from quire.sched.stats import SchedStats
from quire.sim.clock import Clock, TimedRunner
from quire.sim.outside import NO_PLACES, OutsideCounts, Places, SimTiers
from quire.sim.shared import shared_context
from quire.step import TokenEvent

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class SimEngine:
    """What an engine of this table would be, unless told otherwise."""

    costs: CostTable
    sched: SchedConfig
    num_pages: int
    prefix_caching: bool = True
    places: Places = NO_PLACES  # besides the pool

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
    outside: OutsideCounts


class Node:
    """An engine at work. Its clock is where its host is: further on than the world's in a step."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine, facts = engine, engine.costs.engine
        self.clock = Clock()
        self.kv = KVManager(
            engine.num_pages, facts.page_size, engine.prefix_caching, facts.windows or (None,)
        )
        steps = engine.costs.prompts
        self._tiers = self._connected(steps)
        shared = partial(shared_context, kv=self.kv) if facts.device != CPU else None
        self._runner = TimedRunner(engine.costs, self.clock, self._tiers, shared)
        times = steps if engine.sched.target_gap_ms else None
        self._scheduler = Scheduler(engine.sched, self.kv, self.clock, times)
        self._core = EngineCore(self._scheduler, self._runner, facts.overlaps + facts.stages - 1)
        if self._tiers is not None:
            self._core.on_step = _not_told  # so that the last pages are saved too

    def _connected(self, steps: StepCosts) -> SimTiers | None:
        facts, places = self.engine.costs.engine, self.engine.places
        if not places.is_any:
            return None
        if not (self.engine.prefix_caching and facts.token_bytes):
            raise BadRequest(
                "pages outside the pool need the prefix cache and costs that know the bytes of a"
                " token; measure them anew with 'quire bench costs'"
            )
        tiers = SimTiers(places, facts.token_bytes * facts.page_size, steps, self.clock)
        self.kv.connect(tiers)
        return tiers

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    @property
    def _only_waits(self) -> bool:
        """For pages on their way, and for nothing else."""
        scheduler = self._scheduler
        return len(scheduler.arrivals) > 0 and not scheduler.running and not len(scheduler.waiting)

    @property
    def ready_at(self) -> float:
        """When its next step begins, unless a request comes before."""
        if self._tiers is not None and self._only_waits:
            return max(self.clock.now, self._tiers.next_arrival())
        return self.clock.now

    def send(self, request: Request, now: float) -> None:
        if not self.has_work or self._only_waits:
            self.clock.move_to(now)
        self._core.add(request)

    def step(self) -> list[TokenEvent]:
        """The events happen at the clock's new time."""
        self.clock.move_to(self.ready_at)
        self.clock.move_to(self.clock.now + self._scheduler.seconds_held())
        return self._core.step()

    def run(self) -> NodeRun:
        outside = OutsideCounts() if self._tiers is None else self._tiers.counts
        return NodeRun(self._scheduler.stats(), self._runner.busy_s, outside)


def _not_told(num_tokens: int, seconds: float) -> None:
    """What a step took of the host's real time is nobody's business here."""
