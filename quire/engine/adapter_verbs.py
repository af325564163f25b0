"""AdapterVerbs: adapters come and go while the engine runs, and every API process hears of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from quire.engine import commands as msg
from quire.engine.peer import Peer
from quire.errors import NotSupported, QuireError
from quire.lora.adapters import Adapters
from quire.obs.log import log_event


class AdapterVerbs:
    def __init__(self, adapters: Adapters | None, peers: Mapping[int, Peer]) -> None:
        self._adapters, self._peers = adapters, peers
        self.handlers: dict[type, Callable[[Peer, Any], None]] = {
            msg.LoadAdapter: self._load,
            msg.UnloadAdapter: self._unload,
        }

    def listed(self) -> list[msg.AdapterInfo]:
        if self._adapters is None:
            return []
        found = ((entry, entry.facts) for entry in self._adapters.entries())
        return [
            msg.AdapterInfo(entry.name, entry.path, facts.rank, facts.num_bytes, facts.digest)
            for entry, facts in found
        ]

    def greet(self, peer: Peer) -> None:
        """Some may have come since it was told Hello."""
        if listed := self.listed():
            peer.send(msg.AdapterList(listed))

    def _load(self, peer: Peer, command: msg.LoadAdapter) -> None:
        self._do(peer, command.number, lambda known: known.load(command.name, command.path))

    def _unload(self, peer: Peer, command: msg.UnloadAdapter) -> None:
        self._do(peer, command.number, lambda known: known.unload(command.name))

    def _do(self, peer: Peer, number: int, change: Callable[[Adapters], object]) -> None:
        try:
            if self._adapters is None:
                raise NotSupported("this engine takes no adapters")
            change(self._adapters)
        except QuireError as error:
            log_event("adapter_refused", severity=logging.WARNING, reason=str(error))
            peer.send(msg.AdapterList(self.listed()))
            return peer.reply(number, error=str(error))
        # First the news, then the answer: whoever waits for it finds the list as it is now.
        report = msg.AdapterList(self.listed())
        log_event("adapters", names=", ".join(one.name for one in report.adapters))
        for other in self._peers.values():
            other.send(report)
        return peer.reply(number)
