"""KVManager: the only memory object the scheduler sees. Pages of requests, without the bytes.

It matches prompts against the prefix tree, reserves pages, publishes full verified pages and
takes everything back. Edits to the device's page tables and copies of shared pages are staged
here and drained into the next plan.

Why leaves are always evicted first: a request holds every page of its own prefix, so a live page
has live ancestors; `release` drops the deepest page first, so in the LRU order a child is always
older than its parent. Publishing content that another page already holds would break the first
half (we would hold the copy, not the ancestor in the tree), so `commit` swaps to the tree's page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.kv.allocator import PageAllocator
from quire.kv.prefix import Node, PrefixTree
from quire.request import Request, RequestId
from quire.step import PageCopy, PageWrite

WORTH_SHARING = 512  # leading tokens in common from which decodes attend them together
ITEM = 4  # bytes of one token id in the hashed stream


@dataclass(slots=True)
class Holding:
    """What one running request holds: its page table, and the nodes of its published pages."""

    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    num_ready: int = 0  # positions from the last reserve's start up to here are writable


@dataclass(slots=True)
class CacheCounts:
    """Totals since start, for stats."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    copied_pages: int = 0
    shared_pages: int = 0  # own copies given back because the tree had the content already


class KVManager:
    def __init__(self, num_pages: int, page_size: int, prefix_caching: bool = True) -> None:
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.tree = PrefixTree()
        self.allocator = PageAllocator(num_pages, on_evict=self.tree.remove)
        self.counts = CacheCounts()
        self._held: dict[RequestId, Holding] = {}
        self._writes: list[PageWrite] = []
        self._copies: list[PageCopy] = []

    # ------------------------------------------------------------ taking

    def match(self, request: Request) -> int:
        """Adopt the longest cached prefix; returns tokens that need no computing.

        At least one token is always left to feed: its logits are what the request came for.
        """
        held = self._held[request.id] = Holding()
        if not self.prefix_caching:
            request.cache_note = "prefix caching is off"
        elif request.params.prompt_logprobs is not None and request.num_output == 0:
            request.cache_note = "prompt_logprobs needs every position computed"
        elif request.params.pooling == "mean":
            request.cache_note = "mean pooling needs every position computed"
        elif len(request.tokens) < self.page_size:
            request.cache_note = f"prompt is shorter than one page of {self.page_size} tokens"
        else:
            self._walk(request, held)
        return min(len(held.pages) * self.page_size, len(request.tokens) - 1)

    def _walk(self, request: Request, held: Holding) -> None:
        tree, size = self.tree, self.page_size
        stream = request.tokens.tobytes()
        key = tree.root_key(request.cache_salt)
        for start in range(0, len(request.tokens) // size * size, size):
            tokens = stream[start * ITEM : (start + size) * ITEM]
            key = tree.child_key(key, tokens)
            node = tree.find(key, tokens)
            if node is None:
                seen = "was evicted" if tree.was_evicted(key) else "was not seen before"
                request.cache_note = f"page {start // size} of this prefix {seen}"
                break
            self.allocator.share(node.page)
            held.pages.append(node.page)
            held.nodes.append(node)

    def fork(self, parent: Request, child: Request) -> int:
        """Let a sibling with the same prompt share the parent's prompt pages, the last included."""
        source = self._held.get(parent.id)
        staged = {copy.target for copy in self._copies}  # not filled before this step runs
        if (
            source is None
            or parent.num_computed < parent.num_prompt
            or not staged.isdisjoint(source.pages)
        ):
            return self.match(child)
        count = -(-parent.num_prompt // self.page_size)
        held = Holding(source.pages[:count], source.nodes[: parent.num_prompt // self.page_size])
        for page in held.pages:
            self.allocator.share(page)
        self._held[child.id] = held
        source.num_ready = 0  # the parent's last page is shared now
        return child.num_prompt - 1

    def reserve(self, request: Request, start: int, upto: int) -> bool:
        """Make positions [start, upto) writable: new pages, and copies of shared ones.

        All or nothing; False when the pool cannot give enough pages.
        """
        held = self._held[request.id]
        if upto <= held.num_ready:
            return True
        pages, size, allocator = held.pages, self.page_size, self.allocator
        first = start // size
        have = len(pages)
        need = (upto + size - 1) // size - have
        shared = [i for i in range(first, have) if not allocator.is_writable(pages[i])]
        if max(need, 0) + len(shared) > allocator.num_available:
            return False
        for column in shared:
            self._copy_page(request, held, column)
        for column in range(have, have + need):
            page = allocator.take()
            pages.append(page)
            self._writes.append(PageWrite(request.row, column, page))
        held.num_ready = len(pages) * size
        return True

    def _copy_page(self, request: Request, held: Holding, column: int) -> None:
        source, target = held.pages[column], self.allocator.take()
        held.pages[column] = target
        del held.nodes[column:]
        self._copies.append(PageCopy(source, target))
        self._writes.append(PageWrite(request.row, column, target))
        self.allocator.drop(source)
        self.counts.copied_pages += 1

    def admit(self, request: Request, num_cached: int) -> None:
        """The request has its row: stage the pages it adopted and count the hit."""
        held = self._held[request.id]
        for column in range(-(-num_cached // self.page_size)):
            self._writes.append(PageWrite(request.row, column, held.pages[column]))
        for node in held.nodes[: num_cached // self.page_size]:
            node.num_hits += 1
        self.counts.prompt_tokens += len(request.tokens)
        self.counts.hit_tokens += num_cached

    def take_edits(self) -> tuple[tuple[PageWrite, ...], tuple[PageCopy, ...]]:
        edits = tuple(self._writes), tuple(self._copies)
        self._writes.clear()
        self._copies.clear()
        return edits

    # ------------------------------------------------------------ giving

    def commit(self, request: Request) -> None:
        """Publish pages that are now full of verified tokens."""
        if not self.prefix_caching:
            return
        held = self._held[request.id]
        size = self.page_size
        while (len(held.nodes) + 1) * size <= request.num_computed:
            self._publish(request, held, len(held.nodes))

    def _publish(self, request: Request, held: Holding, column: int) -> None:
        size, allocator = self.page_size, self.allocator
        parent = held.nodes[-1] if held.nodes else None
        parent_key = parent.key if parent else self.tree.root_key(request.cache_salt)
        tokens = request.tokens[column * size : (column + 1) * size].tobytes()
        key = self.tree.child_key(parent_key, tokens)
        page = held.pages[column]
        node = self.tree.find(key, tokens)
        if node is None:
            node = self.tree.insert(key, parent, tokens, page)
            allocator.node_of[page] = node
        elif node.page != page:  # same content computed twice: keep the tree's page, free ours
            allocator.share(node.page)
            held.pages[column] = node.page
            self._writes.append(PageWrite(request.row, column, node.page))
            allocator.drop(page)
            self.counts.shared_pages += 1
        held.nodes.append(node)

    def release(self, request: Request) -> None:
        """Give every page back, deepest first; published ones stay cached. Idempotent."""
        held = self._held.pop(request.id, None)
        if held is None:
            return
        if self._copies:  # a planned copy into a page that goes back must not happen
            gone = set(held.pages)
            self._copies = [c for c in self._copies if c.target not in gone]
        for page in reversed(held.pages):
            self.allocator.drop(page)

    def flush(self) -> int:
        """Drop all cached prefixes that no running request uses. Returns pages emptied."""
        return self.allocator.flush()

    # ------------------------------------------------------------ looking

    def table(self, request: Request) -> tuple[int, ...]:
        return tuple(self._held[request.id].pages)

    def holdings(self) -> dict[RequestId, tuple[int, ...]]:
        return {id: tuple(held.pages) for id, held in self._held.items()}

    def common_page(self, request_id: RequestId) -> int | None:
        """The page at the end of the request's first WORTH_SHARING tokens, if others hold it too;
        then all pages before it are common as well."""
        pages, column = self._held[request_id].pages, WORTH_SHARING // self.page_size - 1
        if len(pages) <= column or self.allocator.refs[pages[column]] < 2:
            return None
        return pages[column]

    @property
    def num_available(self) -> int:
        return self.allocator.num_available

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)
