"""Jumps: drafts of what grammars force, where no method drafts (jump-forward).

A request without a grammar gets none, and an engine in which nobody has a grammar pays the length
of a dictionary for each step. Nothing is weighed: what is forced would be fed anyway, a token a
step, so a right draft costs no row more. Where another spelling keeps proving them wrong, a request
is looked at rarely (`looks.py`). With a method, `forced.py` is the first of its proposers instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from quire.request import Request, RequestId
from quire.sched.scheduler import Scheduler
from quire.spec.looks import Looks
from quire.spec.speculation import SpecCounts
from quire.step import Draft, StepPlan, TokenEvent, Took

FEW = 16  # requests that are remembered whether they are there or not
MOST = 16  # drafts of a request in a step, as many as an n-gram's


class Grammars(Protocol):
    """What requests under way must follow."""

    def has_any(self) -> bool: ...

    def forced(self, request_id: RequestId) -> Sequence[int]:
        """Tokens that must come next; waits for what was drawn last."""
        ...

    def forced_so_far(self, request_id: RequestId) -> Sequence[int]:
        """Behind the tokens that are known here, which may lack those in flight: no wait."""
        ...


class Jumps:
    name = "grammar"

    def __init__(self, grammars: Grammars) -> None:
        self.counts = SpecCounts()
        self._grammars = grammars
        self._looks: dict[RequestId, Looks] = {}
        self._step = 0

    def awaits_results(self, scheduler: Scheduler) -> bool:
        """Only for tokens that are known to be forced behind those in flight."""
        if scheduler.config.waits_for_draws or not self._grammars.has_any():
            return False
        return any(
            request.num_pending < len(self._grammars.forced_so_far(request.id))
            for request in self._asked(scheduler, self._step + 1)
            if request.num_pending
        )

    def make(self, scheduler: Scheduler) -> dict[RequestId, Draft]:
        self._step += 1
        if not self._grammars.has_any():
            self._looks.clear()
            return {}
        if len(self._looks) > 2 * len(scheduler.running) + FEW:  # nobody tells of aborts
            self._looks = {id: x for id, x in self._looks.items() if id in scheduler.running}
        begun, made = time.perf_counter(), dict[RequestId, Draft]()
        for request in self._asked(scheduler, self._step):
            most = min(_most(request), scheduler.max_drafts(request))
            if request.num_pending or request.num_to_feed != 1 or most <= 0:
                continue
            if tokens := tuple(self._grammars.forced(request.id)[:most]):
                made[request.id] = Draft(len(tokens), tokens)
        seconds = time.perf_counter() - begun
        self.counts.seconds += seconds
        for id in made:
            scheduler.running[id].draft_seconds += seconds / len(made)
        return made

    def _asked(self, scheduler: Scheduler, step: int) -> Iterator[Request]:
        for id, request in scheduler.running.items():
            if request.params.structured_outputs is not None and _most(request):
                looks = self._looks.get(id)
                if looks is None or looks.is_due(step):
                    yield request

    def marked(self, plan: StepPlan) -> StepPlan:
        """No model reads what a step leaves."""
        return plan

    def learn(self, plan: StepPlan, events: Sequence[TokenEvent], took: Took) -> None:
        for event in events:
            if event.num_drafted:
                self.counts.add(event.num_drafted, event.num_accepted)
                looks = self._looks.setdefault(event.request_id, Looks())
                (looks.hit if event.num_accepted else looks.wrong)()
            if event.finish is not None:
                self._looks.pop(event.request_id, None)


def _most(request: Request) -> int:
    asked = request.params.num_speculative_tokens
    return MOST if asked is None else min(asked, MOST)
