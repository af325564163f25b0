"""PrefixTree: which page holds the keys and values of which token prefix.

A node is one full page of tokens after one exact prefix. Its key is a chained SHA-256: the
parent's key and this page's token ids, starting from a root that mixes a random secret of this
process with the request's salt, so keys can neither be guessed nor shared across salts. A hit
compares the stored token ids as well. Longest match is a walk down; nodes leave through `remove`
when the allocator evicts their page, leaves first (see `manager.py` for why that order holds).
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256

MAX_GHOSTS = 4096  # evicted keys remembered, only to say why a prompt missed


@dataclass(slots=True, eq=False)
class Node:
    key: bytes
    parent: Node | None  # None: child of a root
    tokens: bytes  # int32 ids of this page
    page: int
    num_children: int = 0
    num_hits: int = 0


@dataclass(slots=True)
class PrefixTree:
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    nodes: dict[bytes, Node] = field(default_factory=dict)
    _roots: dict[str, bytes] = field(default_factory=dict)
    _ghosts: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def root_key(self, salt: str) -> bytes:
        key = self._roots.get(salt)
        if key is None:
            key = sha256(self.secret + salt.encode("utf-8", "surrogatepass")).digest()
            if len(self._roots) >= MAX_GHOSTS:  # salts come from clients: keep the memo bounded
                self._roots.clear()
            self._roots[salt] = key
        return key

    @staticmethod
    def child_key(parent_key: bytes, tokens: bytes) -> bytes:
        return sha256(parent_key + tokens).digest()

    def find(self, key: bytes, tokens: bytes) -> Node | None:
        """The node with this key, if its stored tokens really are these."""
        node = self.nodes.get(key)
        return node if node is not None and node.tokens == tokens else None

    def insert(self, key: bytes, parent: Node | None, tokens: bytes, page: int) -> Node:
        assert key not in self.nodes, "published twice"
        node = Node(key, parent, tokens, page)
        self.nodes[key] = node
        self._ghosts.pop(key, None)
        if parent is not None:
            parent.num_children += 1
        return node

    def remove(self, node: Node) -> None:
        assert node.num_children == 0, "evicted a node with children"
        del self.nodes[node.key]
        if node.parent is not None:
            node.parent.num_children -= 1
        self._ghosts[node.key] = None
        if len(self._ghosts) > MAX_GHOSTS:
            self._ghosts.popitem(last=False)

    def was_evicted(self, key: bytes) -> bool:
        return key in self._ghosts
