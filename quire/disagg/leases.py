"""Leases: nodes in memory that another engine may read until a deadline.

A lease pins its nodes (`tiers/memory.py`). It ends when the reader confirms, when it is withdrawn
or at its deadline, whatever comes first, and its generation never comes back. Safe from any thread.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from quire.disagg.connector import Lent
from quire.kv.tier_index import NOTHING_RAISED, Landing, Raised, Wanted
from quire.tiers.memory import MemoryShelf

LEASE_S = 30.0  # from offer to confirmation


@dataclass(frozen=True, slots=True)
class Lease:
    id: str
    generation: int
    nodes: tuple[Lent, ...]
    deadline: float
    raising: Landing | None = None  # until which what they have on the device is not complete


class Leases:
    def __init__(
        self,
        memory: MemoryShelf,
        seconds: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory, self._seconds, self._clock = memory, seconds, clock
        self._live: dict[str, Lease] = {}
        self._generation = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._live)

    def grant(self, nodes: Sequence[Wanted], raised: Raised = NOTHING_RAISED) -> Lease | None:
        """On the first of these nodes that are in memory; None: not even one is."""
        self.sweep()
        name, held = secrets.token_hex(16), list[Lent]()
        for node, row in zip_longest(nodes, raised.rows[: len(nodes)]):
            if not self._memory.pin(name, node):
                break
            data, landing, _ = self._memory.get(node.key).stored
            if data is None:
                break
            held.append(Lent(node, data, landing, row))
        if not held:
            self._memory.let_go(name)  # of a node that is on the device alone
            return None
        with self._lock:
            self._generation += 1
            deadline = self._clock() + self._seconds
            lease = self._live[name] = Lease(
                name, self._generation, tuple(held), deadline, raised.landing
            )
        return lease

    def find(self, name: str, generation: int) -> Lease | None:
        """None: it has ended, or this is not its generation."""
        self.sweep()
        lease = self._live.get(name)
        return lease if lease is not None and lease.generation == generation else None

    def end(self, name: str) -> bool:
        """Whether it was still there."""
        with self._lock:
            lease = self._live.pop(name, None)
        self._memory.let_go(name)
        return lease is not None

    def sweep(self) -> None:
        """End those whose time is over."""
        now = self._clock()
        for lease in list(self._live.values()):
            if lease.deadline <= now:
                self.end(lease.id)

    def end_all(self) -> None:
        for name in list(self._live):
            self.end(name)
