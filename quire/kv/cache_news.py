"""CacheLog: changes of the prefix tree, numbered, for routers that keep an index of it.

It begins when somebody first asks: until then the tree does no more than look whether anybody
listens. A listener names the epoch and the number it has seen everything before; who is too far
behind, or speaks of another process, is told everything there is.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from itertools import islice

from quire.kv.prefix import Node, PrefixTree
from quire.kv.route_keys import child_route_key, root_route_key

MOST_CHANGES = 65_536

News = dict[str, int | str]


class CacheLog:
    def __init__(self, tree: PrefixTree, page_size: int) -> None:
        self.tree, self.page_size = tree, page_size
        self.epoch = secrets.token_hex(8)
        self.next = 0
        self._keys: dict[bytes, bytes] = {}  # of nodes, by their own
        self._times: Counter[bytes] = Counter()  # that the tree holds each: once in every home
        self._changes: deque[tuple[bool, bytes]] = deque(maxlen=MOST_CHANGES)
        for node in tree.nodes.values():  # parents come before their children
            self.inserted(node)
        tree.listener = self

    def inserted(self, node: Node) -> None:
        key = self._route_key(node)
        if key is None:
            return
        self._keys[node.key] = key
        self._times[key] += 1
        if self._times[key] == 1:
            self._changes.append((True, key))
            self.next += 1

    def removed(self, node: Node) -> None:
        key = self._keys.pop(node.key, None)
        if key is None:
            return
        self._times[key] -= 1
        if not self._times[key]:
            del self._times[key]
            self._changes.append((False, key))
            self.next += 1

    def _route_key(self, node: Node) -> bytes | None:
        """None: what it follows is not known here; a router does without it."""
        if node.parent is not None:
            above = self._keys.get(node.parent.key)
            return None if above is None else child_route_key(above, node.tokens)
        for salt, root in self.tree.roots():
            if self.tree.child_key(root, node.tokens) == node.key:
                return child_route_key(root_route_key(salt), node.tokens)
        return None

    def since(self, epoch: str, number: int) -> News:
        first = self.next - len(self._changes)
        if epoch != self.epoch or not first <= number <= self.next:
            return self._news(True, b"".join(self._times), b"")
        # What came and went in between is told as what it is now.
        last: dict[bytes, bool] = {}
        for was_added, key in islice(self._changes, number - first, None):
            last[key] = was_added
        added = b"".join(key for key, is_there in last.items() if is_there)
        removed = b"".join(key for key, is_there in last.items() if not is_there)
        return self._news(False, added, removed)

    def _news(self, is_whole: bool, added: bytes, removed: bytes) -> News:
        return {
            "epoch": self.epoch,
            "next": self.next,
            "page_size": self.page_size,
            "is_whole": int(is_whole),
            "added": added.hex(),
            "removed": removed.hex(),
        }
