"""TierIndex: where pages of prefixes are kept besides the pool, as the page bookkeeping sees it.

A tier has a node of the prefix tree whole, its pages of all layer groups, or not at all. Nothing
here reads bytes: `transfers.py` decides what is saved and loaded, plans carry it
(`step.py`), and `tiers/` has them all: memory of the host, a disk, another engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.request import RequestId

Buffer = bytearray | memoryview  # bytes in memory of the host


class Wanted(NamedTuple):
    """A page of a prefix: its key, and the token ids that must be stored with it."""

    key: bytes
    tokens: bytes


class TierIndex(Protocol):
    def has(self, key: bytes) -> bool:
        """Whether any tier has this node, as far as is known without reading it."""
        ...

    def fetch(self, owner: RequestId, wanted: Sequence[Wanted], source: str) -> bool:
        """Bring a chain of nodes into memory for a request, as many as are worth it, from
        `source` as well where the request names one. False: it is not worth waiting for."""
        ...

    def is_bringing(self, owner: RequestId) -> bool:
        """Whether anything for this request is still on its way."""
        ...

    def pin(self, owner: RequestId, wanted: Wanted) -> bool:
        """Hold a node in memory for a request until `let_go`; False: it is not in memory."""
        ...

    def let_go(self, owner: RequestId) -> None:
        """The request needs nothing more. May be called for requests that never asked."""
        ...


class Landing(Protocol):
    """Bytes on their way from a device into a buffer that others know already."""

    def is_over(self) -> bool: ...

    def wait(self) -> None:
        """Until they are there; from any thread but the one that steps."""
        ...


class Lifted(Protocol):
    """The bytes of a node on the device; they stay there as long as somebody has this."""

    @property
    def index(self) -> int:
        """Its row of `memory/strip.py`."""
        ...


class Raised(NamedTuple):
    """Copies of the first of some nodes on the device, made from the pool."""

    rows: Sequence[Lifted] = ()
    landing: Landing | None = None  # until which they are not complete


NOTHING_RAISED = Raised()


class Stored(NamedTuple):
    """A node outside the pool: in a buffer, on the device, or both."""

    data: Buffer | None
    landing: Landing | None = None  # None: `data` is complete
    lifted: Lifted | None = None


class PageStore(Protocol):
    """The same tiers, as the pool sees them: bytes by key."""

    def room(self) -> Buffer | None:
        """A buffer for one node, to be filled and `put`; None: there is none left. Then a device
        does not keep the node, since it can copy nowhere else."""
        ...

    def put(self, node: Wanted, data: Buffer, landing: Landing | None = None) -> None:
        """Keep the pages of a node, by layer group one after the other; never waits for a disk."""
        ...

    def get(self, key: bytes) -> Stored:
        """The pages of a node that a request has pinned."""
        ...
