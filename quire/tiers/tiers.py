"""Tiers: all that is outside the pool as one. Memory of the host in front, behind it a disk.

What is saved goes to memory and, in the background, to the disk; what is fetched is brought into
memory, where the step that loads it finds it. Reading, writing and checking happen in threads of
their own (`porter.py`), so that no step waits for a disk. Nothing here knows of tensors: a node is
a piece of bytes. `kv/transfers.py` is the caller on the side of policy, `memory/transfer.py` on
that of the pool.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

from quire.errors import TransferError
from quire.kv.tier_index import Wanted
from quire.obs.log import log_event
from quire.request import RequestId
from quire.tiers.disk import DiskShelf
from quire.tiers.memory import MemoryShelf
from quire.tiers.porter import Porter
from quire.tiers.tempo import Tempo

MAX_STAGED = 1 << 30  # bytes brought for requests that have not started
MAX_BACKLOG = 256 << 20  # bytes that wait to be written; what comes then is not written
ITEM = 4  # bytes of a token id
WRITER = "writer"


class Remote(Protocol):
    """Other engines; `disagg/connector.py` has more to say of them."""

    def offer(self, nodes: Sequence[Wanted]) -> str:
        """Let others read these; a ticket, or nothing."""
        ...

    def pull(
        self, ticket: str, wanted: Sequence[Wanted], is_alive: Callable[[], bool]
    ) -> list[bytearray]:
        """Pages of the first of these nodes, confirmed. Raises TransferError."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class TierCounts:
    """Totals since start; pages are of one node each, all layer groups together."""

    loads_memory: int = 0
    loads_disk: int = 0
    loads_remote: int = 0
    loaded_bytes: int = 0
    saves: int = 0
    writes: int = 0  # to the disk
    written_bytes: int = 0
    drops: int = 0  # that were not written: the disk was too slow, full or not writable
    bad: int = 0  # records that were not what was written
    recomputed: int = 0  # fetches that were slower than computing
    failed_pulls: int = 0  # tickets of other engines that brought nothing
    tickets: int = 0  # given to others


