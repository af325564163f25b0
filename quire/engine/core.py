"""EngineCore: the loop. One step is three calls: schedule, execute, commit.

With `overlap` the same calls run with a step of lag, or several: step n + 1 is planned and launched
before the result of step n is looked at, so the device never waits for Python. The scheduler counts
what is in flight; this file only decides when a result is settled. A request with a grammar first
waits in `grammar/pending.py` until the grammar is compiled, then one with an adapter in
`lora/adapters.py` until there is room for that. Drafts (`spec/`), where there are any, are made
before a step is planned. They follow tokens that are known, so while drafts are worth their while
results in flight are awaited first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from quire.errors import NotSupported
from quire.grammar.pending import GrammarQueue
from quire.kv.check import check
from quire.lora.adapters import Adapters
from quire.request import Request, RequestId
from quire.sched.scheduler import NO_DRAFTS, Scheduler
from quire.spec.speculation import Drafts
from quire.step import Pending, Runner, StepPlan, StepResult, TokenEvent, Took

ARRIVAL_NAP_S = 0.001  # the same, at most, for pages on their way
COMPILE_NAP_S = 0.005  # how long a step with nothing else to do waits for a grammar

OnStep = Callable[[int, float], None]  # tokens of a step, and its seconds


class InFlight(NamedTuple):
    plan: StepPlan
    pending: Pending
    begun: float  # by the scheduler's clock


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        overlap: int,
        grammars: GrammarQueue | None = None,
        drafts: Drafts | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.scheduler, self.runner, self.grammars = scheduler, runner, grammars
        self.drafts, self.adapters = drafts, adapters
        self.lag = int(overlap)  # most steps launched whose results nobody has looked at
        self.last_plan = StepPlan()  # for whoever watches
        self.on_step: OnStep | None = None  # where pages are kept outside the pool
        self.nap: Callable[[float], object] = time.sleep  # likewise, until some of them are here
        self._inflight: deque[InFlight] = deque()
        self._settled_at = 0.0  # by the scheduler's clock
        self._news: list[TokenEvent] = []  # settled before a step that may have failed since
        self._num_preempted = 0  # so far, as the last step saw it

    def add(self, request: Request) -> None:
        if request.params.structured_outputs is not None and self.grammars is None:
            raise NotSupported("structured outputs need a tokenizer, and this engine has none")
        if request.adapter_name:
            if self.adapters is None:
                raise NotSupported(f"got adapter {request.adapter_name!r}, this engine takes none")
            self.adapters.bind(request)
        if request.params.structured_outputs is None:
            self._pass_on(request)
        else:
            assert self.grammars is not None
            self.grammars.submit(request)

    def _pass_on(self, request: Request) -> None:
        """A request whose grammar is compiled."""
        if request.adapter_name:
            assert self.adapters is not None
            self.adapters.enter(request)
        else:
            self.scheduler.add(request)

    def abort(self, request_id: RequestId, reason: str = "abort") -> list[TokenEvent]:
        events = self.scheduler.abort(request_id, reason)
        if self.grammars is not None:
            events = events or self.grammars.abort(request_id, reason)
            self.grammars.drop(request_id)
        if self.adapters is not None:
            events = events or self.adapters.abort(request_id, reason)
            self.adapters.leave(request_id)
        return events

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._inflight or self._news) or self._has_held

    @property
    def _has_held(self) -> bool:
        """Whether requests wait for something else than their turn."""
        return self._is_compiling or (self.adapters is not None and len(self.adapters) > 0)

    def waiting(self) -> Iterator[Request]:
        """All that wait, for whatever; siblings that share a leader's prompt are its children."""
        yield from self.scheduler.waiting
        if self.grammars is not None:
            yield from self.grammars.waiting()
        if self.adapters is not None:
            yield from self.adapters.waiting()

    @property
    def _is_compiling(self) -> bool:
        return self.grammars is not None and len(self.grammars) > 0

    def step(self) -> list[TokenEvent]:
        """Launch at most one step and settle those that are due. May return no events."""
        begun, drafts = time.perf_counter(), NO_DRAFTS
        if self.adapters is not None and len(self.adapters):
            self._news += self._collect(self.adapters)
        if self.drafts is not None:
            if self._inflight and self.drafts.awaits_results(self.scheduler):
                self._news += self._settle(len(self._inflight))
            drafts = self.drafts.make(self.scheduler)
        plan = self.scheduler.schedule(drafts)
        if self.drafts is not None:
            plan = self.drafts.marked(plan)
        launched = bool(plan.works)
        if launched:
            self.last_plan = plan
        if plan.has_effect:
            started = self.scheduler.clock()
            self._inflight.append(InFlight(plan, self.runner.execute(plan), started))
        if not launched and not self._inflight and not self._news:
            self._idle()
        events = self._news + self._settle(self._num_due(launched))
        self._news = []
        if self.on_step is not None:
            self._tend_tiers(self.on_step, plan, time.perf_counter() - begun)
        if self.grammars is not None:
            events += self._tend(self.grammars, events)
        if self.adapters is not None:
            for event in events:
                if event.finish is not None:
                    self.adapters.leave(event.request_id)
        return events

    def _collect(self, adapters: Adapters) -> list[TokenEvent]:
        """Who was recalled for somebody's adapter may come back in this very step: what is in
        flight of it must not be taken for results of its second run."""
        before = self.scheduler.counts.preempted
        events = adapters.collect(self.scheduler.add, self.scheduler.recall)
        if self.scheduler.counts.preempted != before:
            events += self._settle(len(self._inflight))
        return events

    def _settle(self, count: int) -> list[TokenEvent]:
        """Wait for the oldest steps in flight and enter their results."""
        events: list[TokenEvent] = []
        for _ in range(count):
            settled, pending, started = self._inflight.popleft()
            result = pending.result()
            took = self._learn(settled, result, started)
            news = self.scheduler.commit(settled, result)
            if result.is_given_up:
                self.last_plan = StepPlan()  # nothing of it happened
            elif self.drafts is not None:
                self.drafts.learn(settled, news, took)
            events += news
        return events

    def _learn(self, plan: StepPlan, result: StepResult, started: float) -> Took:
        """Of two steps in flight the second begins when the first has ended."""
        scheduler, now = self.scheduler, self.scheduler.clock()
        took = Took(now - max(started, self._settled_at), started >= self._settled_at)
        if plan.works and scheduler.leftover.is_used:
            scheduler.leftover.learn(plan.num_tokens, took.seconds, result.is_given_up)
        if plan.works and scheduler.costs is not None and not result.is_given_up:
            seconds = took.seconds if result.seconds is None else result.seconds
            scheduler.costs.learn(plan.num_tokens, seconds)
        self._settled_at = now
        return took

    def _num_due(self, launched: bool) -> int:
        """Of the steps in flight, how many results to wait for now."""
        if self.scheduler.counts.preempted != self._num_preempted:
            # Whoever lost its row comes back when the steps it was in are settled.
            self._num_preempted = self.scheduler.counts.preempted
            return len(self._inflight) - (self.lag > 0 and launched)
        if not launched:
            return min(1, len(self._inflight))
        return max(0, len(self._inflight) - self.lag)

    def _tend(self, grammars: GrammarQueue, events: list[TokenEvent]) -> list[TokenEvent]:
        """Forget matchers of requests that ended, and let in those whose grammar is ready."""
        if len(grammars.matchers):
            for event in events:
                if event.finish is not None:
                    grammars.drop(event.request_id)
        return grammars.collect(self._pass_on) if len(grammars) else []

    def _tend_tiers(self, tell: OnStep, plan: StepPlan, seconds: float) -> None:
        """Say how long a step took; save the last pages when nobody is left to plan a step for."""
        if plan.works:
            tell(plan.num_tokens, seconds)
        if not self.scheduler.has_work:
            self.save_now()

    def save_now(self) -> None:
        """Save pages that were published last, and do not wait for the next step."""
        saves, loads = self.scheduler.kv.take_transfers()
        assert not loads, "pages are loaded for nobody"
        if saves:
            self.runner.execute(StepPlan(saves=saves))

    def abandon(self) -> None:
        """Forget results in flight: a step was lost to an error."""
        self._inflight.clear()

    def _idle(self) -> None:
        """Nothing to launch: the batch window is open, a grammar compiles, or everyone has left."""
        if held := self.scheduler.seconds_held():
            time.sleep(min(held, 0.05))
        elif self.grammars is not None and self._is_compiling:
            self.grammars.wait(COMPILE_NAP_S)
        elif len(self.scheduler.arrivals):
            self.nap(ARRIVAL_NAP_S)
        elif not self.scheduler.has_work:
            check(self.scheduler.kv)
