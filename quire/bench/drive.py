"""drive: push jobs through a core and note when each token came and how full the cache was."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from quire.bench.baselines import CacheUse
from quire.bench.offline import greedy
from quire.bench.workload import Job
from quire.engine.core import EngineCore
from quire.request import Request
from quire.sched.scheduler import Scheduler


@dataclass(slots=True)
class Run:
    """What happened. Times in seconds since the start, when all jobs arrived."""

    seconds: float = 0.0
    num_steps: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)  # index of the job -> tokens
    token_times: dict[int, list[float]] = field(default_factory=dict)
    looks: list[CacheUse] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs.values()))

    @property
    def ttfts(self) -> list[float]:
        return [times[0] for times in self.token_times.values()]

    @property
    def gaps(self) -> list[float]:
        """Pauses between one token of a request and its next."""
        return [
            later - sooner
            for times in self.token_times.values()
            for sooner, later in pairwise(times)
        ]

    @property
    def peak_running(self) -> int:
        return max((look.num_running for look in self.looks), default=0)

    @property
    def peak_reserved(self) -> CacheUse:
        return max(self.looks, default=CacheUse(0, 0, 0))

    @property
    def waste(self) -> float | None:
        """Share of the reserved slots that held nothing, over the whole run."""
        reserved = sum(look.reserved for look in self.looks)
        return 1 - sum(look.used for look in self.looks) / reserved if reserved else None


def drive(core: EngineCore, jobs: Sequence[Job], look: Callable[[], CacheUse]) -> Run:
    run = Run()
    start = time.monotonic()
    for index, job in enumerate(jobs):
        request = Request.new(index, job.prompt, greedy(job.num_output), arrival=start)
        run.outputs[index], run.token_times[index] = [], []
        core.add(request)
    while core.has_work:
        events = core.step()
        now = time.monotonic() - start
        for event in events:
            if event.tokens:
                run.outputs[event.request_id].extend(event.tokens)
                run.token_times[event.request_id].append(now)
        run.num_steps += 1
        run.looks.append(look())
    run.seconds = time.monotonic() - start
    return run


def paged_use(scheduler: Scheduler) -> CacheUse:
    """The `CacheUse` of a page pool. A page that several requests share counts once."""
    stats = scheduler.stats()
    reserved = stats.pages_live * scheduler.kv.page_size
    return CacheUse(reserved, reserved - stats.slots_wasted, stats.num_running)
