"""Invariants of the page bookkeeping; run after every step in tests and when the engine is idle.

free + cached + live = total, no page owned in two ways, every published page's ancestors are
published, every table entry is referenced, every reference has a holder. With several layer
groups: a table is whole from its first column on, and what a request holds of a published column
is what the prefix tree names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from quire.kv.holding import Holding
from quire.kv.manager import KVManager
from quire.kv.prefix import GONE, Node

SLICE = 2048  # nodes looked at in a few milliseconds


def check(kv: KVManager) -> None:
    """Raise AssertionError naming the first broken invariant."""
    for _ in check_in_slices(kv):
        pass


def check_in_slices(kv: KVManager) -> Iterator[None]:
    """The same check, a few milliseconds at a time: a full pool takes a hundred.

    If anything changes the pages between two slices, drop the iterator and begin again later."""
    _check_counts(kv)
    yield
    for held in kv.look().values():
        _check_holding(kv, held)
    yield
    yield from _check_tree(kv)


def _check_counts(kv: KVManager) -> None:
    alloc = kv.allocator
    holders = Counter(page for pages in kv.holdings().values() for page in pages)
    num_live = len(alloc.refs) - alloc.refs.count(0)
    assert num_live + alloc.num_cached + alloc.num_empty == alloc.num_pages, (
        f"{num_live} live + {alloc.num_cached} cached + {alloc.num_empty} empty"
        f" != {alloc.num_pages} pages"
    )
    wanted = [0] * len(alloc.refs)
    for page, count in holders.items():
        wanted[page] = count
    if alloc.refs != wanted:
        for page, refs in enumerate(alloc.refs):
            assert refs == holders[page], f"page {page}: {refs} refs, {holders[page]} holders"
    for page in holders:
        assert not alloc.is_cached(page), f"page {page} both live and cached"


def _check_holding(kv: KVManager, held: Holding) -> None:
    pages = held.pages()
    assert len({kv.allocator.home_of(page) for page in pages}) <= 1, f"several homes: {held.tables}"
    assert len(set(pages)) == len(pages), f"tables name a page twice: {held.tables}"
    for group, (table, first) in enumerate(zip(held.tables, held.firsts, strict=True)):
        assert set(table[:first]) <= {GONE}, f"group {group}: pages before column {first}"
        assert GONE not in table[first:], f"group {group}: a hole in {table} after column {first}"
        assert first == 0 or kv.windows[group] is not None, f"full group {group} gave pages back"
        for column, node in enumerate(held.nodes[first:], first):
            assert node.pages[group] == table[column], (
                f"group {group}, column {column}: holds {table[column]}, published {node.pages}"
            )
    for node in held.nodes:
        assert kv.tree.nodes.get(node.key) is node, "a request's prefix left the tree"


def _check_tree(kv: KVManager) -> Iterator[None]:
    alloc, nodes = kv.allocator, kv.tree.nodes
    children: Counter[bytes] = Counter()
    for number, (key, node) in enumerate(nodes.items(), 1):
        assert node.key == key, "a node under another's key"
        _check_node(kv, node)
        parent = node.parent
        if parent is not None:
            assert nodes.get(parent.key) is parent, "orphan in the prefix tree"
            children[parent.key] += 1
        if number % SLICE == 0:
            yield
    named = 0
    for number, node in enumerate(nodes.values(), 1):
        assert node.num_children == children[node.key], "child count is off"
        assert node.num_children or any(node.pages), "a leaf without pages"
        named += len(node.pages) - node.pages.count(GONE)
        if number % SLICE == 0:
            yield
    published = len(alloc.node_of) - alloc.node_of.count(None)
    assert published == named, f"{published} published pages, {named} in the tree"


def _check_node(kv: KVManager, node: Node) -> None:
    alloc, above = kv.allocator, node.parent
    for group, (page, window) in enumerate(zip(node.pages, kv.windows, strict=True)):
        if page == GONE:
            assert window is not None, f"full group {group} lost its page of a published prefix"
            continue
        assert alloc.node_of[page] is node, f"node of page {page} lost"
        assert alloc.refs[page] or alloc.is_cached(page), f"page {page} published, empty"
        if not alloc.refs[page]:
            continue
        for other, full in zip(node.pages, kv.windows, strict=True):
            assert full is not None or alloc.refs[other], (
                f"page {page} live, its node's {other} not"
            )
        if window is None and above is not None:
            assert alloc.refs[above.pages[group]], "live child, dead parent"
