"""Invariants of the page bookkeeping; run after every step in tests and when the engine is idle.

free + cached + live = total, no page owned in two ways, every published page's ancestors are
published, every table entry is referenced, every reference has a holder. With several layer
groups: a table is whole from its first column on, and what a request holds of a published column
is what the prefix tree names.
"""

from __future__ import annotations

from collections import Counter

from quire.kv.manager import Holding, KVManager
from quire.kv.prefix import GONE, Node


def check(kv: KVManager) -> None:
    """Raise AssertionError naming the first broken invariant."""
    _check_counts(kv)
    for held in kv.look().values():
        _check_holding(kv, held)
    _check_tree(kv)


def _check_counts(kv: KVManager) -> None:
    alloc = kv.allocator
    holders = Counter(page for pages in kv.holdings().values() for page in pages)
    live = [page for page, refs in enumerate(alloc.refs) if refs]
    assert len(live) + alloc.num_cached + alloc.num_empty == alloc.num_pages, (
        f"{len(live)} live + {alloc.num_cached} cached + {alloc.num_empty} empty"
        f" != {alloc.num_pages} pages"
    )
    for page, refs in enumerate(alloc.refs):
        assert refs == holders[page], f"page {page}: {refs} refs, {holders[page]} holders"
        assert not (refs and alloc.is_cached(page)), f"page {page} both live and cached"


def _check_holding(kv: KVManager, held: Holding) -> None:
    pages = held.pages()
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


def _check_tree(kv: KVManager) -> None:
    alloc, tree = kv.allocator, kv.tree
    children: Counter[bytes] = Counter()
    for key, node in tree.nodes.items():
        assert node.key == key, "a node under another's key"
        _check_node(kv, node)
        if node.parent is not None:
            assert tree.nodes.get(node.parent.key) is node.parent, "orphan in the prefix tree"
            children[node.parent.key] += 1
    for node in tree.nodes.values():
        assert node.num_children == children[node.key], "child count is off"
        assert node.num_children or any(node.pages), "a leaf without pages"
    published = sum(node is not None for node in alloc.node_of)
    named = sum(page != GONE for node in tree.nodes.values() for page in node.pages)
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
