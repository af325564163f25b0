"""IpcMover: pages between two engines on one GPU, through memory of the one that the other maps.

Lent nodes lie in rows of the lender's strip (`memory/strip.py`): copied from its pool when they
were lent, as far as there was room, and brought from memory of the host otherwise. The lender says
which rows they are; the taker copies them to rows of its own and says when it has. Memory is named
by a handle of CUDA, plain bytes in a typed frame that is sealed. The pages are not digested: they
never leave the device, and both sides have greeted each other. Engines on two devices, in one
process, or where a handle cannot be opened send the bytes on the connection instead (`inline.py`).

    taker -> lender   PLACE   the device and process it is, and the strip it has mapped
    lender -> taker   SPOT    rows and keys, with a handle if the strip is new to the taker
    taker -> lender   ANSWER  so many of them need not come another way
                      ... then what is left, inline, and END
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from quire.disagg import frames
from quire.disagg.connector import Alive, Lent
from quire.disagg.inline import InlineMover
from quire.errors import TransferError
from quire.kv.tier_index import Buffer, Lifted, Stored, Wanted
from quire.tiers.segment import Sealer

MAX_FRAME = 1 << 24
_COUNT = struct.Struct("<I")
T = TypeVar("T")


class Place(msgspec.Struct, frozen=True):
    """Where an engine is, and which strip of the other one it has mapped."""

    device: str
    process: str
    mapped: str = ""


class Spot(msgspec.Struct, frozen=True):
    """Rows of a strip, and the keys of the nodes that lie there."""

    strip: str
    handle: bytes  # empty: the other side has mapped it
    rows: list[int]
    keys: list[bytes]


class SharedStrip(Protocol):
    """A strip that other processes can map (`memory/shared_strip.py`)."""

    @property
    def device(self) -> str:
        """Engines in two processes that say the same can map each other's memory."""
        ...

    @property
    def name(self) -> str: ...

    def bring(self, nodes: Sequence[Stored]) -> Sequence[Lifted]: ...

    def handle(self) -> bytes:
        """Opens this strip in other processes."""
        ...

    def open(self, handle: bytes) -> object | None:
        """Another process's strip, mapped as long as somebody has this; None: it cannot be."""
        ...

    def copy(self, mapped: object, rows: Sequence[int]) -> Sequence[Lifted]:
        """Copies of the first of these rows, as many as fit; returns when they are there."""
        ...


@dataclass(frozen=True, slots=True)
class _Mapped:
    strip: str
    memory: object


class IpcMover:
    def __init__(
        self,
        sealer: Sealer,
        node_bytes: int,
        strip: SharedStrip,
        process: str,
        room: Callable[[], Buffer | None] | None = None,
    ) -> None:
        """`room`: for what comes on the connection (`inline.py`)."""
        self._sealer, self._inline = sealer, InlineMover(sealer, node_bytes, room)
        self._strip, self._process = strip, process
        self._mapped: dict[str, _Mapped] = {}  # by peer

    # ------------------------------------------------------------ the side that has pages

    def give(self, connection: socket.socket, lent: Sequence[Lent], is_alive: Alive) -> None:
        there = _decoded(frames.receive(connection, frames.PLACE, MAX_FRAME), Place)
        left = list(lent)
        if there.device == self._strip.device and there.process != self._process:
            left = self._give_rows(connection, left, there.mapped == self._strip.name, is_alive)
        self._inline.give(connection, left, is_alive)

    def _give_rows(
        self, connection: socket.socket, lent: list[Lent], is_mapped: bool, is_alive: Alive
    ) -> list[Lent]:
        """Returns what the other side has no row for."""
        there = [one.lifted for one in lent if one.lifted is not None]
        lent.sort(key=lambda one: one.lifted is None)  # those that have a row first
        while lent and is_alive():
            # As many at a time as the strip has.
            rows = there or self._strip.bring([Stored(one.data, one.landing) for one in lent])
            if not rows:
                break
            count = self._offer(connection, lent[: len(rows)], rows, is_mapped)
            is_short = count < len(rows)
            lent, is_mapped, there, rows = lent[count:], True, [], ()  # free for the next ones
            if is_short:
                break
        return lent

    def _offer(
        self, connection: socket.socket, lent: list[Lent], rows: Sequence[Lifted], is_mapped: bool
    ) -> int:
        """How many of these rows the other side has copied."""
        handle, indices = b"" if is_mapped else self._strip.handle(), [row.index for row in rows]
        spot = Spot(self._strip.name, handle, indices, [one.node.key for one in lent])
        body = msgspec.msgpack.encode(spot)
        frames.send(connection, frames.SPOT, self._sealer.digest(b"", b"", body), body)
        # The rows are ours until the other side has answered, or is gone.
        (count,) = _COUNT.unpack(frames.receive(connection, frames.ANSWER, _COUNT.size))
        return int(count)

    # ------------------------------------------------------------ the side that wants them

    def take(
        self, connection: socket.socket, wanted: Sequence[Wanted], is_alive: Alive
    ) -> dict[bytes, Buffer | Lifted]:
        peer, keys = str(connection.getpeername()), {node.key for node in wanted}
        known = self._mapped[peer].strip if peer in self._mapped else ""
        place = Place(self._strip.device, self._process, known)
        frames.send(connection, frames.PLACE, msgspec.msgpack.encode(place))
        taken: dict[bytes, Buffer | Lifted] = {}
        while frames.kind_ahead(connection) == frames.SPOT:
            spot = self._proved(frames.receive(connection, frames.SPOT, MAX_FRAME))
            if not is_alive():
                raise TransferError("nobody waits for these pages any more")
            places = [at for at, key in enumerate(spot.keys) if key in keys]
            copied = self._copied(peer, spot, [spot.rows[at] for at in places])
            taken |= {spot.keys[at]: row for at, row in zip(places, copied, strict=False)}
            left = places[len(copied) :]
            count = left[0] if left else len(spot.rows)
            frames.send(connection, frames.ANSWER, _COUNT.pack(count))
        return taken | self._inline.take(connection, wanted, is_alive)

    def _proved(self, sealed: bytearray) -> Spot:
        """A number that was damaged would be another page."""
        seal, body = sealed[: frames.DIGEST_BYTES], sealed[frames.DIGEST_BYTES :]
        if not hmac.compare_digest(seal, self._sealer.digest(b"", b"", body)):
            raise TransferError("a frame came damaged")
        return _decoded(body, Spot)

    def _copied(self, peer: str, spot: Spot, rows: Sequence[int]) -> Sequence[Lifted]:
        """Of the first rows; the others shall come another way."""
        if spot.handle:
            memory = self._strip.open(spot.handle)
            if memory is None:
                return ()
            self._mapped[peer] = _Mapped(spot.strip, memory)
        mapped = self._mapped.get(peer)
        if mapped is None or mapped.strip != spot.strip:
            raise TransferError(f"got rows of {spot.strip!r}, which is not mapped")
        return self._strip.copy(mapped.memory, rows)

    def close(self) -> None:
        """Strips of others stay mapped as long as this object."""


def _decoded(body: bytes | bytearray, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise TransferError(f"got a frame that is no {kind.__name__}: {error}") from error