class Tiers:
    def __init__(
        self, memory: MemoryShelf, disk: DiskShelf | None, tempo: Tempo, node_bytes: int
    ) -> None:
        self.memory, self.disk, self.tempo = memory, disk, tempo
        self.node_bytes = node_bytes
        self.counts = TierCounts()
        self._lock = threading.Lock()
        self._bringing: set[RequestId] = set()
        self._staged: dict[RequestId, int] = {}  # bytes brought for each
        self._backlog = 0
        self._reader, self._writer = Porter("kv-reader"), Porter("kv-writer")
        self._puller = Porter("kv-puller")
        self.remote: Remote | None = None

    # ------------------------------------------------------------ as TierIndex

    def has(self, key: bytes) -> bool:
        return key in self.memory or (self.disk is not None and key in self.disk)

    def fetch(self, owner: RequestId, wanted: Sequence[Wanted], source: str) -> bool:
        missing = [node for node in wanted if not self.memory.pin(owner, node)]
        if not missing:
            return False
        if source and self.remote is not None:
            self._bringing.add(owner)
            self._puller.do(partial(self._pull, self.remote, owner, missing, source))
            return True
        if self.disk is None:
            return False
        num_tokens = sum(len(node.tokens) for node in missing) // ITEM
        if not self.tempo.is_worth(num_tokens, len(missing) * self.node_bytes):
            self.counts.recomputed += 1
            return False
        self._bringing.add(owner)
        self._reader.do(partial(self._bring, owner, missing))
        return True

    def is_bringing(self, owner: RequestId) -> bool:
        return owner in self._bringing

    def pin(self, owner: RequestId, wanted: Wanted) -> bool:
        return self.memory.pin(owner, wanted)

    def let_go(self, owner: RequestId) -> None:
        with self._lock:
            self._bringing.discard(owner)
            self._staged.pop(owner, None)
            self.memory.let_go(owner)

    # ------------------------------------------------------------ as a PageStore

    def put(self, node: Wanted, data: bytearray) -> None:
        """Keep a node; the bytes are ours from now on."""
        self.counts.saves += 1
        disk = self.disk
        if disk is None:
            self.memory.put(node, data, None, "memory")
        elif disk.is_paused or self._backlog + len(data) > MAX_BACKLOG:
            self.counts.drops += 1
            self.memory.put(node, data, None, "memory")
        else:
            self.memory.put(node, data, WRITER, "memory")
            with self._lock:
                self._backlog += len(data)
            self._writer.do(partial(self._write, disk, node, data))

    def get(self, key: bytes) -> bytearray:
        """The bytes of a node that some request has pinned."""
        kept, counts = self.memory.get(key), self.counts
        counts.loads_disk += kept.origin == "disk"
        counts.loads_memory += kept.origin == "memory"
        counts.loads_remote += kept.origin == "remote"
        counts.loaded_bytes += len(kept.data)
        kept.origin = "memory"  # for whoever comes next
        return kept.data

    def offer(self, nodes: Sequence[Wanted]) -> str:
        """A ticket for another engine; empty: there is nothing to read, or nobody may."""
        ticket = self.remote.offer(nodes) if self.remote is not None else ""
        self.counts.tickets += bool(ticket)
        return ticket

    # ------------------------------------------------------------ threads

    def _bring(self, owner: RequestId, wanted: Sequence[Wanted]) -> None:
        """Read a chain, up to what cannot be read."""
        assert self.disk is not None
        while self.is_bringing(owner) and sum(list(self._staged.values())) > MAX_STAGED:
            time.sleep(0.01)  # until one of those that wait has started
        for node in wanted:
            begun = time.perf_counter()
            data = self.disk.read(node)
            if data is None or not self._hand_over(owner, node, data):
                break
            self.tempo.read(len(data), time.perf_counter() - begun)
        self.counts.bad = self.disk.num_bad
        with self._lock:
            self._bringing.discard(owner)

    def _pull(
        self, remote: Remote, owner: RequestId, wanted: Sequence[Wanted], ticket: str
    ) -> None:
        """The same from another engine, all of it or nothing."""
        try:
            pages = remote.pull(ticket, wanted, lambda: self.is_bringing(owner))
        except TransferError as error:
            self.counts.failed_pulls += 1
            log_event("kv_pull_failed", severity=logging.WARNING, reason=str(error))
            pages = []
        for node, data in zip(wanted, pages, strict=False):
            if not self._hand_over(owner, node, data, "remote"):
                break
        with self._lock:
            self._bringing.discard(owner)

    def _hand_over(
        self, owner: RequestId, node: Wanted, data: bytearray, origin: str = "disk"
    ) -> bool:
        """False: the request does not wait any more."""
        with self._lock:
            if owner not in self._bringing:
                return False
            self.memory.put(node, data, owner, origin)
            self._staged[owner] = self._staged.get(owner, 0) + len(data)
            return True

    def _write(self, disk: DiskShelf, node: Wanted, data: bytearray) -> None:
        if node.key not in disk:
            if disk.write(node, data):
                self.counts.writes += 1
                self.counts.written_bytes += len(data)
            else:
                self.counts.drops += 1
        with self._lock:
            self._backlog -= len(data)
        self.memory.let_go(WRITER, [node.key])

    # ------------------------------------------------------------ end and looks

    def flush(self, seconds: float) -> bool:
        """Wait until all that was saved is written; False: it took too long."""
        return self._writer.wait(seconds)

    def close(self, seconds: float = 5.0) -> None:
        """Write what waits to be written, as far as there is time, and give the folder back."""
        self._writer.close(seconds)
        self._reader.close(seconds)
        if self.remote is not None:
            self.remote.close()
        self._puller.close(0.1)
        if self.disk is not None:
            self.disk.close()
            self.disk = None

    def as_dict(self) -> dict[str, float]:
        disk_bytes = 0 if self.disk is None else self.disk.num_bytes
        held = {"memory_bytes": self.memory.num_bytes, "disk_bytes": disk_bytes}
        counts = asdict(self.counts) | held | {"backlog_bytes": self._backlog}
        return {f"kv_{name}": value for name, value in counts.items()}
