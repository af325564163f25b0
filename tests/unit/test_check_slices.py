"""The bookkeeping check in slices is the whole check, and no slice of it is long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.kv import check as checks
from quire.kv.check import check, check_in_slices
from quire.kv.manager import KVManager
from quire.kv.prefix import Node
from tests.unit.case import Case

NUM_NODES = 40


@pytest.fixture
def kv(monkeypatch: pytest.MonkeyPatch) -> KVManager:
    """Two prompts published; one request still holds its pages."""
    monkeypatch.setattr(checks, "SLICE", 4)
    case = Case(num_pages=64, max_num_batched_tokens=256, max_model_len=256)
    case.add([1, 2, 3, 4] * (NUM_NODES // 2), max_tokens=1)
    case.add([5, 6, 0, 1] * (NUM_NODES // 2), max_tokens=40)
    case.step()
    case.step()
    assert len(case.kv.tree.nodes) == NUM_NODES
    return case.kv


def test_a_large_tree_takes_many_slices(kv: KVManager) -> None:
    """Red when somebody who waits for a slice waits for the whole tree."""
    assert len(list(check_in_slices(kv))) >= 2 * NUM_NODES // checks.SLICE


def lose_a_page(kv: KVManager, last: Node) -> None:
    kv.allocator.node_of[last.pages[0]] = None


def miscount_children(kv: KVManager, last: Node) -> None:
    last.num_children += 1


def leak_a_reference(kv: KVManager, last: Node) -> None:
    kv.allocator.refs[last.pages[0]] += 1


def lose_an_ancestor(kv: KVManager, last: Node) -> None:
    assert last.parent is not None
    del kv.tree.nodes[last.parent.key]


def free_a_live_page(kv: KVManager, last: Node) -> None:
    """The number of pages that are somewhere stays right."""
    (held,) = kv.look().values()
    kv.allocator._cached[held.tables[0][0]] = None
    kv.allocator._empty.pop()


@pytest.mark.parametrize(
    "break_it",
    [lose_a_page, miscount_children, leak_a_reference, lose_an_ancestor, free_a_live_page],
)
def test_what_is_broken_is_found(
    kv: KVManager, break_it: Callable[[KVManager, Node], None]
) -> None:
    """Red when an invariant is no longer looked at, in slices or at once."""
    check(kv)
    break_it(kv, list(kv.tree.nodes.values())[-1])
    with pytest.raises(AssertionError):
        list(check_in_slices(kv))
    with pytest.raises(AssertionError):
        check(kv)
