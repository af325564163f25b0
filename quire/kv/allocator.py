"""PageAllocator: who holds which page. Reference counts, an empty list and an LRU of cached pages.

A page is in exactly one of three states:
    live    some request holds it (refs > 0); it may also be published in the prefix tree
    cached  nobody holds it, the prefix tree still knows its content; oldest evicted first
    empty   nobody holds it and nobody knows its content
It decides nothing about content. When a cached page is evicted, `on_evict` tells `prefix.py`, which
names the pages that are useless without it. Which layer group uses a page does not matter here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from quire.kv.prefix import Node

SCRATCH_PAGE = 0  # never handed out: padding rows of captured graphs read and write it


# (node, its evicted page) -> cached pages of that node which must go too
OnEvict = Callable[[Node, int], Sequence[int]]


class PageRecords:
    """What is known of each page, by its number."""

    def __init__(self, num_pages: int) -> None:
        self.refs = [0] * num_pages
        self.node_of: list[Node | None] = [None] * num_pages  # published content of each page


class PageAllocator:
    def __init__(
        self,
        num_pages: int,
        on_evict: OnEvict,
        records: PageRecords | None = None,
        first: int = SCRATCH_PAGE + 1,
    ) -> None:
        """`first`: the first page to hand out, where `records` are of others' pages as well."""
        if num_pages < 2:
            raise ValueError(f"got num_pages={num_pages}, want at least 2 (one is scratch)")
        self.num_pages = num_pages - 1  # that can be handed out
        records = records or PageRecords(num_pages)
        self.refs, self.node_of = records.refs, records.node_of
        end = first + self.num_pages
        self._empty = list(range(end - 1, first - 1, -1))  # a stack: low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._on_evict = on_evict
        self.num_evicted = 0

    def of(self, home: int) -> PageAllocator:
        """The pages of a rank (`homes.py`): all, where there is one."""
        return self

    def home_of(self, page: int) -> int:
        return 0

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
            self.num_evicted += 1
            self._unpublish(page)
        self.refs[page] = 1
        return page

    def take_many(self, count: int) -> list[int]:
        """What `count` calls of `take` would return, in their order."""
        taken: list[int] = []
        empty, refs = self._empty, self.refs
        while (missing := count - len(taken)) > 0:
            if not empty:
                taken.append(self.take())  # an eviction may leave more than one page empty
                continue
            top = empty[-missing:]
            del empty[-missing:]
            top.reverse()
            for page in top:
                refs[page] = 1
            taken += top
        return taken

    def _unpublish(self, page: int) -> None:
        """A page left the cache: tell the tree, and empty the pages that are useless without it."""
        node = self.node_of[page]
        assert node is not None, f"cached page {page} has no node"
        self.node_of[page] = None
        orphans = self._on_evict(node, page)
        if not orphans:
            return
        for other in orphans:
            del self._cached[other]
            self.node_of[other] = None
        self._empty += orphans

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

    def drop_many(self, pages: Iterable[int]) -> None:
        """`drop` for each page, in this order."""
        refs, node_of, empty, cached = self.refs, self.node_of, self._empty, self._cached
        for page in pages:
            left = refs[page] = refs[page] - 1
            if left > 0:
                continue
            assert left == 0, f"page {page} dropped more often than held"
            if node_of[page] is None:
                empty.append(page)
            else:
                cached[page] = None

    def is_writable(self, page: int) -> bool:
        """Only a page with one holder and no published content may be written."""
        return self.refs[page] == 1 and self.node_of[page] is None

    def flush(self) -> int:
        """Forget all cached content; live pages keep theirs. Returns pages emptied."""
        count = len(self._cached)
        while self._cached:
            page, _ = self._cached.popitem(last=False)
            self._unpublish(page)
            self._empty.append(page)
        return count
