"""PageAllocator: who holds which page. Reference counts, an empty list and an LRU of cached pages.

A page is in exactly one of three states:
    live    some request holds it (refs > 0); it may also be published in the prefix tree
    cached  nobody holds it, the prefix tree still knows its content; oldest evicted first
    empty   nobody holds it and nobody knows its content
It decides nothing about content: `prefix.py` is told through `on_evict` when a cached page goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from quire.kv.prefix import Node

SCRATCH_PAGE = 0  # never handed out: padding rows of captured graphs read and write it


class PageAllocator:
    def __init__(self, num_pages: int, on_evict: Callable[[Node], None]) -> None:
        if num_pages < 2:
            raise ValueError(f"got num_pages={num_pages}, want at least 2 (one is scratch)")
        self.num_pages = num_pages - 1  # that can be handed out
        self.refs = [0] * num_pages
        self.node_of: list[Node | None] = [None] * num_pages  # published content of each page
        self._empty = list(range(num_pages - 1, SCRATCH_PAGE, -1))  # a stack: low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._on_evict = on_evict
        self.num_evicted = 0

    @property
    def num_available(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_live(self) -> int:
        return self.num_pages - self.num_available

    def is_cached(self, page: int) -> bool:
        return page in self._cached

    def take(self) -> int:
        """An unpublished page with one reference; evicts the oldest cached one if none is empty."""
        if self._empty:
            page = self._empty.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            node = self.node_of[page]
            assert node is not None, f"cached page {page} has no node"
            self.node_of[page] = None
            self.num_evicted += 1
            self._on_evict(node)
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder; revives a cached page."""
        if self.refs[page] == 0:
            del self._cached[page]
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        """One holder fewer; the last one leaves it cached if published, empty otherwise."""
        self.refs[page] -= 1
        assert self.refs[page] >= 0, f"page {page} dropped more often than held"
        if self.refs[page]:
            return
        if self.node_of[page] is None:
            self._empty.append(page)
        else:
            self._cached[page] = None

    def is_writable(self, page: int) -> bool:
        """Only a page with one holder and no published content may be written."""
        return self.refs[page] == 1 and self.node_of[page] is None

    def flush(self) -> int:
        """Forget all cached content; live pages keep theirs. Returns pages emptied."""
        count = 0
        while self._cached:
            page, _ = self._cached.popitem(last=False)
            node = self.node_of[page]
            assert node is not None
            self.node_of[page] = None
            self._on_evict(node)
            self._empty.append(page)
            count += 1
        return count
