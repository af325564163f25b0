"""PageAllocator and PrefixTree on their own: states of a page, LRU order, chained keys."""

from __future__ import annotations

import random

import pytest

from quire.kv.allocator import SCRATCH_PAGE, PageAllocator
from quire.kv.prefix import MAX_GHOSTS, Node, PrefixTree


def make(num_pages: int) -> tuple[PageAllocator, list[Node]]:
    evicted: list[Node] = []

    def on_evict(node: Node, page: int) -> list[int]:
        assert node.pages == [page]
        evicted.append(node)
        return []

    return PageAllocator(num_pages, on_evict), evicted


def publish(alloc: PageAllocator, page: int) -> Node:
    alloc.node_of[page] = Node(bytes([page]), None, b"", [page])
    return alloc.node_of[page]


def test_every_page_but_scratch_is_handed_out_once() -> None:
    """Red when the scratch page is given away: padded graph rows write into it."""
    alloc, _ = make(6)
    taken = [alloc.take() for _ in range(alloc.num_pages)]
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert SCRATCH_PAGE not in taken
    assert (alloc.num_available, alloc.num_live) == (0, 5)


def test_a_pool_needs_a_page_besides_scratch() -> None:
    """Red when a pool that can serve nobody is accepted."""
    with pytest.raises(ValueError, match="num_pages=1"):
        make(1)


def test_the_last_holder_decides_where_a_page_goes() -> None:
    """Red when a shared page is freed early, or a published one loses its content at once."""
    alloc, evicted = make(4)
    plain, known = alloc.take(), alloc.take()
    publish(alloc, known)
    alloc.share(known)
    alloc.drop(known)
    assert alloc.num_available == 1, "one holder is left"
    alloc.drop(known)
    alloc.drop(plain)
    assert (alloc.is_cached(known), alloc.is_cached(plain)) == (True, False)
    assert (alloc.num_cached, alloc.num_empty, alloc.num_live) == (1, 2, 0)
    assert evicted == []


def test_empty_pages_are_used_before_cached_ones_then_oldest_first() -> None:
    """Red when content is thrown away while empty pages exist, or LRU becomes MRU."""
    alloc, evicted = make(5)
    pages = [alloc.take() for _ in range(3)]
    nodes = [publish(alloc, page) for page in pages]
    for page in (pages[1], pages[0], pages[2]):
        alloc.drop(page)
    assert alloc.take() not in pages
    assert evicted == []
    alloc.share(pages[1])  # a hit makes it the youngest once dropped again
    alloc.drop(pages[1])
    assert [alloc.take() for _ in range(3)] == [pages[0], pages[2], pages[1]]
    assert evicted == [nodes[0], nodes[2], nodes[1]]
    assert alloc.num_evicted == 3
    assert all(alloc.node_of[page] is None for page in pages)


def test_only_a_private_unpublished_page_may_be_written() -> None:
    """Red when copy-on-write would let two requests, or a request and the tree, share a write."""
    alloc, _ = make(4)
    page = alloc.take()
    assert alloc.is_writable(page)
    alloc.share(page)
    assert not alloc.is_writable(page)
    alloc.drop(page)
    publish(alloc, page)
    assert not alloc.is_writable(page)


def test_flush_empties_cached_pages_and_leaves_live_ones() -> None:
    """Red when a flush takes pages from running requests or forgets to tell the tree."""
    alloc, evicted = make(5)
    live, cached = alloc.take(), alloc.take()
    kept, gone = publish(alloc, live), publish(alloc, cached)
    alloc.drop(cached)
    assert alloc.flush() == 1
    assert evicted == [gone]
    assert alloc.node_of[live] is kept and alloc.node_of[cached] is None
    assert (alloc.num_cached, alloc.num_live) == (0, 1)
    assert alloc.flush() == 0


def test_dropping_too_often_is_caught() -> None:
    """Red when a double release passes: the page would be owned twice later."""
    alloc, _ = make(3)
    page = alloc.take()
    alloc.drop(page)
    with pytest.raises(AssertionError, match="dropped more often"):
        alloc.drop(page)


def pools(num_pages: int) -> list[tuple[PageAllocator, PrefixTree]]:
    """Two of the same, with a windowed group: an eviction may empty more than one page."""
    made = []
    for _ in range(2):
        tree = PrefixTree((None, 8))
        made.append((PageAllocator(num_pages, tree.evict), tree))
    return made


