"""Tiers: all that is outside the pool as one. Memory of the host in front, behind it a disk.

What is saved goes to memory and, in the background, to the disk; what is fetched is brought into
memory, where the step that loads it finds it, and from there to the device where the pool is on
one. Reading, writing and checking happen in threads of their own (`porter.py`), so that no step
waits for a disk. Nothing here knows of tensors: a node is a piece of bytes. `kv/transfers.py` is
the caller on the side of policy, `memory/transfer.py` on that of the pool.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict
from functools import partial

from quire.errors import TransferError
from quire.kv.tier_index import NOTHING_RAISED, Buffer, Landing, Lifted, Raised, Stored, Wanted
from quire.obs.log import log_event
from quire.request import RequestId
from quire.tiers.beside import Device, Raiser, Remote, Rooms
from quire.tiers.counts import TierCounts
from quire.tiers.disk import DiskShelf
from quire.tiers.in_order import in_order
from quire.tiers.memory import MemoryShelf
from quire.tiers.porter import Porter, Task
from quire.tiers.segment import Page
from quire.tiers.tempo import SURE_BYTES, Tempo

MAX_STAGED = 1 << 30  # bytes brought for requests that have not started
MAX_BACKLOG = 256 << 20  # bytes that wait to be written, or half of memory; more is not written
BATCH_BYTES = 4 << 20  # written at a time, and a node more
ITEM = 4  # bytes of a token id
WRITER = "writer"


class Tiers:
    def __init__(
        self,
        memory: MemoryShelf,
        disk: DiskShelf | None,
        tempo: Tempo,
        node_bytes: int,
        device: Device | None = None,
        rooms: Rooms | None = None,
    ) -> None:
        """`device`: where the pool is, unless it is in memory of the host: then `rooms`, if there
        are any, are what its pages are copied to."""
        self.memory, self.disk, self.tempo = memory, disk, tempo
        self.node_bytes, self.device, self._rooms = node_bytes, device, rooms
        self.counts = TierCounts()
        self._lock = threading.Lock()
        self._bringing: set[RequestId] = set()
        self._computing: set[RequestId] = set()  # who is sooner there without what memory has
        self._staged: dict[RequestId, int] = {}  # bytes brought for each
        self._backlog, self._max_backlog = 0, max(MAX_BACKLOG, memory.limit // 2)
        self._unwritten: deque[tuple[Wanted, Buffer, Landing | None]] = deque()
        self._reader, self._writer = Porter("kv-reader"), Porter("kv-writer")
        self._puller, self._lifter = Porter("kv-puller"), Porter("kv-lifter")
        self.remote: Remote | None = None
        self.raiser: Raiser | None = None  # where others read pages of this device
        self._arrived = threading.Event()
        self.on_brought: Callable[[RequestId], None] | None = None  # called by a thread
        self.close_others: Callable[[float], None] | None = None  # the tiers of other ranks

    # ------------------------------------------------------------ as TierIndex

    def has(self, key: bytes) -> bool:
        return key in self.memory or (self.disk is not None and key in self.disk)

    def fetch(self, owner: RequestId, wanted: Sequence[Wanted], source: str) -> bool:
        missing = [node for node in wanted if not self.memory.pin(owner, node)]
        if missing and source and self.remote is not None:
            asked = time.perf_counter()
            pull = partial(self._pull, self.remote, owner, missing, source, asked)
            return self._begin(self._puller, owner, pull)
        if missing and self.disk is not None:
            if self._is_worth(wanted, len(missing)):
                bring = partial(self._bring, self.disk, owner, missing, wanted)
                return self._begin(self._reader, owner, bring)
            self.counts.recomputed += 1
        return self.device is not None and self._begin_lift(owner, wanted)

    def _is_worth(self, wanted: Sequence[Wanted], num_missing: int) -> bool:
        """Of these nodes, so many are not in memory."""
        if self.device is None:  # what memory has costs nothing, and says nothing of the rest
            return self.tempo.is_worth(
                _tokens(wanted[-num_missing:]), num_missing * self.node_bytes
            )
        lifted = len(wanted) * self.node_bytes
        return self.tempo.is_worth(_tokens(wanted), num_missing * self.node_bytes, lifted)

    def _begin_lift(self, owner: RequestId, wanted: Sequence[Wanted]) -> bool:
        """Bring the first of these, which are in memory, to the device."""
        pinned = self.memory.pinned(owner, wanted)
        if not pinned:
            return False
        here = wanted[: len(pinned)]
        if not self.tempo.is_worth(_tokens(here), 0, len(here) * self.node_bytes):
            self.counts.recomputed += 1
            self._computing.add(owner)
            return False
        return self._begin(self._lifter, owner, partial(self._lift, owner, here))

    def _begin(self, porter: Porter, owner: RequestId, task: Task) -> bool:
        """Let a request wait for a task; however that ends, it waits no longer."""

        def bring() -> None:
            try:
                task()
            finally:
                with self._lock:
                    self._bringing.discard(owner)
                self._arrived.set()
                if self.on_brought is not None:
                    self.on_brought(owner)

        self._bringing.add(owner)
        porter.do(bring)
        return True

    def nap(self, seconds: float) -> None:
        """Until something was brought for somebody, and not longer than this."""
        self._arrived.wait(seconds)
        self._arrived.clear()

    def is_bringing(self, owner: RequestId) -> bool:
        return owner in self._bringing

    def pin(self, owner: RequestId, wanted: Wanted) -> bool:
        return owner not in self._computing and self.memory.pin(owner, wanted)

    def let_go(self, owner: RequestId) -> None:
        with self._lock:
            self._bringing.discard(owner)
            self._computing.discard(owner)
            self._staged.pop(owner, None)
            self.memory.let_go(owner)

    # ------------------------------------------------------------ as a PageStore

    def room(self) -> Buffer | None:
        if self.device is None:
            return None if self._rooms is None else self._rooms.take()
        room = self.device.rooms.take()
        self.counts.drops += room is None
        return room

    def put(self, node: Wanted, data: Buffer, landing: Landing | None = None) -> None:
        """Keep a node; the bytes are ours from now on."""
        self.counts.saves += 1
        disk = self.disk
        if disk is None:
            self.memory.put(node, data, None, "memory", landing)
        elif disk.is_paused or self._backlog + len(data) > self._max_backlog:
            self.counts.drops += 1
            self.memory.put(node, data, None, "memory", landing)
        else:
            self.memory.put(node, data, WRITER, "memory", landing)
            with self._lock:
                self._backlog += len(data)
            self._unwritten.append((node, data, landing))
            self._writer.do(partial(self._write, disk))

    def get(self, key: bytes) -> Stored:
        """The bytes of a node that some request has pinned."""
        kept, counts = self.memory.get(key), self.counts
        counts.loads_disk += kept.origin == "disk"
        counts.loads_memory += kept.origin == "memory"
        counts.loads_remote += kept.origin == "remote"
        counts.loaded_bytes += self.node_bytes
        kept.origin = "memory"  # for whoever comes next
        return kept.stored

    def offer(self, nodes: Sequence[Wanted], raised: Raised = NOTHING_RAISED) -> str:
        """A ticket for another engine; empty: there is nothing to read, or nobody may, or so much
        is lent already that memory is over its limit. `raised`: copies of them on the device."""
        is_full = self.memory.num_bytes > self.memory.limit  # all of it is held by somebody
        ticket = "" if self.remote is None or is_full else self.remote.offer(nodes, raised)
        self.counts.tickets += bool(ticket)
        return ticket

    # ------------------------------------------------------------ threads

    def _bring(
        self,
        disk: DiskShelf,
        owner: RequestId,
        missing: Sequence[Wanted],
        wanted: Sequence[Wanted],
    ) -> None:
        """Read a chain, up to what cannot be read or is computed sooner."""
        while self.is_bringing(owner) and sum(list(self._staged.values())) > MAX_STAGED:
            time.sleep(0.01)  # until one of those that wait has started
        begun, num_bytes, pages = time.perf_counter(), 0, self._read(disk, missing)
        for count, (node, data) in enumerate(zip(missing, pages, strict=False), 1):
            if data is None or not self._hand_over(owner, node, data):
                break
            num_bytes += len(data)
            if num_bytes >= SURE_BYTES:
                self.tempo.read(num_bytes, time.perf_counter() - begun)
                begun, num_bytes = time.perf_counter(), 0
                if count < len(missing) and not self._is_worth(
                    missing[count:], len(missing) - count
                ):
                    self.counts.recomputed += 1  # the rest
                    break
        pages.close()
        self.tempo.read(num_bytes, time.perf_counter() - begun)
        self.counts.bad = disk.num_bad
        self._lift(owner, wanted)

    def _read(
        self, disk: DiskShelf, nodes: Sequence[Wanted]
    ) -> Generator[Buffer | None, None, None]:
        """Their pages one after the other; a device is filled from several threads, since checking
        digests takes longer than reading."""
        if self.device is None:
            yield from (disk.read(node, self.room()) for node in nodes)
            return
        rooms = self.device.rooms
        yield from in_order(lambda node: disk.read(node, rooms.take()), nodes, "kv-check")

    def _pull(
        self,
        remote: Remote,
        owner: RequestId,
        wanted: Sequence[Wanted],
        ticket: str,
        asked: float,
    ) -> None:
        """The same from another engine, all of it or nothing."""
        try:
            pages = remote.pull(ticket, wanted, lambda: self.is_bringing(owner))
        except TransferError as error:
            self.counts.failed_pulls += 1
            log_event("kv_pull_failed", severity=logging.WARNING, reason=str(error))
            return
        if not self._hand_over_all(owner, wanted, pages):
            self._lift(owner, wanted)
        self.counts.pulls += 1
        self.counts.pull_seconds += time.perf_counter() - asked

    def _hand_over_all(
        self, owner: RequestId, wanted: Sequence[Wanted], pages: Sequence[Buffer | Lifted]
    ) -> bool:
        """Whether all of them are on the device, or nobody waits for them any more."""
        rows = [row for row in pages if not isinstance(row, (bytearray, memoryview))]
        if len(rows) == len(pages):
            with self._lock:
                if owner in self._bringing:
                    self.memory.put_lifted(wanted, rows, owner, "remote")
            return True
        for node, data in zip(wanted, pages, strict=False):
            if isinstance(data, (bytearray, memoryview)):
                if not self._hand_over(owner, node, self._locked(data), "remote"):
                    return True
            else:
                with self._lock:
                    if owner not in self._bringing:
                        return True
                    self.memory.put_lifted([node], [data], owner, "remote")
        return False

    def _locked(self, data: Buffer) -> Buffer:
        """The same bytes where a device can copy them from, if there is room."""
        if self.device is None or not isinstance(data, bytearray):
            return data
        room = self.device.rooms.take()
        if room is None:
            return data
        room[:] = data
        return room

    def _hand_over(
        self, owner: RequestId, node: Wanted, data: Buffer, origin: str = "disk"
    ) -> bool:
        """False: the request does not wait any more."""
        with self._lock:
            if owner not in self._bringing:
                return False
            self.memory.put(node, data, owner, origin)
            self._staged[owner] = self._staged.get(owner, 0) + len(data)
            return True

    def _lift(self, owner: RequestId, wanted: Sequence[Wanted]) -> None:
        """Bring what a request has in memory to the device, as far as there is room: the step that
        loads it copies the rest."""
        if self.device is not None and self.is_bringing(owner):
            nodes = self.memory.pinned(owner, wanted)
            nodes = [node for node in nodes if node.stored.lifted is None]
            if not nodes:
                return
            begun = time.perf_counter()
            rows = self.device.strip.bring([node.stored for node in nodes])
            seconds = time.perf_counter() - begun
            self.tempo.lifted(len(rows) * self.node_bytes, seconds)
            self.counts.lift_seconds += seconds
            self.memory.lift(owner, (node.key for node in nodes), rows)

    def _write(self, disk: DiskShelf) -> None:
        """Write some of what waits, the oldest first. Nothing may: an earlier turn took it all."""
        some: dict[bytes, Page] = {}
        num_bytes = 0
        while self._unwritten and num_bytes < BATCH_BYTES:
            node, data, landing = self._unwritten.popleft()
            if landing is not None:
                landing.wait()
            some[node.key] = (node, data)
            num_bytes += len(data)
        try:
            self._write_some(disk, [page for key, page in some.items() if key not in disk])
        finally:
            with self._lock:
                self._backlog -= num_bytes
            self.memory.let_go(WRITER, some)

    def _write_some(self, disk: DiskShelf, pages: Sequence[Page]) -> None:
        num_written = disk.write_many(pages)
        self.counts.writes += num_written
        self.counts.written_bytes += num_written * self.node_bytes
        self.counts.drops += len(pages) - num_written

    # ------------------------------------------------------------ end and looks

    def flush(self, seconds: float) -> bool:
        """Wait until all that was saved is written; False: it took too long."""
        if self.disk is None:
            return True
        self.disk.scribe.hurry()
        is_done = self._writer.wait(seconds)
        self.disk.scribe.take_time()
        return is_done

    def close(self, seconds: float = 5.0) -> None:
        """Write what waits to be written, as far as there is time, and give the folder back."""
        if self.close_others is not None:
            self.close_others(seconds)
        if self.disk is not None:
            self.disk.scribe.hurry()
        self._writer.close(seconds)
        self._reader.close(seconds)
        self._lifter.close(seconds)
        if self.remote is not None:
            self.remote.close()
        self._puller.close(0.1)
        if self.disk is not None:
            self.disk.close()
            self.disk = None
        if self.device is not None:
            self.device.rooms.close()

    def as_dict(self) -> dict[str, float]:
        disk_bytes = 0 if self.disk is None else self.disk.num_bytes
        held = {"memory_bytes": self.memory.num_bytes, "disk_bytes": disk_bytes}
        counts = asdict(self.counts) | held | {"backlog_bytes": self._backlog}
        return {f"kv_{name}": value for name, value in counts.items()}


def _tokens(nodes: Sequence[Wanted]) -> int:
    return sum(len(node.tokens) for node in nodes) // ITEM
