"""EngineCore: the loop. One step is three calls: schedule, execute, commit.

With `overlap` the same calls run with one step of lag: step n + 1 is planned and launched before
the result of step n is looked at, so the device never waits for Python. The scheduler counts
what is in flight; this file only decides when a result is settled.
"""

from __future__ import annotations

import time
from collections import deque

from quire.kv.check import check
from quire.request import Request, RequestId
from quire.sched.scheduler import Scheduler
from quire.step import Pending, Runner, StepPlan, TokenEvent


class EngineCore:
    def __init__(self, scheduler: Scheduler, runner: Runner, overlap: bool) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.lag = 1 if overlap else 0
        self._inflight: deque[tuple[StepPlan, Pending]] = deque()

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request_id: RequestId, reason: str = "abort") -> list[TokenEvent]:
        return self.scheduler.abort(request_id, reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._inflight)

    def step(self) -> list[TokenEvent]:
        """Launch at most one step and settle those that are due. May return no events."""
        plan = self.scheduler.schedule()
        launched = bool(plan.works)
        if launched or plan.page_writes or plan.page_copies:
            self._inflight.append((plan, self.runner.execute(plan)))
        if not launched and not self._inflight:
            self._idle()
            return []
        events: list[TokenEvent] = []
        while len(self._inflight) > (self.lag if launched else 0):
            settled, pending = self._inflight.popleft()
            events += self.scheduler.commit(settled, pending.result())
        return events

    def abandon(self) -> None:
        """A step was lost to an error: results still in flight belong to nobody."""
        self._inflight.clear()

    def _idle(self) -> None:
        """Nothing to launch: the batch window is still open, or every request has left."""
        if held := self.scheduler.seconds_held():
            time.sleep(min(held, 0.05))
        elif not self.scheduler.has_work:
            check(self.scheduler.kv)
