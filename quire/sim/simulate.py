"""simulate: the real scheduler and page bookkeeping under a load, on a device of measured times.

What is simulated is the device alone: who runs, which pages are shared, who is preempted and when a
prompt is cut into chunks are decided by the code that decides it in an engine. So a prediction is
as good as the cost table and the workload.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from quire.bench.serve.client import Outcome
from quire.bench.serve.work import Ask
from quire.config import SchedConfig
from quire.engine.core import EngineCore
from quire.errors import BadRequest
from quire.kv.manager import KVManager
from quire.params import SamplingParams
from quire.request import Request
from quire.sched.cost_table import CostTable
from quire.sched.costs import StepCosts
from quire.sched.scheduler import Scheduler
from quire.sched.stats import SchedStats
from quire.sim.clock import Clock, TimedRunner


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
        )
        return SimEngine(costs, sched, facts.num_pages)


@dataclass(frozen=True, slots=True)
class Simulated:
    outcomes: list[Outcome]
    stats: SchedStats
    busy_s: float  # of the device
    seconds: float

    @property
    def utilisation(self) -> float:
        return self.busy_s / self.seconds if self.seconds else 0.0


def simulate(engine: SimEngine, asks: Sequence[Ask], clients: int | None = None) -> Simulated:
    """`clients`: so many send one request behind another; None: each is sent when it is meant."""
    return _Run(engine, asks, clients).all()


class _Run:
    def __init__(self, engine: SimEngine, asks: Sequence[Ask], clients: int | None) -> None:
        facts = engine.costs.engine
        self.clock, self.max_len = Clock(), engine.sched.max_model_len
        self.runner = TimedRunner(engine.costs, self.clock)
        kv = KVManager(
            engine.num_pages, facts.page_size, engine.prefix_caching, facts.windows or (None,)
        )
        times = None
        if engine.sched.target_gap_ms:
            times = StepCosts(engine.costs.tokens, engine.costs.times)
        self.scheduler = Scheduler(engine.sched, kv, self.clock, times)
        self.core = EngineCore(self.scheduler, self.runner, facts.overlaps)
        self.asks, self.words = asks, dict[str, int]()
        self.outcomes = [Outcome(ask.at) for ask in asks]
        first = len(asks) if clients is None else min(clients, len(asks))
        self.due = [(asks[i].at if clients is None else 0.0, i) for i in range(first)]
        heapq.heapify(self.due)
        self.unsent = list(range(first, len(asks)))[::-1]

    def all(self) -> Simulated:
        while self.due or self.core.has_work:
            if not self.core.has_work:
                self.clock.move_to(self.due[0][0])
            while self.due and self.due[0][0] <= self.clock.now:
                self._send(*heapq.heappop(self.due))
            self.clock.move_to(self.clock.now + self.scheduler.seconds_held())
            for event in self.core.step():
                outcome = self.outcomes[event.request_id]
                if event.tokens:
                    outcome.token_times.append(self.clock.now)
                    outcome.num_output += len(event.tokens)
                if event.finish is not None:
                    outcome.ended = self.clock.now
                    if self.unsent:
                        heapq.heappush(self.due, (self.clock.now, self.unsent.pop()))
        seconds = max((outcome.ended for outcome in self.outcomes), default=0.0)
        return Simulated(self.outcomes, self.scheduler.stats(), self.runner.busy_s, seconds)

    def _send(self, at: float, index: int) -> None:
        ask, outcome = self.asks[index], self.outcomes[index]
        prompt = self._ids(ask.prompt)
        if len(prompt) + ask.num_output > self.max_len:
            raise BadRequest(
                f"request {index} has {len(prompt)} + {ask.num_output} tokens, the engine takes"
                f" {self.max_len}; shorten it, or measure costs with a larger --max-model-len"
            )
        outcome.meant = outcome.sent = at
        outcome.num_prompt = len(prompt)
        params = SamplingParams(temperature=0.0, max_tokens=ask.num_output, ignore_eos=True)
        self.core.add(Request.new(index, prompt, params, arrival=at))

    def _ids(self, text: str) -> list[int]:
        """A token for each word, so that prompts share what their words share."""
        return [self.words.setdefault(word, 2 + len(self.words)) for word in text.split(" ")]
