"""PrefixTree: which pages hold the keys and values of which token prefix.

A node is one full page of tokens after one exact prefix; it has one page for each layer group. Its
key is a chained BLAKE2b (half the time of SHA-256 for so few bytes): the parent's key and this
page's token ids, starting from a root that mixes a secret with the request's salt and its adapter's
digest, so keys can neither be guessed nor shared across salts or adapters. The secret is random, or
a file's where other processes shall find the same keys (`tiers/secret_file.py`). A hit compares the
stored token ids as well. Longest match is a walk down.

Pages leave through `evict`. Pages of full groups go leaves first (`manager.py` says why that order
holds), and their node goes with them. Pages of windowed groups may go at any time and leave a gap
in the node: a hit needs them only near its end (`longest_hit`).
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from quire.kv.groups import Window, first_column
from quire.request import Request

MAX_GHOSTS = 4096  # evicted keys remembered, only to say why a prompt missed
GONE = 0  # in place of a page: the scratch page's id, which nobody holds or publishes


@dataclass(slots=True, eq=False)
class Node:
    key: bytes
    parent: Node | None  # None: child of a root
    tokens: bytes  # int32 ids of this page
    pages: list[int]  # by group, GONE where a windowed group's was evicted
    number: int = 0  # of insertion, from 1: names the node for whoever watches
    num_children: int = 0
    num_hits: int = 0


class TreeListener(Protocol):
    """Somebody who follows what the tree holds (`cache_news.py`)."""

    def inserted(self, node: Node) -> None: ...

    def removed(self, node: Node) -> None: ...


@dataclass(slots=True)
class PrefixTree:
    windows: tuple[Window, ...] = (None,)  # by group
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    nodes: dict[bytes, Node] = field(default_factory=dict)
    listener: TreeListener | None = None
    _num_inserted: int = 0
    _roots: dict[tuple[str, bytes, int], bytes] = field(default_factory=dict)
    _ghosts: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def root_of(self, request: Request) -> bytes:
        """Where its keys begin: all that a request's pages depend on besides tokens."""
        return self.root_key(request.cache_salt, request.adapter.digest, request.home)

    def root_key(self, salt: str, adapter: bytes = b"", home: int = 0) -> bytes:
        """`adapter`: the digest of its weights, which its pages depend on. `home`: whose pages."""
        key = self._roots.get((salt, adapter, home))
        if key is None:
            text = salt.encode("utf-8", "surrogatepass")
            rank = home.to_bytes(4, "little")
            key = blake2b(self.secret + text, key=adapter, salt=rank).digest()
            if len(self._roots) >= MAX_GHOSTS:  # salts come from clients: keep the memo bounded
                self._roots.clear()
            self._roots[salt, adapter, home] = key
        return key

    def roots(self) -> Iterable[tuple[str, bytes]]:
        """Salts seen lately, and their keys; of requests without an adapter."""
        return ((salt, key) for (salt, adapter, _), key in self._roots.items() if not adapter)

    @staticmethod
    def child_key(parent_key: bytes, tokens: bytes) -> bytes:
        return blake2b(parent_key + tokens).digest()

    def chain(self, parent_key: bytes, stream: bytes, page_bytes: int) -> list[Node]:
        """A node for each page of `stream`, a whole number of pages; for `insert_chain`."""
        made: list[Node] = []
        key, child_key = parent_key, self.child_key
        for start in range(0, len(stream), page_bytes):
            tokens = stream[start : start + page_bytes]
            key = child_key(key, tokens)
            made.append(Node(key, None, tokens, []))
        return made

    def find(self, key: bytes, tokens: bytes) -> Node | None:
        """The node with this key, if its stored tokens really are these."""
        node = self.nodes.get(key)
        return node if node is not None and node.tokens == tokens else None

    def insert(self, key: bytes, parent: Node | None, tokens: bytes, pages: list[int]) -> Node:
        assert key not in self.nodes, "published twice"
        self._num_inserted += 1
        node = Node(key, parent, tokens, pages, self._num_inserted)
        self.nodes[key] = node
        self._ghosts.pop(key, None)
        if parent is not None:
            parent.num_children += 1
        if self.listener is not None:
            self.listener.inserted(node)
        return node

    def insert_chain(
        self, parent: Node | None, chain: Sequence[Node], pages: Iterable[list[int]]
    ) -> None:
        """Insert a chain: the first node is a child of `parent`, each other of the one before."""
        nodes, ghosts, number = self.nodes, self._ghosts, self._num_inserted
        for node, own in zip(chain, pages, strict=True):
            key = node.key
            assert key not in nodes, "published twice"
            number += 1
            node.parent, node.pages, node.number = parent, own, number
            nodes[key] = node
            if key in ghosts:
                del ghosts[key]
            if parent is not None:
                parent.num_children += 1
            parent = node
        self._num_inserted = number
        if self.listener is not None:
            for node in chain:
                self.listener.inserted(node)

    def evict(self, node: Node, page: int) -> Sequence[int]:
        """Drop a page nobody holds; returns the pages of its node that are useless without it."""
        pages = node.pages
        group = pages.index(page) if len(pages) > 1 else 0
        pages[group] = GONE
        if self.windows[group] is not None:
            self._prune(node)
            return ()
        self.remove(node)
        if len(pages) == 1:
            return ()
        node.pages = [GONE] * len(pages)
        return [other for other in pages if other != GONE]

    def _prune(self, node: Node | None) -> None:
        """Remove a node that holds nothing and leads nowhere, then perhaps its parent."""
        while node is not None and node.num_children == 0 and not any(node.pages):
            self.remove(node)
            node = node.parent

    def remove(self, node: Node) -> None:
        assert node.num_children == 0, "removed a node with children"
        key, parent, ghosts = node.key, node.parent, self._ghosts
        del self.nodes[key]
        if parent is not None:
            parent.num_children -= 1
        if self.listener is not None:
            self.listener.removed(node)
        ghosts[key] = None
        if len(ghosts) > MAX_GHOSTS:
            ghosts.popitem(last=False)

    def was_evicted(self, key: bytes) -> bool:
        return key in self._ghosts


def longest_hit(path: Sequence[Node], windows: Sequence[Window], page_size: int) -> int:
    """How many columns of a path can be adopted: at its end every window must be complete."""
    windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
    if not windowed:
        return len(path)
    unbroken = {group: 0 for group, _ in windowed}  # from this column to here nothing is gone
    longest = 0
    for column, node in enumerate(path):
        for group, _ in windowed:
            if node.pages[group] == GONE:
                unbroken[group] = column + 1
        end = (column + 1) * page_size
        if all(unbroken[g] <= first_column(end, window, page_size) for g, window in windowed):
            longest = column + 1
    return longest
