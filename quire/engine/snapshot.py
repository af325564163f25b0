"""Snapshots: what the engine is doing right now, as plain data for the page that watches it.

A snapshot has the pool as a grid, the folded prefix tree, the running requests as lanes with what
the last step fed them, the head of the waiting line, and how full the places outside the pool are.
The thread that steps calls it between steps; it changes nothing. The two expensive pictures live in
`obs/pool_picture.py` and `obs/tree_picture.py`.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.obs.pool_picture import PoolPicture
from quire.obs.tree_picture import TreePicture
from quire.request import Request, RequestId
from quire.sched.stats import SchedStats
from quire.spec.jumps import Jumps
from quire.spec.speculation import Speculation
from quire.step import StepPlan, Work
from quire.tiers.picture import places_of
from quire.tiers.tiers import Tiers

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

MAX_LANES = 256
MAX_WAITING = 64


class Guesses(NamedTuple):
    """Drafts of one request in one step."""

    drafted: int
    accepted: int


NO_GUESSES = Guesses(0, 0)
Snapshot = dict[str, Any]  # JSON: numbers, strings, lists and dictionaries of them


class Snapshots:
    """Create one for the first watcher, drop it after the last.

    >>> snapshots = Snapshots(core)                                             # doctest: +SKIP
    >>> snapshots.observe(plan, seconds=0.014)                                  # doctest: +SKIP
    >>> snapshots.take()["pool"]["cells"]                                       # doctest: +SKIP
    """

    def __init__(self, core: EngineCore, tiers: Tiers | None = None) -> None:
        self._scheduler, self._drafts, self._tiers = core.scheduler, core.drafts, tiers
        self._pool = PoolPicture(core.scheduler.kv)
        self._tree = TreePicture(core.scheduler.kv)
        self._works: tuple[Work, ...] = ()
        self._step_seconds = 0.0
        self._accepted: dict[RequestId, int] = {}  # totals of requests that had drafts before
        self._guesses: dict[RequestId, Guesses] = {}  # what became of those of the last step

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Remember a step that was launched or settled: what it fed, how long it took."""
        self._works, self._step_seconds = plan.works, seconds
        totals: dict[RequestId, int] = {}
        self._guesses = {}
        for work in plan.works:
            request = self._scheduler.running.get(work.request_id)
            if request is None or not request.num_drafted:
                continue
            totals[request.id] = request.num_accepted
            is_first = request.num_drafted == work.num_drafts
            before = self._accepted.get(request.id, 0 if is_first else None)
            if work.num_drafts and before is not None:  # None: seen for the first time
                self._guesses[request.id] = Guesses(work.num_drafts, request.num_accepted - before)
        self._accepted = totals

    def take(self) -> Snapshot:
        """The picture of this moment."""
        scheduler = self._scheduler
        kv, config, now = scheduler.kv, scheduler.config, scheduler.clock()
        holdings = kv.holdings()
        stats = scheduler.stats()
        return {
            "t": round(now, 3),
            "step": stats.num_steps,
            "step_ms": round(self._step_seconds * 1000, 3),
            "pool": {
                "page_size": kv.page_size,
                "num_pages": kv.allocator.num_pages,
                "pages_per_cell": self._pool.pages_per_cell,
                "windows": list(kv.windows),  # by layer group, each with pages of its own
                "cells": self._pool.cells(holdings),
            },
            "tree": self._tree.rows(),
            "lanes": self._lanes(holdings),
            "waiting": [_waiting(r, now) for r in islice(scheduler.waiting, MAX_WAITING)],
            "num_waiting": len(scheduler.waiting),
            "limits": {
                "max_num_seqs": config.max_num_seqs,
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "max_model_len": config.max_model_len,
            },
            "counts": stats.as_dict(),
            "spec": self._speculation(stats),
            "places": [] if self._tiers is None else places_of(self._tiers),
        }

    def _speculation(self, stats: SchedStats) -> dict[str, Any] | None:
        if not isinstance(self._drafts, Speculation | Jumps):
            return None
        counts = self._drafts.counts
        if isinstance(self._drafts, Jumps) and not counts.num_runs:
            return None  # nothing to watch
        pairs = zip(counts.accepted_at, counts.drafted_at, strict=True)
        return {
            "proposer": self._drafts.name,
            "drafted": stats.num_drafted_tokens,
            "accepted": stats.num_accepted_tokens,
            "seconds": round(counts.seconds, 3),  # of the host, on making them
            "by_position": [round(accepted / drafted, 4) for accepted, drafted in pairs],
        }

    def _lanes(self, holdings: dict[RequestId, tuple[int, ...]]) -> list[dict[str, int | str]]:
        works = {work.request_id: work for work in self._works}
        running = islice(self._scheduler.running.values(), MAX_LANES)
        guesses, pages = self._guesses, holdings
        return [
            _lane(r, works.get(r.id), guesses.get(r.id, NO_GUESSES), len(pages[r.id]))
            for r in running
        ]


def _lane(
    request: Request, work: Work | None, guesses: Guesses, num_pages: int
) -> dict[str, int | str]:
    """A running request and its share of the last step; called for each of a full batch."""
    num_prompt, num_tokens = request.num_prompt, len(request.tokens)
    if work is not None:
        # A refused guess was fed for nothing: it is no part of the request.
        fed = work.num_tokens - guesses.drafted + guesses.accepted
        is_decode = work.start >= num_prompt and work.num_tokens - work.num_drafts == 1
    else:  # left out of the last step: named after what it would do next
        fed, is_decode = 0, num_tokens > num_prompt and request.num_to_feed <= 1
    return {
        "id": request.id,
        "row": request.row,
        "prompt": num_prompt,
        "computed": request.num_computed,
        "known": num_tokens + request.num_pending,
        "output": num_tokens - num_prompt,
        "fed": fed,
        "drafted": guesses.drafted,  # in the last step
        "accepted": guesses.accepted,
        "kind": "decode" if is_decode else "prefill",  # outputs computed again are a prefill too
        "cached": request.num_cached,
        "pages": num_pages,
        "priority": request.priority,
        "preempted": request.num_preempted,
        "adapter": request.adapter_name,
    }


def _waiting(request: Request, now: float) -> dict[str, int | float]:
    return {
        "id": request.id,
        "prompt": request.num_prompt,
        "waited_s": round(max(0.0, now - request.timing.arrival), 3),
        "priority": request.priority,
    }
