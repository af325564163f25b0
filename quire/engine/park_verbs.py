"""ParkVerbs: the engine process is told to leave its GPU's memory, and to take it again.

Requests that come while it is parked wait in the core. Every API process is told of a change
before whoever asked for it is; the answer is how much memory of the host is locked since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from quire.engine import commands as msg
from quire.engine.parking import Parking
from quire.engine.peer import Peer
from quire.errors import OutOfMemory
from quire.obs.log import log_event

Handlers = dict[type, Callable[[Peer, Any], None]]
PARKED = "the model is parked; it takes adapters once a request has brought it back"


class ParkVerbs:
    def __init__(
        self, parking: Parking | None, is_busy: Callable[[], bool], tell: Callable[[], None]
    ) -> None:
        """`tell`: whoever is connected, that something has changed."""
        self._parking, self._is_busy, self._tell = parking, is_busy, tell
        self.handlers: Handlers = {msg.Park: self._park, msg.Unpark: self._unpark}

    @property
    def is_parked(self) -> bool:
        return self._parking is not None and self._parking.is_parked

    def guarded(self, handlers: Mapping[type, Callable[[Peer, Any], None]]) -> Handlers:
        """The same, refused while parked: they use the device."""

        def guard(handle: Callable[[Peer, Any], None]) -> Callable[[Peer, Any], None]:
            def guarded(peer: Peer, command: Any) -> None:
                if self.is_parked:
                    return peer.reply(command.number, error=PARKED)
                return handle(peer, command)

            return guarded

        return {kind: guard(handle) for kind, handle in handlers.items()}

    def _park(self, peer: Peer, command: msg.Park) -> None:
        if self._is_busy():
            return peer.reply(command.number, error=msg.BUSY)
        return self._do(peer, command.number, lambda parking: parking.park())

    def _unpark(self, peer: Peer, command: msg.Unpark) -> None:
        self._do(peer, command.number, lambda parking: parking.unpark())

    def _do(self, peer: Peer, number: int, change: Callable[[Parking], None]) -> None:
        if self._parking is None:
            return peer.reply(
                number, error="this engine cannot leave its memory; see its decisions"
            )
        try:
            change(self._parking)
        except OutOfMemory as error:
            log_event("parking_refused", severity=logging.WARNING, reason=str(error))
            return peer.reply(number, error=msg.NO_MEMORY + str(error))
        self._tell()
        return peer.reply(number, self._parking.locked_bytes)
