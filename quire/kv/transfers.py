"""Transfers: which pages are saved outside the pool, and which are loaded instead of computed.

A page is saved once, when it is published: full, verified and never written again. Its copy is
staged for the next plan, whose saves come before anything else, so it does not matter if the page
has another holder by then. A loaded page is like a computed one: it belongs to the request alone
until `KVManager.commit` publishes it, so a step that fails leaves nothing in the tree that was not
loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from quire.kv.allocator import PageAllocator
from quire.kv.holding import Holding
from quire.kv.lookup import ITEM
from quire.kv.prefix import GONE, Node, PrefixTree
from quire.kv.tier_index import TierIndex, Wanted
from quire.request import Request, RequestId
from quire.step import PageLoad, PageSave


class Asked(NamedTuple):
    """What tiers were asked for on behalf of a request, which is looked for again when it starts:
    keys are not made twice."""

    begin: int  # pages of the prefix before it
    chain: Sequence[Wanted]


NOTHING_ASKED = Asked(0, ())


class Transfers:
    def __init__(self, tiers: TierIndex, tree: PrefixTree, page_size: int) -> None:
        self.tiers = tiers
        self._tree, self._page_size = tree, page_size
        self._saves: list[PageSave] = []
        self._loads: list[PageLoad] = []
        self._asked: dict[RequestId, Asked] = {}

    # ------------------------------------------------------------ saving

    def published(self, nodes: Iterable[Node]) -> None:
        """These nodes are new in the tree: save those that are whole and that no tier has."""
        has = self.tiers.has
        for node in nodes:
            if GONE not in node.pages and not has(node.key):
                self._saves.append(PageSave(node.key, node.tokens, tuple(node.pages)))

    def lend(self, request: Request) -> list[Wanted]:
        """The full pages of a prompt that ran; those that only the pool has are saved again.

        The request has them pinned until `let_go`, as far as they are in memory already."""
        wanted = list(islice(self._beyond(request, ()), request.num_prompt // self._page_size))
        for one in wanted:
            node = self._tree.find(one.key, one.tokens)
            if not self.tiers.pin(request.id, one) and node is not None and GONE not in node.pages:
                self._saves.append(PageSave(node.key, node.tokens, tuple(node.pages)))
        return wanted

    def pages_of(self, nodes: Sequence[Wanted]) -> list[Sequence[int]]:
        """Of the first of these nodes that the pool has whole."""
        found = (self._tree.find(one.key, one.tokens) for one in nodes)
        whole = takewhile(lambda node: node is not None and GONE not in node.pages, found)
        return [node.pages for node in whole if node is not None]

    # ------------------------------------------------------------ loading

    def ask(self, request: Request, path: Sequence[Node]) -> bool:
        """Let what follows `path` be brought into memory; True: the request waits for it.

        Asked once before each start: whatever has become of it then is taken as it is."""
        if request.id in self._asked:
            return False
        self._asked[request.id] = Asked(len(path), [])
        source, has = request.kv_source, self.tiers.has
        wanted = self._beyond(request, path)
        if not source:  # what another engine has is not known here
            wanted = takewhile(lambda one: has(one.key), wanted)
        chain = list(wanted)
        self._asked[request.id] = Asked(len(path), chain)
        return bool(chain) and self.tiers.fetch(request.id, chain, source)

    def ready(self, request: Request, path: Sequence[Node]) -> list[Node]:
        """Nodes behind `path` that are in memory, and stay there until `let_go`."""
        pin, owner = self.tiers.pin, request.id
        begin, chain = self._asked.get(owner, NOTHING_ASKED)
        skipped = len(path) - begin  # of what was asked for, so much the pool has found meanwhile
        known = chain[skipped:] if skipped >= 0 else []
        in_memory = list(takewhile(lambda one: pin(owner, one), known))
        if len(in_memory) == len(known):  # there may be more by now
            rest = self._beyond(request, path, known)
            in_memory += takewhile(lambda one: pin(owner, one), rest)
        if not in_memory and owner in self._asked:
            self._asked[owner] = NOTHING_ASKED  # its keys are of no use any more
        return [Node(one.key, None, one.tokens, []) for one in in_memory]

    def load(self, held: Holding, ahead: list[Node], allocator: PageAllocator) -> bool:
        """Put pages that are loaded behind a path; False, and no change: there are too few."""
        path, end = held.nodes, len(held.nodes) + len(ahead)
        # A table ends with its path or, where the window begins later, with what is gone.
        if sum(end - len(table) for table in held.tables) > allocator.num_available:
            return False
        columns = [*path, *ahead]
        for group, table in enumerate(held.tables):
            pages = allocator.take_many(end - len(table))
            for node, page in zip(columns[len(table) :], pages, strict=True):
                self._loads.append(PageLoad(node.key, group, page))
            table += pages
        held.ahead, held.num_loaded = ahead, len(ahead)
        if min(held.firsts) >= len(path):  # no page of the path is held: it may leave the tree
            held.ahead = [*(Node(node.key, None, node.tokens, []) for node in path), *ahead]
            held.nodes = []
        return True

    def let_go(self, request: Request) -> None:
        """The request runs, or will not: what was brought for it is not needed any more."""
        self._asked.pop(request.id, None)
        self.tiers.let_go(request.id)

    def _beyond(
        self, request: Request, path: Sequence[Node], known: Sequence[Wanted] = ()
    ) -> Iterator[Wanted]:
        """The full pages of a request's tokens after those of `path` and of `known`."""
        tree, size = self._tree, self._page_size
        last = known or path
        key = last[-1].key if last else tree.root_of(request)
        stream = request.tokens[(len(path) + len(known)) * size :].tobytes()
        for start in range(0, len(stream) // (size * ITEM) * size * ITEM, size * ITEM):
            tokens = stream[start : start + size * ITEM]
            key = tree.child_key(key, tokens)
            yield Wanted(key, tokens)

    # ------------------------------------------------------------ plans

    def take(self) -> tuple[tuple[PageSave, ...], tuple[PageLoad, ...]]:
        taken = tuple(self._saves), tuple(self._loads)
        self._saves.clear()
        self._loads.clear()
        return taken

    def forget_loads(self, pages: Collection[int]) -> None:
        """Pages went back before their loads happened: others may write them in the same step."""
        if self._loads:
            gone = set(pages)
            self._loads = [load for load in self._loads if load.page not in gone]
