"""KVManager: the only memory object the scheduler sees. Pages of requests, without the bytes.

It matches prompts against the prefix tree, reserves pages, publishes full verified pages and
takes everything back. A request has one page table for each layer group (`groups.py`); windowed
groups give pages back as soon as no query can see them. Edits to the device's page tables and
copies of shared pages are staged here and drained into the next plan.

Why leaves are always evicted first: a request holds every page of its own prefix in full groups,
so a live page has live ancestors; `release` drops the deepest page first, so in the LRU order a
child is always older than its parent. Publishing content that another page already holds would
break the first half (we would hold the copy, not the ancestor in the tree), so `commit` swaps to
the tree's page. A request that holds a node's page in one group also holds that node's pages in all
full groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count, repeat

from quire.kv.allocator import PageAllocator
from quire.kv.groups import PageNeeds, Window, first_column, kept_window
from quire.kv.holding import CacheCounts, Holding
from quire.kv.prefix import GONE, Node, PrefixTree, longest_hit
from quire.request import Request, RequestId
from quire.step import PageCopy, PageWrite

WORTH_SHARING = 512  # leading tokens in common from which decodes attend them together
ITEM = 4  # bytes of one token id in the hashed stream
NEVER = 1 << 62  # a position no request reaches

# Makes a PageWrite from a tuple in half the time: a long prompt stages hundreds.
_page_write: Callable[[tuple[int, int, int, int]], PageWrite] = partial(tuple.__new__, PageWrite)


class KVManager:
    """`windows` has an entry for each layer group: how far back its layers see, None for all."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_caching: bool = True,
        windows: tuple[Window, ...] = (None,),
    ) -> None:
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.windows, self.num_groups = windows, len(windows)
        self.tree = PrefixTree(windows)
        self.allocator = PageAllocator(num_pages, on_evict=self.tree.evict)
        self.counts = CacheCounts()
        self._windowed = [(g, window) for g, window in enumerate(windows) if window is not None]
        self._held: dict[RequestId, Holding] = {}
        self._writes: list[PageWrite] = []
        self._copies: list[PageCopy] = []

    # ------------------------------------------------------------ taking

    def match(self, request: Request) -> int:
        """Adopt the longest cached prefix; returns tokens that need no computing.

        At least one token is always left to feed: its logits are what the request came for.
        """
        path: list[Node] = []
        if not self.prefix_caching:
            request.cache_note = "prefix caching is off"
        elif request.params.prompt_logprobs is not None and request.num_output == 0:
            request.cache_note = "prompt_logprobs needs every position computed"
        elif request.params.pooling == "mean":
            request.cache_note = "mean pooling needs every position computed"
        elif len(request.tokens) < self.page_size:
            request.cache_note = f"prompt is shorter than one page of {self.page_size} tokens"
        else:
            path = self._walk(request)
        end = len(path) * self.page_size
        tables = [[node.pages[group] for node in path] for group in range(self.num_groups)]
        self._adopt(request, Holding(tables, [0] * self.num_groups, path), end)
        return min(end, len(request.tokens) - 1)

    def _walk(self, request: Request) -> list[Node]:
        """The nodes of the longest prefix that can be adopted; notes why it is no longer."""
        tree, size = self.tree, self.page_size
        stream = request.tokens.tobytes()
        key = self._root(request)
        path: list[Node] = []
        for start in range(0, len(request.tokens) // size * size, size):
            tokens = stream[start * ITEM : (start + size) * ITEM]
            key = tree.child_key(key, tokens)
            node = tree.find(key, tokens)
            if node is None:
                seen = "was evicted" if tree.was_evicted(key) else "was not seen before"
                request.cache_note = f"page {start // size} of this prefix {seen}"
                break
            path.append(node)
        longest = longest_hit(path, self.windows, size) if self._windowed else len(path)
        if longest < len(path):
            request.cache_note = (
                f"{longest} of {len(path)} known pages of this prefix are usable: pages of layers"
                " that see only a window were evicted"
            )
        return path[:longest]

    def _root(self, request: Request) -> bytes:
        return self.tree.root_key(request.cache_salt, request.adapter.digest)

    def _adopt(self, request: Request, held: Holding, end: int) -> None:
        """Hold these pages, except those that no query from position `end` on can see."""
        self._held[request.id] = held
        if end == 0:
            return
        for group, window in self._windowed:
            held.firsts[group] = first = first_column(end, window, self.page_size)
            held.tables[group][:first] = [GONE] * first
        for page in held.pages():
            self.allocator.share(page)

    def fork(self, parent: Request, child: Request) -> int:
        """Let a sibling with the same prompt share the parent's prompt pages, the last included."""
        source = self._held.get(parent.id)
        if source is None or not self._can_fork(parent, source):
            return self.match(child)
        count = -(-parent.num_prompt // self.page_size)
        tables = [table[:count] for table in source.tables]
        nodes = source.nodes[: parent.num_prompt // self.page_size]
        self._adopt(child, Holding(tables, [0] * self.num_groups, nodes), parent.num_prompt)
        source.num_ready = 0  # the parent's last page is shared now
        return child.num_prompt - 1

    def _can_fork(self, parent: Request, source: Holding) -> bool:
        """Whether the parent still holds every page that a sibling at the prompt's end reads."""
        if parent.num_computed < parent.num_prompt:
            return False
        end, size = parent.num_prompt, self.page_size
        if any(source.firsts[g] > first_column(end, window, size) for g, window in self._windowed):
            return False
        staged = {copy.target for copy in self._copies}  # not filled before this step runs
        return staged.isdisjoint(source.pages())

    def reserve(self, request: Request, start: int, upto: int, ahead: int = 0) -> bool:
        """Make positions [start, upto) writable: new pages, and copies of shared ones.

        All groups or none; False when the pool cannot give enough pages. Full groups get pages up
        to `ahead` at once. For windowed groups it is enough that they could get there.
        """
        held = self._held[request.id]
        if upto <= held.num_ready:
            return True
        size, allocator, tables = self.page_size, self.allocator, held.tables
        first, near, far = start // size, -(-upto // size), -(-max(upto, ahead) // size)
        num_needed = 0
        shared: list[tuple[int, int]] = []
        for group, window in enumerate(self.windows):
            table = tables[group]
            have, wanted = len(table), far if window is None else near
            num_new = max(0, wanted - have)
            for column in range(first, have):
                if not allocator.is_writable(table[column]):
                    shared.append((group, column))
                    num_new += 1
            if window is not None and ahead > upto:
                most = PageNeeds(size, (window,), upto - start).of(ahead)
                num_new = max(num_new, most - have + held.firsts[group])
            num_needed += num_new
        if num_needed > allocator.num_available:
            return False
        for group, column in shared:
            self._copy_page(request, held, group, column)
        for group, window in enumerate(self.windows):
            table = tables[group]
            have, wanted = len(table), far if window is None else near
            if wanted == have + 1:  # the page of a decode
                table.append(page := allocator.take())
                self._writes.append(PageWrite(request.row, have, page, group))
            elif wanted > have:
                table += allocator.take_many(wanted - have)
                self._stage(request.row, group, have, table[have:])
        held.num_ready = min(map(len, tables)) * size
        return True

    def _stage(self, row: int, group: int, first: int, pages: Iterable[int]) -> None:
        """Stage these pages for the device's table, from column `first` on."""
        self._writes += map(_page_write, zip(repeat(row), count(first), pages, repeat(group)))

    def _copy_page(self, request: Request, held: Holding, group: int, column: int) -> None:
        source, target = held.tables[group][column], self.allocator.take()
        held.tables[group][column] = target
        del held.nodes[column:]
        held.ahead.clear()
        held.next_edge = 0
        self._copies.append(PageCopy(source, target))
        self._writes.append(PageWrite(request.row, column, target, group))
        self.allocator.drop(source)
        self.counts.copied_pages += 1

    def admit(self, request: Request, num_cached: int) -> None:
        """The request has its row: stage the pages it adopted and count the hit."""
        self.counts.prompt_tokens += len(request.tokens)
        if num_cached == 0:
            return
        self.counts.hit_tokens += num_cached
        held = self._held[request.id]
        end = -(-num_cached // self.page_size)
        for group, (table, first) in enumerate(zip(held.tables, held.firsts, strict=True)):
            self._stage(request.row, group, first, table[first:end])
        for node in held.nodes[: num_cached // self.page_size]:
            node.num_hits += 1

    def take_edits(self) -> tuple[tuple[PageWrite, ...], tuple[PageCopy, ...]]:
        edits = tuple(self._writes), tuple(self._copies)
        self._writes.clear()
        self._copies.clear()
        return edits

    # ------------------------------------------------------------ giving

    def commit(self, request: Request) -> None:
        """Publish pages that are now full of verified tokens; give back those behind a window.

        A step in flight feeds positions from `num_computed` on, so it sees no page behind the
        window. The next holder of such a page writes it in a later step.
        """
        held = self._held[request.id]
        if request.num_computed < held.next_edge:
            return
        size = self.page_size
        edge = NEVER
        if self.prefix_caching:
            num_new = request.num_computed // size - len(held.nodes)
            if num_new == 1 and not held.ahead:
                self._publish(request, held, len(held.nodes))
            elif num_new > 0:
                self.hash_ahead(request, request.num_computed)
                self._publish_run(request, held, num_new)
            edge = (len(held.nodes) + 1) * size
        for group, window in self._windowed:
            self._move_window(held, group, first_column(request.num_computed, window, size))
            edge = min(edge, (held.firsts[group] + 1) * size + kept_window(window, size))
        held.next_edge = edge

    def hash_ahead(self, request: Request, upto: int) -> None:
        """Hash the full pages among the first `upto` tokens, so that `commit` need not do it.

        Pages with tokens that are not known yet are left to `commit`."""
        held = self._held.get(request.id)
        if held is None or not self.prefix_caching:
            return
        nodes, ahead, size = held.nodes, held.ahead, self.page_size
        start = len(nodes) + len(ahead)
        end = min(upto, len(request.tokens)) // size
        if start >= end:
            return
        last = ahead or nodes
        key = last[-1].key if last else self._root(request)
        stream = request.tokens[start * size : end * size].tobytes()
        ahead += self.tree.chain(key, stream, size * ITEM)

    def _publish_run(self, request: Request, held: Holding, num_new: int) -> None:
        """Publish the next `num_new` columns, which have been hashed."""
        nodes, tables, tree = held.nodes, held.tables, self.tree
        fresh = held.ahead[:num_new]
        del held.ahead[:num_new]
        first, end = len(nodes), len(nodes) + num_new
        for column, node in enumerate(fresh, first):
            known = tree.find(node.key, node.tokens)
            if known is None:
                break  # then the tree has none after it
            for group in range(len(tables)):
                self._merge(request, held, known, group, column)
            nodes.append(known)
        fresh = fresh[len(nodes) - first :]
        by_group = [table[len(nodes) : end] for table in tables]
        tree.insert_chain(
            nodes[-1] if nodes else None, fresh, map(list, zip(*by_group, strict=True))
        )
        node_of = self.allocator.node_of
        for pages in by_group:
            for page, node in zip(pages, fresh, strict=True):
                node_of[page] = node
        nodes += fresh

    def _publish(self, request: Request, held: Holding, column: int) -> None:
        """The same for one page, as a decode fills it."""
        size = self.page_size
        parent = held.nodes[-1] if held.nodes else None
        parent_key = parent.key if parent else self._root(request)
        tokens = request.tokens[column * size : (column + 1) * size].tobytes()
        key = self.tree.child_key(parent_key, tokens)
        node = self.tree.find(key, tokens)
        if node is None:
            pages = [table[column] for table in held.tables]
            node = self.tree.insert(key, parent, tokens, pages)
            for page in pages:
                self.allocator.node_of[page] = node
        else:
            for group in range(len(held.tables)):
                self._merge(request, held, node, group, column)
        held.nodes.append(node)

    def _merge(self, request: Request, held: Holding, node: Node, group: int, column: int) -> None:
        """Content was computed twice: take the tree's page and free ours, or fill its gap."""
        ours, theirs = held.tables[group][column], node.pages[group]
        if theirs == GONE:
            node.pages[group] = ours
            self.allocator.node_of[ours] = node
        elif theirs != ours:
            self.allocator.share(theirs)
            held.tables[group][column] = theirs
            self._writes.append(PageWrite(request.row, column, theirs, group))
            self.allocator.drop(ours)
            self.counts.shared_pages += 1

    def _move_window(self, held: Holding, group: int, first: int) -> None:
        table = held.tables[group]
        for column in range(held.firsts[group], first):
            self.allocator.drop(table[column])
            table[column] = GONE
            self.counts.window_pages += 1
        held.firsts[group] = max(first, held.firsts[group])

    def release(self, request: Request) -> None:
        """Give every page back, deepest first; published ones stay cached. Idempotent."""
        held = self._held.pop(request.id, None)
        if held is None:
            return
        pages = held.pages()
        if self._copies:  # a planned copy into a page that goes back must not happen
            gone = set(pages)
            self._copies = [c for c in self._copies if c.target not in gone]
        self.allocator.drop_many(reversed(pages))

    def flush(self) -> int:
        """Drop all cached prefixes that no running request uses. Returns pages emptied."""
        return self.allocator.flush()

    # ------------------------------------------------------------ looking

    def table(self, request: Request, group: int = 0) -> tuple[int, ...]:
        """The pages by column, GONE where a window has moved on."""
        return tuple(self._held[request.id].tables[group])

    def holdings(self) -> dict[RequestId, tuple[int, ...]]:
        """Every page each request holds, of all groups."""
        return {id: tuple(held.pages()) for id, held in self._held.items()}

    def look(self) -> dict[RequestId, Holding]:
        """The records themselves; do not change them."""
        return self._held

    @property
    def num_reserved(self) -> int:
        """Token slots that the tables of running requests cover, including columns given back."""
        columns = sum(len(table) for held in self._held.values() for table in held.tables)
        return columns * self.page_size

    def common_pages(self, request_ids: Iterable[RequestId]) -> list[int | None]:
        """For each request the last page of its first WORTH_SHARING tokens, if others hold it too.

        Looks at the layers that see everything. All pages before a common page are common too."""
        if self.windows[0] is not None:  # no layer sees everything
            return [None for _ in request_ids]
        held, refs = self._held, self.allocator.refs
        column = max(WORTH_SHARING // self.page_size, 1) - 1
        found: list[int | None] = []
        for request_id in request_ids:
            pages = held[request_id].tables[0]
            is_common = len(pages) > column and refs[pages[column]] > 1
            found.append(pages[column] if is_common else None)
        return found

    @property
    def num_available(self) -> int:
        return self.allocator.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` tokens holds when all are computed."""
        return PageNeeds(self.page_size, self.windows).of(num_tokens)
