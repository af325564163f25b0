"""PageTransfer: a plan's saves and loads, between the pool and pieces of bytes.

A node's bytes are its pages one after the other, by layer group, each as the pool lays it out:
codes with their scales, latents, floats. Here the pool is in memory of the host, and they are
copied here and now, at the speed of memory; whatever takes longer (checksums, disks) is done behind
the store's `put`. `device_transfer.py` is for pools on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Protocol, TypeVar

from quire.kv.tier_index import PageStore, Wanted
from quire.memory.pool import PagePool
from quire.step import PageLoad, PageSave, StepPlan

T = TypeVar("T")


class Transfer(Protocol):
    def around(self, plan: StepPlan, stage: Callable[[StepPlan], T]) -> T:
        """A plan's saves, then what `stage` does to the pool (copies of pages), then its loads."""
        ...


class PageTransfer:
    def __init__(self, pool: PagePool, store: PageStore) -> None:
        self._pool, self._store = pool, store

    def around(self, plan: StepPlan, stage: Callable[[StepPlan], T]) -> T:
        self.save(plan.saves)
        staged = stage(plan)
        self.load(plan.loads)
        return staged

    def save(self, saves: Sequence[PageSave]) -> None:
        for save in saves:
            data = self._pool.export(save.pages, self._store.room())
            self._store.put(Wanted(save.key, save.tokens), data)

    def load(self, loads: Sequence[PageLoad]) -> None:
        size = self._pool.page_bytes
        for key, parts in groupby(sorted(loads), attrgetter("key")):
            stored = self._store.get(key).data
            assert stored is not None, "the pool and its pages are in memory"
            data = memoryview(stored)
            for part in parts:
                self._pool.adopt(part.page, data[part.group * size : (part.group + 1) * size])