@pytest.mark.parametrize("seed", range(20))
def test_many_at_once_are_the_same_pages_as_one_by_one(seed: int) -> None:
    """Red when a run of pages is taken or dropped in another order than single ones: the oldest
    cached page would no longer go first, or an orphan would stay out of use."""
    rng = random.Random(seed)
    (one, tree), (many, other) = pools(24)
    held: list[int] = []
    for step in range(60):
        if rng.random() < 0.5 and one.num_available:
            count = rng.randint(1, one.num_available)
            taken = [one.take() for _ in range(count)]
            assert many.take_many(count) == taken
            held += taken
        elif len(held) > 1:
            pair, held = held[:2], held[2:]
            if rng.random() < 0.7:  # published, a page for each group
                key = step.to_bytes(2, "little")
                for alloc, known in ((one, tree), (many, other)):
                    node = known.insert(key, None, key, list(pair))
                    for page in pair:
                        alloc.node_of[page] = node
            for page in reversed(pair):
                one.drop(page)
            many.drop_many(reversed(pair))
        assert (one.refs, one._empty, list(one._cached)) == (
            many.refs,
            many._empty,
            list(many._cached),
        )
        assert (one.num_evicted, list(tree.nodes)) == (many.num_evicted, list(other.nodes))


def test_dropping_many_too_often_is_caught() -> None:
    """Red when a double release of a whole table passes."""
    alloc, _ = make(4)
    pages = alloc.take_many(3)
    alloc.drop_many(pages)
    with pytest.raises(AssertionError, match="dropped more often"):
        alloc.drop_many(pages[:1])


# ------------------------------------------------------------ tree


def test_keys_depend_on_salt_parent_tokens_and_process() -> None:
    """Red when any ingredient of the key is dropped: prefixes would be shared that differ."""
    tree, other = PrefixTree(), PrefixTree()
    root = tree.root_key("")
    keys = {
        tree.child_key(root, b"aaaa"),
        tree.child_key(root, b"aaab"),
        tree.child_key(tree.child_key(root, b"aaaa"), b"aaaa"),
        tree.child_key(tree.root_key("salt"), b"aaaa"),
        other.child_key(other.root_key(""), b"aaaa"),
    }
    assert len(keys) == 5
    assert tree.root_key("salt") == tree.root_key("salt")


def test_find_compares_the_tokens_behind_a_key() -> None:
    """Red when a hit trusts the hash alone."""
    tree = PrefixTree()
    key = tree.child_key(tree.root_key(""), b"aaaa")
    node = tree.insert(key, None, b"aaaa", [1])
    assert tree.find(key, b"aaaa") is node
    assert tree.find(key, b"bbbb") is None


def test_remove_wants_leaves_and_counts_children() -> None:
    """Red when an inner node can be evicted, which would orphan its children."""
    tree = PrefixTree()
    parent = tree.insert(b"p", None, b"", [1])
    child = tree.insert(b"c", parent, b"", [2])
    with pytest.raises(AssertionError, match="children"):
        tree.remove(parent)
    tree.remove(child)
    tree.remove(parent)
    assert tree.nodes == {}
    assert tree.was_evicted(b"p") and tree.was_evicted(b"c")


def test_inserting_again_lifts_the_memory_of_an_eviction() -> None:
    """Red when a cached prefix is still explained as evicted."""
    tree = PrefixTree()
    tree.remove(tree.insert(b"k", None, b"", [1]))
    tree.insert(b"k", None, b"", [2])
    assert not tree.was_evicted(b"k")


def test_memories_are_bounded() -> None:
    """Red when evicted keys or client-chosen salts pile up for the life of the server."""
    tree = PrefixTree()
    for i in range(MAX_GHOSTS + 50):
        tree.remove(tree.insert(i.to_bytes(4, "big"), None, b"", [1]))
        tree.root_key(str(i))
    assert len(tree._ghosts) <= MAX_GHOSTS
    assert len(tree._roots) <= MAX_GHOSTS
    assert not tree.was_evicted((0).to_bytes(4, "big"))


def test_a_chain_is_inserted_as_its_pages_one_by_one() -> None:
    """Red when keys of a whole prompt differ from those of single pages: nothing would be found
    again; or when parents, counts of children or numbers do."""
    tree = PrefixTree()
    root, stream = tree.root_key("salt"), bytes(range(48))
    above = tree.insert(tree.child_key(root, b"above"), None, b"above", [9])
    chain = tree.chain(above.key, stream, 16)
    assert all(tree.find(node.key, node.tokens) is None for node in chain)
    tree.insert_chain(above, chain, [[1], [2], [3]])
    key, parent = above.key, above
    for index, node in enumerate(chain):
        tokens = stream[16 * index : 16 * index + 16]
        key = tree.child_key(key, tokens)
        assert tree.find(key, tokens) is node
        assert (node.parent, node.pages, node.number) == (parent, [index + 1], index + 2)
        assert parent.num_children == 1
        parent = node
    assert parent.num_children == 0
    with pytest.raises(AssertionError, match="twice"):
        tree.insert_chain(above, chain[:1], [[4]])


def test_a_chain_that_comes_back_is_no_ghost() -> None:
    """Red when a page that was evicted and computed again is still said to be gone."""
    tree = PrefixTree()
    chain = tree.chain(tree.root_key(""), b"aaaabbbb", 4)
    tree.insert_chain(None, chain, [[1], [2]])
    tree.evict(chain[1], 2)
    assert tree.was_evicted(chain[1].key)
    tree.insert_chain(chain[0], tree.chain(chain[0].key, b"bbbb", 4), [[3]])
    assert not tree.was_evicted(chain[1].key)
