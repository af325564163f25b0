"""Invariants of the page bookkeeping; run after every step in tests and when the engine is idle.

free + cached + live = total, no page owned in two ways, every published page's ancestors are
published, every table entry is referenced, every reference has a holder.
"""

from __future__ import annotations

from collections import Counter

from quire.kv.manager import KVManager


def check(kv: KVManager) -> None:
    """Raise AssertionError naming the first broken invariant."""
    alloc, tree = kv.allocator, kv.tree
    holders = Counter(page for pages in kv.holdings().values() for page in pages)
    live = [page for page, refs in enumerate(alloc.refs) if refs]
    assert len(live) + alloc.num_cached + alloc.num_empty == alloc.num_pages, (
        f"{len(live)} live + {alloc.num_cached} cached + {alloc.num_empty} empty"
        f" != {alloc.num_pages} pages"
    )
    for page, refs in enumerate(alloc.refs):
        assert refs == holders[page], f"page {page}: {refs} refs, {holders[page]} holders"
        assert not (refs and alloc.is_cached(page)), f"page {page} both live and cached"
    for pages in kv.holdings().values():
        assert len(set(pages)) == len(pages), f"a table names a page twice: {pages}"
    children: Counter[bytes] = Counter()
    for key, node in tree.nodes.items():
        assert node.key == key and alloc.node_of[node.page] is node, (
            f"node of page {node.page} lost"
        )
        assert alloc.refs[node.page] or alloc.is_cached(node.page), (
            f"page {node.page} published, empty"
        )
        if node.parent is not None:
            assert tree.nodes.get(node.parent.key) is node.parent, "orphan in the prefix tree"
            assert not alloc.refs[node.page] or alloc.refs[node.parent.page], (
                "live child, dead parent"
            )
            children[node.parent.key] += 1
    for node in tree.nodes.values():
        assert node.num_children == children[node.key], "child count is off"
    published = sum(node is not None for node in alloc.node_of)
    assert published == len(tree.nodes), f"{published} published pages, {len(tree.nodes)} nodes"
