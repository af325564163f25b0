"""PoolPicture: the page pool as at most 4,096 numbers, one per cell of a grid.

A full look at a large pool would cost more than a step of a small model, because page tables are
Python lists. So this remembers what it converted last time and converts only what changed: the
tails of page tables that grew, and the stretches of the published list that are not the same
objects as before. It reads the page bookkeeping and never writes it; `kv/manager.py` owns that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.kv.allocator import SCRATCH_PAGE
from quire.kv.manager import KVManager
from quire.kv.prefix import Node
from quire.request import RequestId

MAX_CELLS = 4096
FREE, CACHED, SHARED = 0, -1, -2  # any other cell holds the id of the live request it belongs to
SHARED_RANK = np.iinfo(np.int64).max
STRETCH = 1024  # pages compared at once when looking for newly published or evicted ones

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Table:
    """A request's page table as it was seen last, and the same as an array."""

    pages: tuple[int, ...] = ()
    ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def update(self, pages: tuple[int, ...]) -> None:
        seen = len(self.pages)
        if pages == self.pages:
            return
        if pages[:seen] != self.pages:  # a page was copied before writing, or swapped for a twin
            seen = 0
        tail = np.fromiter(pages[seen:], np.int64, len(pages) - seen)
        self.ids = np.concatenate([self.ids[:seen], tail])
        self.pages = pages


class PoolPicture:
    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._tables: dict[RequestId, Table] = {}
        num_ids = len(kv.allocator.refs)
        self._stretches: list[list[Node | None]] = [[] for _ in range(0, num_ids, STRETCH)]
        self._published = np.zeros(num_ids, np.bool_)
        self.pages_per_cell = -(-kv.allocator.num_pages // MAX_CELLS)

    def cells(self, holdings: dict[RequestId, tuple[int, ...]]) -> list[int]:
        """One state per cell; a cell of several pages shows the most alive state among them."""
        ranks = self._ranks(holdings)[SCRATCH_PAGE + 1 :]
        if self.pages_per_cell > 1:
            starts = np.arange(0, len(ranks), self.pages_per_cell)
            ranks = np.maximum.reduceat(ranks, starts)
        states = np.where(ranks > 1, ranks - 1, -ranks)
        states[ranks == SHARED_RANK] = SHARED
        cells: list[int] = states.tolist()
        return cells

    def _ranks(self, holdings: dict[RequestId, tuple[int, ...]]) -> Ints:
        """How alive each page is: free 0, cached 1, owned by request k: k + 1, shared the most."""
        ranks = self._ranks_at_rest()
        tables = self._look_at_tables(holdings)
        if not tables:
            return ranks
        ids = np.concatenate([table.ids for table in tables.values()])
        lens = [len(table.ids) for table in tables.values()]
        ranks[ids] = np.repeat(np.fromiter(tables, np.int64, len(tables)) + 1, lens)
        ranks[np.bincount(ids, minlength=len(ranks)) > 1] = SHARED_RANK
        return ranks

    def _look_at_tables(self, holdings: dict[RequestId, tuple[int, ...]]) -> dict[RequestId, Table]:
        tables = {id: self._tables.get(id) or Table() for id in holdings}
        for id, pages in holdings.items():
            tables[id].update(pages)
        self._tables = tables
        return tables

    def _ranks_at_rest(self) -> Ints:
        """What each page would be if no request held it."""
        allocator = self._kv.allocator
        if allocator.num_cached and allocator.num_empty:
            self._look_at_published()
            return self._published.astype(np.int64)
        # All that is not live is in one state: no need to look at each page.
        return np.full(len(self._published), 0 if allocator.num_empty else 1, np.int64)

    def _look_at_published(self) -> None:
        node_of = self._kv.allocator.node_of
        for index, seen in enumerate(self._stretches):
            start = index * STRETCH
            nodes = node_of[start : start + STRETCH]
            if nodes != seen:  # nodes compare by identity: this is a quick look at pointers
                flags = bytes([node is not None for node in nodes])  # three times as fast as a list
                self._published[start : start + len(nodes)] = np.frombuffer(flags, np.bool_)
                self._stretches[index] = nodes
