"""A scheduler with real page bookkeeping, the page-content runner and a clock the test owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.config import SchedConfig
from quire.engine.core import EngineCore
from quire.kv.check import check
from quire.kv.manager import KVManager
from quire.params import SamplingParams
from quire.request import Request
from quire.sched.costs import StepCosts
from quire.sched.scheduler import Scheduler
from quire.step import StepPlan, StepResult, TokenEvent
from tests.doubles import PageContentRunner, oracle_next


def expected(request: Request, count: int) -> list[int]:
    """What the page-content runner's model answers, without any engine."""
    tokens = request.tokens[: request.num_prompt].tolist()
    for _ in range(count):
        tokens.append(oracle_next(tokens, request.seed))
    return tokens[request.num_prompt :]


@dataclass
class Ready:
    """A launched step whose result the recording runner looked at already."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class Case:
    """`num_pages` are the pages that can be handed out in each home; the scratch page comes on
    top."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        overlap: bool = False,
        caching: bool = True,
        windows: tuple[int | None, ...] = (None,),
        costs: StepCosts | None = None,
        num_homes: int = 1,
        **sched: Any,
    ) -> None:
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
        self.config = SchedConfig(**{**limits, **sched})
        self.now = 0.0
        self.kv = KVManager(num_pages + 1, page_size, caching, windows, None, num_homes)
        columns = -(-self.config.max_model_len // page_size)
        self.runner = PageContentRunner(
            num_homes * num_pages + 1, page_size, self.config.max_num_seqs, columns, windows
        )
        self.scheduler = Scheduler(self.config, self.kv, lambda: self.now, costs)
        self.core = EngineCore(self.scheduler, self, overlap)
        self.plans: list[StepPlan] = []
        self.events: list[TokenEvent] = []
        self._next_id = 0

    # ------------------------------------------------------------ as a Runner

    def execute(self, plan: StepPlan) -> Ready:
        self.plans.append(plan)
        return Ready(self.runner.execute(plan).result())

    # ------------------------------------------------------------ driving

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        n: int = 1,
        eos_ids: Sequence[int] = (),
        priority: int = 0,
        salt: str = "",
        tenant: str = "",
        weight: float = 1.0,
        arrival: float | None = None,
        **params: Any,
    ) -> Request:
        family = []
        for index in range(n):
            self._next_id += 1
            family.append(
                Request.new(
                    self._next_id,
                    prompt,
                    SamplingParams(max_tokens=max_tokens, **params),
                    eos_ids=eos_ids,
                    priority=priority,
                    cache_salt=salt,
                    seed=index,
                    arrival=self.now if arrival is None else arrival,
                )
            )
        for request in family:
            request.tenant, request.weight = tenant, weight
        family[0].children = family[1:]
        return family[0]

    def add(self, prompt: Sequence[int], max_tokens: int = 4, **more: Any) -> Request:
        request = self.request(prompt, max_tokens, **more)
        self.core.add(request)
        return request

    def step(self) -> list[TokenEvent]:
        events = self.core.step()
        self.events += events
        check(self.kv)
        return events

    def abort(self, id: int) -> list[TokenEvent]:
        events = self.core.abort(id)
        self.events += events
        check(self.kv)
        return events

    def run(self, max_steps: int = 2000) -> None:
        """To the end; fails when that does not come."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"no end after {max_steps} steps")

    # ------------------------------------------------------------ looking

    def finishes(self, id: int) -> list[str]:
        return [e.finish for e in self.events if e.request_id == id and e.finish is not None]

    @property
    def last_plan(self) -> StepPlan:
        return self.plans[-1]

    def fed(self, plan: StepPlan | None = None) -> dict[int, int]:
        """Request id -> tokens it feeds in a plan, the last one unless given."""
        works = (self.last_plan if plan is None else plan).works
        return {work.request_id: work.num_tokens for work in works}

    def assert_all_returned(self) -> None:
        assert self.kv.allocator.num_live == 0
        assert self.kv.holdings() == {}
        assert len(self.scheduler._free_rows) == self.config.max_num_seqs
        assert self.scheduler._parents == {}
        assert self.scheduler.waiting.num_tokens == 0
