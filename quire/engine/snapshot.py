"""Snapshots: what the engine is doing right now, as plain data for the page that watches it.

A snapshot has the pool as a grid, the folded prefix tree, the running requests as lanes with what
the last step fed them, and the head of the waiting line. The thread that steps calls it between
steps; it changes nothing. The two expensive pictures live in `obs/pool_picture.py` and
`obs/tree_picture.py`.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from quire.obs.pool_picture import PoolPicture
from quire.obs.tree_picture import TreePicture
from quire.request import Request, RequestId
from quire.step import StepPlan, Work

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

MAX_LANES = 256
MAX_WAITING = 64

Snapshot = dict[str, Any]  # JSON: numbers, strings, lists and dictionaries of them


class Snapshots:
    """Create one for the first watcher, drop it after the last.

    >>> snapshots = Snapshots(core)                                             # doctest: +SKIP
    >>> snapshots.observe(plan, seconds=0.014)                                  # doctest: +SKIP
    >>> snapshots.take()["pool"]["cells"]                                       # doctest: +SKIP
    """

    def __init__(self, core: EngineCore) -> None:
        self._scheduler = core.scheduler
        self._pool = PoolPicture(core.scheduler.kv)
        self._tree = TreePicture(core.scheduler.kv)
        self._works: tuple[Work, ...] = ()
        self._step_seconds = 0.0

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Remember a step that was launched or settled: what it fed, how long it took."""
        self._works, self._step_seconds = plan.works, seconds

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
        }

    def _lanes(self, holdings: dict[RequestId, tuple[int, ...]]) -> list[dict[str, int | str]]:
        works = {work.request_id: work for work in self._works}
        running = islice(self._scheduler.running.values(), MAX_LANES)
        return [_lane(r, works.get(r.id), len(holdings[r.id])) for r in running]


def _lane(request: Request, work: Work | None, num_pages: int) -> dict[str, int | str]:
    """A running request and its share of the last step; called for each of a full batch."""
    num_prompt, num_tokens = request.num_prompt, len(request.tokens)
    if work is not None:
        fed, is_decode = work.num_tokens, work.start >= num_prompt and work.num_tokens == 1
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
        "kind": "decode" if is_decode else "prefill",  # outputs computed again are a prefill too
        "cached": request.num_cached,
        "pages": num_pages,
        "priority": request.priority,
        "preempted": request.num_preempted,
    }


def _waiting(request: Request, now: float) -> dict[str, int | float]:
    return {
        "id": request.id,
        "prompt": request.num_prompt,
        "waited_s": round(max(0.0, now - request.timing.arrival), 3),
        "priority": request.priority,
    }
