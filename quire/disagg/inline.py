"""InlineMover: pages one after the other on the connection itself. It needs nothing."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Sequence

from quire.disagg import frames
from quire.disagg.connector import Alive, Lent
from quire.errors import TransferError
from quire.kv.tier_index import Wanted
from quire.tiers.segment import Sealer


class InlineMover:
    def __init__(self, sealer: Sealer, node_bytes: int) -> None:
        self._sealer, self._node_bytes = sealer, node_bytes

    def give(self, connection: socket.socket, lent: Sequence[Lent], is_alive: Alive) -> None:
        for (key, tokens), data in lent:
            if not is_alive():
                break  # what was sent will not be confirmed
            seal = self._sealer.digest(key, tokens, data)
            frames.send(connection, frames.PAGE, key, seal, data)
        frames.send(connection, frames.END)

    def take(
        self, connection: socket.socket, wanted: Sequence[Wanted], is_alive: Alive
    ) -> dict[bytes, bytearray]:
        tokens_of, taken = dict(wanted), dict[bytes, bytearray]()
        head = frames.KEY_BYTES + frames.DIGEST_BYTES
        while frames.kind_ahead(connection) == frames.PAGE:
            if not is_alive():
                raise TransferError("nobody waits for these pages any more")
            page = frames.receive(connection, frames.PAGE, head + self._node_bytes)
            key, seal = bytes(page[: frames.KEY_BYTES]), page[frames.KEY_BYTES : head]
            if key not in tokens_of:
                continue  # a page that is here already
            data = page[head:]
            if not hmac.compare_digest(seal, self._sealer.digest(key, tokens_of[key], data)):
                raise TransferError("a page came damaged, or of other tokens")
            taken[key] = data
        frames.receive(connection, frames.END, 0)
        return taken

    def close(self) -> None:
        """Nothing is held."""
