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

from quire.kv.groups import PageNeeds, Window, first_column, kept_window
from quire.kv.holding import CacheCounts, Holding
from quire.kv.homes import allocator_of
from quire.kv.lookup import ITEM, cached_path
from quire.kv.prefix import GONE, Node, PrefixTree
from quire.kv.tier_index import TierIndex
from quire.kv.transfers import Transfers
from quire.request import Request, RequestId
from quire.step import PageCopy, PageLoad, PageSave, PageWrite

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
        secret: bytes | None = None,
        num_homes: int = 1,
    ) -> None:
        """`secret` makes the keys of prefixes; None: they are for this process alone.
        `num_homes`: ranks that keep so many pages each, of their own requests (`homes.py`)."""
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.windows, self.num_groups = windows, len(windows)
        self.tree = PrefixTree(windows) if secret is None else PrefixTree(windows, secret)
        self.num_homes = num_homes
        self.allocator = allocator_of(num_pages, self.tree.evict, num_homes)
        self.counts = CacheCounts()
        self._windowed = [(g, window) for g, window in enumerate(windows) if window is not None]
        self._held: dict[RequestId, Holding] = {}
        self._writes: list[PageWrite] = []
        self._copies: list[PageCopy] = []
        self.transfers: Transfers | None = None  # where pages are kept outside the pool too

    def connect(self, tiers: TierIndex) -> None:
        """Save pages to these tiers, and load from them what the pool has not."""
        self.transfers = Transfers(tiers, self.tree, self.page_size)

    # ------------------------------------------------------------ taking

    def match(self, request: Request) -> int:
        """Adopt the longest cached prefix; returns tokens that need no computing.

        At least one token is always left to feed: its logits are what the request came for.
        """
        path, ahead = self._path(request), list[Node]()
        if path is not None and self.transfers is not None:
            ahead = self.transfers.ready(request, path)
        held = self._take_up(request, path or [], len(ahead))
        pages = self.allocator.of(request.home)
        if ahead and self.transfers and not self.transfers.load(held, ahead, pages):
            self.release(request)
            held = self._take_up(request, path or [], 0)
        return min(len(held.tables[0]) * self.page_size, len(request.tokens) - 1)

    def find(self, request: Request) -> list[Node]:
        """What `match` would adopt of the pages that the request's home has."""
        return self._path(request) or []

    def fetch(self, request: Request) -> bool:
        """Have pages that tiers hold brought into memory; True: `match` shall wait."""
        if self.transfers is None:
            return False
        path = self._path(request)
        return path is not None and self.transfers.ask(request, path)

    def is_arriving(self, request: Request) -> bool:
        """Whether pages for this request are still on their way."""
        return self.transfers is not None and self.transfers.tiers.is_bringing(request.id)

    def _path(self, request: Request) -> list[Node] | None:
        if not self.prefix_caching:
            request.cache_note = "prefix caching is off"
            return None
        return cached_path(request, self.tree, self.page_size)

    def _take_up(self, request: Request, path: list[Node], num_ahead: int) -> Holding:
        """Adopt a path, for a request that goes on `num_ahead` columns behind it."""
        tables = [[node.pages[group] for node in path] for group in range(self.num_groups)]
        held = Holding(tables, [0] * self.num_groups, path)
        self._adopt(request, held, (len(path) + num_ahead) * self.page_size)
        return held

    def _adopt(self, request: Request, held: Holding, end: int) -> None:
        """Hold these pages, except those that no query from position `end` on can see."""
        self._held[request.id] = held
        if end == 0:
            return
        for group, window in self._windowed:
            held.firsts[group] = first = first_column(end, window, self.page_size)
            held.tables[group][:first] = [GONE] * first
        allocator = self.allocator.of(request.home)
        for page in held.pages():
            allocator.share(page)

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
        size, allocator, tables = self.page_size, self.allocator.of(request.home), held.tables
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
        allocator = self.allocator.of(request.home)
        source, target = held.tables[group][column], allocator.take()
        held.tables[group][column] = target
        del held.nodes[column:]
        held.ahead.clear()
        held.next_edge = 0
        self._copies.append(PageCopy(source, target))
        self._writes.append(PageWrite(request.row, column, target, group))
        allocator.drop(source)
        self.counts.copied_pages += 1

    def admit(self, request: Request, num_cached: int) -> None:
        """The request has its row: stage the pages it adopted and count the hit."""
        self.counts.prompt_tokens += len(request.tokens)
        held = self._held[request.id]
        if num_cached == 0 and not held.num_loaded:
            return
        self.counts.hit_tokens += num_cached
        self.counts.loaded_tokens += held.num_loaded * self.page_size
        end = -(-num_cached // self.page_size)
        if held.num_loaded:  # the last page is ours and need not be copied to be written
            end = len(held.nodes) + len(held.ahead)
        for group, (table, first) in enumerate(zip(held.tables, held.firsts, strict=True)):
            self._stage(request.row, group, first, table[first:end])
        for node in held.nodes[: num_cached // self.page_size]:
            node.num_hits += 1

    def take_edits(self) -> tuple[tuple[PageWrite, ...], tuple[PageCopy, ...]]:
        edits = tuple(self._writes), tuple(self._copies)
        self._writes.clear()
        self._copies.clear()
        return edits

    def take_transfers(self) -> tuple[tuple[PageSave, ...], tuple[PageLoad, ...]]:
        return ((), ()) if self.transfers is None else self.transfers.take()

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
        if held.num_loaded:
            held.num_loaded = 0
            self.let_go(request)
        for group, window in self._windowed:
            self._move_window(request, group, first_column(request.num_computed, window, size))
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
        known = ahead or nodes
        key = known[-1].key if known else self.tree.root_of(request)
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
                if page != GONE:
                    node_of[page] = node
        nodes += fresh
        if self.transfers is not None:
            self.transfers.published(fresh)

    def _publish(self, request: Request, held: Holding, column: int) -> None:
        """The same for one page, as a decode fills it."""
        size = self.page_size
        parent = held.nodes[-1] if held.nodes else None
        parent_key = parent.key if parent else self.tree.root_of(request)
        tokens = request.tokens[column * size : (column + 1) * size].tobytes()
        key = self.tree.child_key(parent_key, tokens)
        node = self.tree.find(key, tokens)
        if node is None:
            pages = [table[column] for table in held.tables]
            node = self.tree.insert(key, parent, tokens, pages)
            for page in pages:
                self.allocator.node_of[page] = node
            if self.transfers is not None:
                self.transfers.published([node])
        else:
            for group in range(len(held.tables)):
                self._merge(request, held, node, group, column)
        held.nodes.append(node)

    def _merge(self, request: Request, held: Holding, node: Node, group: int, column: int) -> None:
        """Content was computed twice: take the tree's page and free ours, or fill its gap."""
        ours, theirs = held.tables[group][column], node.pages[group]
        if ours == GONE:  # loaded from behind the window
            return
        if theirs == GONE:
            node.pages[group] = ours
            self.allocator.node_of[ours] = node
        elif theirs != ours:
            allocator = self.allocator.of(request.home)
            allocator.share(theirs)
            held.tables[group][column] = theirs
            self._writes.append(PageWrite(request.row, column, theirs, group))
            allocator.drop(ours)
            self.counts.shared_pages += 1

    def _move_window(self, request: Request, group: int, first: int) -> None:
        held, allocator = self._held[request.id], self.allocator.of(request.home)
        table = held.tables[group]
        for column in range(held.firsts[group], first):
            allocator.drop(table[column])
            table[column] = GONE
            self.counts.window_pages += 1
        held.firsts[group] = max(first, held.firsts[group])

    def release(self, request: Request) -> None:
        """Give every page back, deepest first; published ones stay cached. Idempotent.

        What was brought into memory for the request stays, for its next try, until `let_go`."""
        held = self._held.pop(request.id, None)
        if held is None:
            return
        pages = held.pages()
        if self._copies:  # a planned copy into a page that goes back must not happen
            gone = set(pages)
            self._copies = [c for c in self._copies if c.target not in gone]
        if self.transfers is not None:
            self.transfers.forget_loads(pages)
        self.allocator.of(request.home).drop_many(reversed(pages))

    def let_go(self, request: Request) -> None:
        """The request ended or lost its row: forget what tiers brought for it."""
        if self.transfers is not None:
            self.transfers.let_go(request)

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

    @property
    def num_available(self) -> int:
        return self.allocator.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` tokens holds when all are computed."""
        return PageNeeds(self.page_size, self.windows).of(num_tokens)
