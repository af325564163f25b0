"""What servers did before pages: each row of the batch owns one contiguous run of cache.

`ContiguousScheduler` emits the same plans for the same runner as the real scheduler, so a
comparison measures scheduling and memory, never another implementation of the model. A row's
reservation is max_model_len tokens, taken at admission and kept to the end: pages row * P + 1 and
on, which the runner reads like any others. For the real one see `sched/scheduler.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from quire.config import SchedConfig
from quire.request import NOT_RUNNING, Request, RequestId
from quire.sched.costs_in_use import CostsInUse
from quire.sched.finish import finish_of
from quire.sched.leftover import Leftover
from quire.sched.scheduler import NO_DRAFTS
from quire.sched.stats import Counts
from quire.step import Admission, Draft, PageWrite, StepPlan, StepResult, TokenEvent, Work


class CacheUse(NamedTuple):
    """The state of the cache: token slots reserved and used, and requests in the batch."""

    reserved: int
    used: int
    num_running: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    num_rows: int
    pages_per_row: int
    page_size: int

    @property
    def slots_per_row(self) -> int:
        return self.pages_per_row * self.page_size

    def writes(self, row: int) -> list[PageWrite]:
        first = 1 + row * self.pages_per_row  # page 0 is scratch
        return [PageWrite(row, column, first + column) for column in range(self.pages_per_row)]


class ContiguousScheduler:
    """Static batches, or continuous ones when a row is refilled as soon as it is free.

    In a static batch a finished row stays empty until the longest is done. It computes no padding
    meanwhile, as tensors of fixed shape would: that flatters this baseline.
    """

    def __init__(
        self, layout: RowLayout, max_model_len: int, *, refills: bool, keeps_cache: bool = True
    ) -> None:
        self.layout, self.max_model_len = layout, max_model_len
        self.refills, self.keeps_cache = refills, keeps_cache
        self.waiting: deque[Request] = deque()
        self.rows: list[Request | None] = [None] * layout.num_rows
        self._num_reserved = 0  # rows
        self.counts = Counts()  # nobody is ever preempted
        self.clock, self.leftover = time.monotonic, Leftover(SchedConfig())  # all are waited for
        self.costs: CostsInUse | None = None  # no step keeps a time

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or any(self.rows)

    def schedule(self, drafts: Mapping[RequestId, Draft] = NO_DRAFTS) -> StepPlan:
        assert not drafts, "no baseline verifies guesses"
        admissions: list[Admission] = []
        writes: list[PageWrite] = []
        if self.refills or not any(self.rows):
            for row, occupant in enumerate(self.rows):
                if occupant is None and self.waiting:
                    admissions.append(self._admit(row))
                    writes += self.layout.writes(row)
            self._num_reserved = sum(request is not None for request in self.rows)
        works = tuple(self._work(request) for request in self.rows if request is not None)
        return StepPlan(works, tuple(admissions), tuple(writes))

    def _admit(self, row: int) -> Admission:
        request = self.rows[row] = self.waiting.popleft()
        request.row = row
        tokens = request.tokens.tolist()
        return Admission(
            request.id, row, tokens, request.num_prompt, request.params, request.seed, ()
        )

    def _work(self, request: Request) -> Work:
        start = request.num_computed if self.keeps_cache else 0
        return Work(request.id, request.row, start, len(request.tokens) - start, sample=True)

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        events = []
        for work, tokens in zip(plan.works, result.sampled, strict=True):
            request = self.rows[work.row]
            assert request is not None and request.id == work.request_id
            request.num_computed = len(request.tokens)
            request.tokens.extend(tokens)
            finish = finish_of(request, self.max_model_len)
            if finish is not None:
                self.rows[work.row], request.row = None, NOT_RUNNING
            events.append(TokenEvent(request.id, tokens, finish.reason if finish else None))
        if self.refills or not any(self.rows):
            self._num_reserved = sum(request is not None for request in self.rows)
        return events

    def use(self) -> CacheUse:
        live = [request for request in self.rows if request is not None]
        if not self.keeps_cache:
            return CacheUse(0, 0, len(live))
        used = sum(request.num_computed for request in live)
        return CacheUse(self._num_reserved * self.layout.slots_per_row, used, len(live))
