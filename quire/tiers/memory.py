"""MemoryShelf: nodes of the prefix tree in memory of the host, the oldest dropped first.

A node is a key, its token ids and one piece of bytes: its pages of all layer groups. Whoever needs
one that must not go pins it: a request that is about to load it, the thread that writes it to the
disk, a lease of another engine. Pinned nodes count towards the limit but are never dropped; with a
limit of 0 a node lives exactly as long as somebody pins it. Safe to call from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.kv.tier_index import Wanted

Owner = int | str  # a request, or the name of something else that needs a node


@dataclass(slots=True)
class Kept:
    tokens: bytes
    data: bytearray
    origin: str  # the tier it came from: "memory" when it was saved here
    owners: set[Owner] = field(default_factory=set)


class MemoryShelf:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._nodes: OrderedDict[bytes, Kept] = OrderedDict()  # oldest first
        self._pinned: dict[Owner, set[bytes]] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, node: Wanted, data: bytearray, owner: Owner | None, origin: str) -> None:
        """Keep a node, pinned by `owner` if there is one. A node that is here already stays."""
        with self._lock:
            kept = self._nodes.get(node.key)
            if kept is None:
                kept = self._nodes[node.key] = Kept(node.tokens, data, origin)
                self.num_bytes += len(data)
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
                    self._nodes[key].owners.discard(owner)
            if not held:
                del self._pinned[owner]
            self._trim()

    def get(self, key: bytes) -> Kept:
        """A node that the caller, or a request it works for, has pinned."""
        return self._nodes[key]

    def pinned_bytes(self, owner: Owner) -> int:
        with self._lock:
            return sum(len(self._nodes[key].data) for key in self._pinned.get(owner, ()))

    def _trim(self) -> None:
        """Drop the oldest that nobody needs until the limit holds."""
        if self.num_bytes <= self.limit:
            return
        for key in [key for key, kept in self._nodes.items() if not kept.owners]:
            self.num_bytes -= len(self._nodes.pop(key).data)
            if self.num_bytes <= self.limit:
                return
