"""InlineMover: pages one after the other on the connection itself. It needs nothing.

Digests take longer than the connection, so several threads make them, ahead of what is sent and
behind what came. What comes is received where it stays: in a room that a device can copy from,
where there is one.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from quire.disagg import frames
from quire.disagg.connector import Alive, Lent
from quire.errors import TransferError
from quire.kv.tier_index import Buffer, Wanted
from quire.tiers.in_order import in_order, num_threads
from quire.tiers.segment import Sealer

HEAD = frames.KEY_BYTES + frames.DIGEST_BYTES


class InlineMover:
    def __init__(
        self, sealer: Sealer, node_bytes: int, room: Callable[[], Buffer | None] | None = None
    ) -> None:
        """`room`: a place for one node's bytes; None: there is none left."""
        self._sealer, self._node_bytes, self._room = sealer, node_bytes, room

    def give(self, connection: socket.socket, lent: Sequence[Lent], is_alive: Alive) -> None:
        seals = in_order(self._seal, lent, "kv-seal")
        for one, seal in zip(lent, seals, strict=True):
            if not is_alive():
                break  # what was sent will not be confirmed
            frames.send(connection, frames.PAGE, one.node.key, seal, one.data)
        seals.close()
        frames.send(connection, frames.END)

    def _seal(self, one: Lent) -> bytes:
        return self._sealer.digest(one.node.key, one.node.tokens, one.landed())

    def take(
        self, connection: socket.socket, wanted: Sequence[Wanted], is_alive: Alive
    ) -> dict[bytes, Buffer]:
        tokens_of, taken, checks = dict(wanted), dict[bytes, Buffer](), list[Future[bool]]()
        with ThreadPoolExecutor(num_threads(), "kv-check") as checkers:
            while frames.kind_ahead(connection) == frames.PAGE:
                if not is_alive():
                    raise TransferError("nobody waits for these pages any more")
                length = frames.expect(connection, frames.PAGE, HEAD + self._node_bytes)
                if length < HEAD:
                    raise TransferError(f"got a page of {length} bytes")
                head = bytearray(HEAD)
                frames.fill(connection, head)
                data = self._place(length - HEAD)
                frames.fill(connection, data)
                key, seal = bytes(head[: frames.KEY_BYTES]), head[frames.KEY_BYTES :]
                if key in tokens_of:  # else a page that is here already
                    taken[key] = data
                    checks.append(checkers.submit(self._is_proved, seal, key, tokens_of[key], data))
            frames.receive(connection, frames.END, 0)
        if not all(check.result() for check in checks):
            raise TransferError("a page came damaged, or of other tokens")
        return taken

    def _place(self, size: int) -> Buffer:
        room = None if self._room is None else self._room()
        return room if room is not None and len(room) == size else bytearray(size)

    def _is_proved(self, seal: bytearray, key: bytes, tokens: bytes, data: Buffer) -> bool:
        return hmac.compare_digest(seal, self._sealer.digest(key, tokens, data))

    def close(self) -> None:
        """Nothing is held."""
