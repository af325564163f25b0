"""MemoryShelf: nodes of the prefix tree in memory of the host, the oldest dropped first.

A node is a key, its token ids and one piece of bytes: its pages of all layer groups. Whoever needs
one that must not go pins it: a request that is about to load it, the thread that writes it to the
disk, a lease of another engine. Pinned nodes count towards the limit but are never dropped; with a
limit of 0 a node lives exactly as long as somebody pins it. A node that was brought to the device
is there as long as somebody pins it, and some are there alone. Safe to call from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from quire.kv.tier_index import Buffer, Landing, Lifted, Stored, Wanted

Owner = int | str  # a request, or the name of something else that needs a node


@dataclass(slots=True)
class Kept:
    tokens: bytes
    data: Buffer | None  # None: it is on the device alone
    origin: str  # the tier it came from: "memory" when it was saved here
    landing: Landing | None = None  # until which `data` is not complete
    lifted: Lifted | None = None
    owners: set[Owner] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return 0 if self.data is None else len(self.data)

    @property
    def stored(self) -> Stored:
        return Stored(self.data, self.landing, self.lifted)


class Pinned(NamedTuple):
    key: bytes
    stored: Stored


class MemoryShelf:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._nodes: OrderedDict[bytes, Kept] = OrderedDict()  # oldest first
        self._pinned: dict[Owner, set[bytes]] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        """Whether its bytes are in memory; on the device alone does not count."""
        kept = self._nodes.get(key)
        return kept is not None and kept.data is not None

    def __len__(self) -> int:
        return len(self._nodes)

    def put(
        self,
        node: Wanted,
        data: Buffer,
        owner: Owner | None,
        origin: str,
        landing: Landing | None = None,
    ) -> None:
        """Keep a node, pinned by `owner` if there is one. A node that is here already stays."""
        with self._lock:
            kept = self._nodes.get(node.key)
            if kept is None:
                kept = self._nodes[node.key] = Kept(node.tokens, None, origin)
            if kept.data is None:
                kept.data, kept.landing = data, landing
                self.num_bytes += kept.num_bytes
            if owner is not None:
                self._pin(owner, node.key, kept)
            self._trim()

    def pin(self, owner: Owner, node: Wanted) -> bool:
        """False: it is not here, or its tokens are others."""
        with self._lock:
            kept = self._nodes.get(node.key)
            if kept is None or kept.tokens != node.tokens:
                return False
            self._nodes.move_to_end(node.key)
            self._pin(owner, node.key, kept)
            return True

    def _pin(self, owner: Owner, key: bytes, kept: Kept) -> None:
        kept.owners.add(owner)
        self._pinned.setdefault(owner, set()).add(key)

    def let_go(self, owner: Owner, keys: Iterable[bytes] | None = None) -> None:
        """`owner` needs these no more; None: none of its nodes. Unknown owners are fine."""
        with self._lock:
            held = self._pinned.get(owner)
            if held is None:
                return
            for key in list(held) if keys is None else keys:
                if key in held:
                    held.discard(key)
                    self._loosen(key, owner)
            if not held:
                del self._pinned[owner]
            self._trim()

    def _loosen(self, key: bytes, owner: Owner) -> None:
        kept = self._nodes[key]
        kept.owners.discard(owner)
        if not kept.owners:
            kept.lifted = None
            if kept.data is None:
                del self._nodes[key]

    def lift(self, owner: Owner, keys: Iterable[bytes], rows: Iterable[Lifted]) -> None:
        """Nodes that `owner` has pinned are on the device now; nothing happens to others."""
        with self._lock:
            for key, row in zip(keys, rows, strict=False):
                kept = self._nodes.get(key)
                if kept is not None and owner in kept.owners:
                    kept.lifted = row

    def put_lifted(
        self, nodes: Sequence[Wanted], rows: Sequence[Lifted], owner: Owner, origin: str
    ) -> None:
        """Keep the first of these nodes, which are on the device, pinned by `owner`."""
        with self._lock:
            for node, row in zip(nodes, rows, strict=False):
                kept = self._nodes.get(node.key)
                if kept is None:
                    kept = self._nodes[node.key] = Kept(node.tokens, None, origin)
                self._pin(owner, node.key, kept)
                kept.lifted = row

    def pinned(self, owner: Owner, nodes: Sequence[Wanted]) -> list[Pinned]:
        """The first of these nodes, as far as `owner` has pinned them."""
        with self._lock:
            held = self._pinned.get(owner, set())
            return [
                Pinned(node.key, self._nodes[node.key].stored)
                for node in takewhile(lambda node: node.key in held, nodes)
            ]

    def get(self, key: bytes) -> Kept:
        """A node that the caller, or a request it works for, has pinned."""
        return self._nodes[key]

    def pinned_bytes(self, owner: Owner) -> int:
        with self._lock:
            return sum(self._nodes[key].num_bytes for key in self._pinned.get(owner, ()))

    def _trim(self) -> None:
        """Drop the oldest that nobody needs until the limit holds."""
        if self.num_bytes <= self.limit:
            return
        drops, over = [], self.num_bytes - self.limit
        for key, kept in self._nodes.items():  # as few as it takes: there may be very many
            if not kept.owners:
                drops.append(key)
                over -= kept.num_bytes
                if over <= 0:
                    break
        for key in drops:
            self.num_bytes -= self._nodes.pop(key).num_bytes
