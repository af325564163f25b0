"""What tiers work with: other engines, memory of the host in rooms, rows of a device.

`disagg/` and `memory/` have them; nothing here knows of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from quire.kv.tier_index import NOTHING_RAISED, Buffer, Lifted, Raised, Stored, Wanted


class Remote(Protocol):
    """Other engines; `disagg/connector.py` has more to say of them."""

    def offer(self, nodes: Sequence[Wanted], raised: Raised = NOTHING_RAISED) -> str:
        """Let others read these; a ticket, or nothing."""
        ...

    def pull(
        self, ticket: str, wanted: Sequence[Wanted], is_alive: Callable[[], bool]
    ) -> Sequence[Buffer | Lifted]:
        """Pages of the first of these nodes, confirmed. Raises TransferError."""
        ...

    def close(self) -> None: ...


class Rooms(Protocol):
    """Memory for one node each (`memory/rooms.py`); a device copies from and to it."""

    def take(self) -> Buffer | None: ...

    def close(self) -> None: ...


class Strip(Protocol):
    """Memory of the device, where pages wait for their step (`memory/strip.py`)."""

    def bring(self, nodes: Sequence[Stored]) -> Sequence[Lifted]:
        """Copies of the first of these; returns when they are there."""
        ...


class Raiser(Protocol):
    def __call__(self, nodes: Sequence[Sequence[int]]) -> Raised:
        """Copies of these nodes' pages in rows of the device, of the first as far as there is room
        (`memory/device_transfer.py`)."""
        ...


class Device(NamedTuple):
    """What tiers have on a device."""

    rooms: Rooms
    strip: Strip
