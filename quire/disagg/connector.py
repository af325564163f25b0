"""KVConnector: how pages go from the engine that computed them to the one that decodes.

The engine that has them offers nodes of the prefix tree under a lease and hands out a ticket, a
short text that travels with the request. The other engine pulls, and takes nothing that was not
confirmed afterwards: a lease has a generation, and a read that ends after the lease does counts as
not read. Whatever fails is computed. `sockets.py` greets, leases and confirms over TCP; the bytes
go the same way (`inline.py`), through NIXL (`nixl_mover.py`) or inside a device that both are on
(`ipc_mover.py`). `leases.py` is what an offer holds on to.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from quire.kv.tier_index import NOTHING_RAISED, Buffer, Landing, Lifted, Raised, Wanted

_TICKET = re.compile(r"([\w.:\[\]-]{1,255}:\d{1,5})/([0-9a-f]{32})/(\d{1,18})/(\d{1,9})")
Alive = Callable[[], bool]  # whether somebody still waits for the pages


class Ticket(NamedTuple):
    """
    >>> ticket = Ticket("10.0.0.1:7000", "0" * 32, 7, 12)
    >>> Ticket.parse(str(ticket)) == ticket
    True
    """

    address: str  # of the engine that has the pages
    lease: str
    generation: int
    num_nodes: int

    def __str__(self) -> str:
        return f"{self.address}/{self.lease}/{self.generation}/{self.num_nodes}"

    @staticmethod
    def parse(text: str) -> Ticket | None:
        """None: it is none."""
        found = _TICKET.fullmatch(text)
        if found is None:
            return None
        return Ticket(found[1], found[2], int(found[3]), int(found[4]))


class Lent(NamedTuple):
    """A node and its bytes, as an engine lends them."""

    node: Wanted
    data: Buffer
    landing: Landing | None = None  # until which `data` is not complete
    lifted: Lifted | None = None  # where they are on the device as well

    def landed(self) -> Buffer:
        """The bytes, when they are there; for threads that have time."""
        if self.landing is not None:
            self.landing.wait()
        return self.data


class Mover(Protocol):
    """How the bytes of a lease cross, once both sides have greeted each other."""

    def give(self, connection: socket.socket, lent: Sequence[Lent], is_alive: Alive) -> None:
        """Let the other side have these; returns when it says that it has, or wants no more."""
        ...

    def take(
        self, connection: socket.socket, wanted: Sequence[Wanted], is_alive: Alive
    ) -> Mapping[bytes, Buffer | Lifted]:
        """What the other side gives, by key: bytes proved by their digest, or rows of a device that
        both are on. Raises TransferError."""
        ...

    def close(self) -> None: ...


class KVConnector(Protocol):
    def offer(self, nodes: Sequence[Wanted], raised: Raised = NOTHING_RAISED) -> str:
        """Let another engine read the first of these nodes that are in memory, for a while; returns
        a ticket, or nothing when there are none. `raised`: copies of them on the device."""
        ...

    def pull(self, ticket: str, wanted: Sequence[Wanted], is_alive: Alive) -> list[Buffer | Lifted]:
        """Pages of the first of these nodes, all of them confirmed. Raises TransferError."""
        ...

    def withdraw(self, ticket: str) -> None:
        """Nobody will pull: end the lease now and not at its deadline."""
        ...

    def close(self) -> None:
        """End all leases."""
        ...
