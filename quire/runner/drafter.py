"""ModelDrafter: a model that writes drafts into the target's rows, drawn with the target's noise.

It is a runner of its own over the same rows, so its draws have the request's temperature, filters,
penalties, grammar and the noise of the very positions that the target will draw for: where both
models agree, so do their draws. A draft model has its own pages under the target's page numbers; an
early exit is the target's first layers on the target's pages. Stale pages cost acceptance only.
Where steps replay graphs, the few tokens that it lags behind are fed as neighbours of one row.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from quire.grammar.live import LiveMatchers
from quire.request import RequestId
from quire.runner.gather import StepShape
from quire.runner.rows import GRAMMAR, HIDDEN, LOGPROBS, RequestRows
from quire.runner.runner import ModelRunner
from quire.runner.states import StepStates
from quire.spec.speculation import SpecCounts
from quire.step import StepPlan, Work

FEW = 8  # tokens of a request that a graph of few tokens may be replayed for


def drafting_rows(rows: RequestRows, num_groups: int) -> RequestRows:
    """The same rows with fewer page tables, and wishes that a drafter need not fulfil left out."""
    made = copy.copy(rows)
    made.page_tables = rows.page_tables[:num_groups]
    return made


class ModelDrafter:
    def __init__(self, target: ModelRunner, runner: ModelRunner, max_tokens: int) -> None:
        """`runner` has rows from `drafting_rows`; it feeds at most `max_tokens` a step."""
        self.runner, self.max_tokens = runner, max_tokens
        self._target = target
        self._shares_pages = runner.pool is target.pool
        self.counts = SpecCounts()
        self._done: dict[int, int] = {}  # row -> positions whose keys and values are there

    def begin(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._done.pop(admission.row, None)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        if not self._shares_pages:
            self.runner.pool.copy(sources, targets)

    def fill(self, works: Sequence[Work]) -> None:
        begun = time.perf_counter()
        runner, rows = self.runner, self._target.rows
        runner.rows.needs = rows.needs & ~(LOGPROBS | HIDDEN)
        judged = [work.request_id for work in works if rows.needs[work.row] & GRAMMAR]
        if judged:
            self._target.masks.catch_up()
            fork_matchers(judged, self._target.matchers, runner.matchers)
        self._step([first for work in works for first in self._first(work)])
        for depth in range(1, max(work.num_drafts for work in works)):
            self._step(
                Work(work.request_id, work.row, work.start + depth, 1, True)
                for work in works
                if work.num_drafts > depth
            )
        for request_id in judged:
            runner.matchers.drop(request_id)
        for work in works:
            self._done[work.row] = work.start + work.num_drafts
        self.counts.seconds += time.perf_counter() - begun

    def keep(self, works: Sequence[Work], shape: StepShape, states: StepStates) -> None:
        """Tokens are all it needs."""

    def ahead(self) -> Iterator[Callable[[], object]]:
        """None: its graphs are captured when they come."""
        return iter(())

    def _first(self, work: Work) -> list[Work]:
        """What the drafter has not read of a request yet, its newest token included."""
        done = work.start if self._shares_pages else self._done.get(work.row, 0)
        start, end = min(done, work.start), work.start + 1
        while end - start > self.max_tokens:
            part = Work(work.request_id, work.row, start, self.max_tokens, False)
            self.runner.execute(StepPlan((part,)))
            start += self.max_tokens
        if self.runner.graphs is not None and end - start <= FEW:
            return [
                Work(work.request_id, work.row, at, 1, at == work.start) for at in range(start, end)
            ]
        return [Work(work.request_id, work.row, start, end - start, True)]

    def _step(self, works: Iterable[Work]) -> None:
        """In as few steps as their tokens allow."""
        batch: list[Work] = []
        num_tokens = 0
        for work in works:
            if num_tokens + work.num_tokens > self.max_tokens:
                self.runner.execute(StepPlan(tuple(batch)))
                batch, num_tokens = [], 0
            batch.append(work)
            num_tokens += work.num_tokens
        self.runner.execute(StepPlan(tuple(batch)))


def fork_matchers(
    request_ids: Iterable[RequestId], source: LiveMatchers, target: LiveMatchers
) -> None:
    """The same grammars, to be followed on their own."""
    for request_id in request_ids:
        matcher = source.get(request_id)
        if matcher is not None:
            target.add(request_id, matcher.fork())
