"""DeviceTransfer: a plan's saves and loads where the pool is on a device, beside the steps.

    saved   the pieces of a page are gathered into a row (pool -> scratch), and rows copied to rooms
            of the host, both in a lane of their own behind the steps launched so far
    loaded  rows that were brought to the device before (`strip.py`), or are copied now, are
            scattered into pages, in the lane that computes
    raised  pages are gathered into rows of the strip, for an engine that maps it (`disagg/`)

The thread that steps waits for neither. A page that is being saved may get another holder: the step
that gives it away waits, on the device, until its copy is out. Buffers and rows are held here until
what reads them is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kv.tier_index import NOTHING_RAISED, Landing, PageStore, Raised, Stored, Wanted
from quire.memory.lanes import IntSender, Lanes
from quire.memory.pool import PagePool
from quire.memory.strip import Strip, as_tensor, runs
from quire.memory.transfer import T
from quire.step import PageLoad, PageSave, StepPlan

FEW_RUNS = 8  # of rows that lie together: each is copied without gathering it first


class Reading(NamedTuple):
    """Pages that are being copied out, until `mark`."""

    mark: Landing
    pages: frozenset[int]
    places: Sequence[object]  # that they are copied to


class Move(NamedTuple):
    """From a place of one page in some rows to a page of the pool."""

    source: int
    target: int


class DeviceTransfer:
    def __init__(
        self, pool: PagePool, store: PageStore, lanes: Lanes, strip: Strip, chunk: int
    ) -> None:
        """`chunk`: nodes that are gathered, or copied to the device, at a time."""
        self._pool, self._store, self._lanes, self._strip = pool, store, lanes, strip
        self._chunk, self._numbers = chunk, IntSender(pool.data.device)
        size = (chunk, strip.rows.shape[1])
        self._leaving, self._coming = strip.rows.new_zeros(size), strip.rows.new_zeros(size)
        self._reading: deque[Reading] = deque()
        self._loading: deque[tuple[Landing, Sequence[Stored]]] = deque()

    def rehearse(self) -> None:
        """Move page 0, whose content nobody reads, so that nothing is left to compile."""

        def copy() -> None:
            page, row = self._numbers.send([0]), self._as_pages(self._leaving[:1])[:1]
            self._pool.gather(page, row)
            self._pool.scatter(page, row)

        self._lanes.compute.do(copy)

    def around(self, plan: StepPlan, stage: Callable[[StepPlan], T]) -> T:
        self._forget()
        self.save(plan.saves)
        self._keep_from(plan)
        staged = stage(plan)
        self.load(plan.loads)
        return staged

    def _forget(self) -> None:
        while self._reading and self._reading[0].mark.is_over():
            self._reading.popleft()
        while self._loading and self._loading[0][0].is_over():
            self._loading.popleft()

    # ------------------------------------------------------------ saving

    def save(self, saves: Sequence[PageSave]) -> None:
        if not saves:
            return
        self._lanes.saving.after(self._lanes.compute.mark())
        for some in _chunks(saves, self._chunk):
            self._save_some(some)

    def _save_some(self, saves: Sequence[PageSave]) -> None:
        rooms = [room for _ in saves if (room := self._store.room()) is not None]
        pages = [page for save in saves[: len(rooms)] for page in save.pages]
        rows = self._leaving[: len(rooms)]  # [nodes, node_bytes]

        def copy() -> None:
            self._pool.gather(self._numbers.send(pages), self._as_pages(rows))
            for room, row in zip(rooms, rows.unbind(), strict=True):
                as_tensor(room).copy_(row, non_blocking=True)

        if not rooms:
            return
        self._lanes.saving.do(copy)
        mark = self._lanes.saving.mark()
        self._reading.append(Reading(mark, frozenset(pages), rooms))
        for save, room in zip(saves, rooms, strict=False):
            self._store.put(Wanted(save.key, save.tokens), room, mark)

    def raised(self, nodes: Sequence[Sequence[int]]) -> Raised:
        """Pages of the first of these nodes, gathered in rows of the strip behind the steps
        launched so far. Half of the strip is left to pages that come."""
        strip, size = self._strip, len(self._pool.groups)
        rows = strip.take_many(min(len(nodes), strip.num_free - len(strip.rows) // 2))
        if not rows:
            return NOTHING_RAISED
        pages = list(chain.from_iterable(nodes[: len(rows)]))
        indices = [row.index for row in rows]

        def copy() -> None:
            numbers = self._numbers.send(pages)
            for begin, end in runs(indices, indices):
                some = strip.rows[indices[begin] : indices[begin] + end - begin]
                self._pool.gather(numbers[begin * size : end * size], self._as_pages(some))

        strip.lane.after(self._lanes.compute.mark())
        strip.lane.do(copy)
        mark = strip.lane.mark()
        # Whoever uses these rows next does so in the same lane.
        self._reading.append(Reading(mark, frozenset(pages), ()))
        return Raised(rows, mark)

    def _keep_from(self, plan: StepPlan) -> None:
        """Nothing writes a page before its copy is out. Pages are written by the steps from the one
        on that puts them in a table, copies to them or loads them."""
        if not self._reading:
            return
        given = {write.page for write in plan.page_writes}
        given |= {copy.target for copy in plan.page_copies}
        given |= {load.page for load in plan.loads}
        for reading in self._reading:
            if not given.isdisjoint(reading.pages):
                self._lanes.compute.after(reading.mark)

    # ------------------------------------------------------------ loading

    def load(self, loads: Sequence[PageLoad]) -> None:
        if not loads:
            return
        size, here, loaded = len(self._pool.groups), list[Move](), list[Stored]()
        there: list[tuple[Stored, list[PageLoad]]] = []
        for key, parts in groupby(sorted(loads), attrgetter("key")):
            stored = self._store.get(key)
            loaded.append(stored)
            if stored.lifted is None:
                there.append((stored, list(parts)))
            else:
                first = stored.lifted.index * size
                here += [Move(first + part.group, part.page) for part in parts]
        self._scatter(self._strip.rows, sorted(here))
        for some in _chunks(there, self._chunk):
            self._bring([stored for stored, _ in some])
            moves = [
                Move(at * size + part.group, part.page)
                for at, (_, parts) in enumerate(some)
                for part in parts
            ]
            self._scatter(self._coming, moves)
        self._loading.append((self._lanes.compute.mark(), loaded))

    def _bring(self, nodes: Sequence[Stored]) -> None:
        """Copy nodes of the host to the first rows of `_coming`; the step waits on the device."""
        compute, loading = self._lanes.compute, self._lanes.loading
        loading.after(compute.mark())  # which may still read what was there before
        for node in nodes:
            if node.landing is not None and not node.landing.is_over():
                loading.after(node.landing)

        def copy() -> None:
            for row, node in zip(self._coming.unbind(), nodes, strict=False):
                assert node.data is not None, "neither in memory nor on the device"
                row.copy_(as_tensor(node.data), non_blocking=True)

        loading.do(copy)
        compute.after(loading.mark())

    def _scatter(self, rows: Tensor, moves: Sequence[Move]) -> None:
        """Pages of nodes that lie in these rows go where they are wanted."""
        if not moves:
            return
        sources, targets = map(list, zip(*moves, strict=True))
        together = list(runs(sources, sources))
        are_few = len(together) <= FEW_RUNS
        step = self._chunk * len(self._pool.groups)
        cuts = together if are_few else _cuts(len(sources), step)
        pages_of = self._as_pages(rows)

        def copy() -> None:
            numbers = self._numbers.send([*sources, *targets])
            chosen, pages = numbers.split(len(sources))
            for begin, end in cuts:
                if are_few:
                    found = pages_of[sources[begin] : sources[begin] + end - begin]
                else:
                    wide = pages_of.view(self._pool.widest)
                    found = wide.index_select(0, chosen[begin:end]).view(torch.uint8)
                self._pool.scatter(pages[begin:end], found)  # from [pages, page_bytes]

        self._lanes.compute.do(copy)

    def _as_pages(self, rows: Tensor) -> Tensor:
        """[nodes, node_bytes] -> [nodes * groups, page_bytes]."""
        return rows.view(-1, self._pool.page_bytes)


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


def _cuts(count: int, size: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]
