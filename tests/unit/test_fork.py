"""Siblings of n > 1 and staged copies: a page must not be shared before it holds its content."""

from __future__ import annotations

from quire.kv.check import check
from quire.kv.manager import KVManager
from quire.params import SamplingParams
from quire.request import Request

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def request(id: int) -> Request:
    made = Request.new(id, PROMPT, SamplingParams(max_tokens=4))
    made.row = id
    return made


def with_cached_prompt() -> KVManager:
    kv = KVManager(num_pages=16, page_size=4)
    first = request(1)
    kv.match(first)
    kv.reserve(first, 0, 8)
    first.num_computed = 8
    kv.commit(first)
    kv.release(first)
    kv.take_edits()
    return kv


def test_a_child_does_not_share_a_page_whose_copy_is_still_staged() -> None:
    """Red when fork adopts the target of a copy planned for the same step: the runner reads all
    sources before it writes, so the child would copy stale bytes."""
    kv = with_cached_prompt()

    parent, child = request(2), request(3)
    assert kv.match(parent) == 7  # all but the last token, whose page is copied to be written
    assert kv.reserve(parent, 7, 8)
    parent.num_computed = 8
    cached = kv.fork(parent, child)
    assert kv.reserve(child, cached, 8)
    _, copies = kv.take_edits()
    sources, targets = {c.source for c in copies}, {c.target for c in copies}
    assert sources.isdisjoint(targets), copies
    check(kv)


def test_releasing_a_child_keeps_its_parent_s_copy() -> None:
    """Red when giving a child back drops the copy that its parent still waits for."""
    kv = with_cached_prompt()
    parent, child = request(2), request(3)
    kv.match(parent)
    kv.reserve(parent, 7, 8)
    parent.num_computed = 8
    kv.fork(parent, child)
    kv.release(child)
    _, copies = kv.take_edits()
    assert [c.target for c in copies] == [kv.table(parent)[-1]]
