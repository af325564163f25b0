"""Pages are hashed while their step runs, and what the tree then holds is the same as ever."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.kv.check import check
from quire.kv.manager import KVManager
from quire.kv.prefix import PrefixTree
from tests.unit.case import Case, expected

PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 3, 5, 0, 2, 6]  # three full pages of four


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The tokens of every page hashed, in order."""
    seen: list[bytes] = []
    plain = PrefixTree.child_key

    def child_key(parent_key: bytes, tokens: bytes) -> bytes:
        seen.append(tokens)
        return plain(parent_key, tokens)

    monkeypatch.setattr(PrefixTree, "child_key", staticmethod(child_key))
    return seen


def test_with_overlap_commit_finds_the_pages_hashed(hashed: list[bytes]) -> None:
    """Red when hashing moves back to after the device is done, where the first token waits."""
    case = Case(overlap=True)
    case.add(PROMPT, max_tokens=2)
    case.step()  # launched, not settled
    hashed.clear()
    plan = case.scheduler.schedule()  # of the next step, while this one runs
    assert len(hashed) == 3
    settled, pending, _ = case.core._inflight[0]
    case.scheduler.commit(settled, pending.result())
    assert len(hashed) == 3, "hashed again"
    assert len(case.kv.tree.nodes) == 3
    assert plan.works


def test_no_page_is_hashed_twice(hashed: list[bytes]) -> None:
    """Red when chunks of a prompt are hashed from its start, or by both places."""
    for overlap in (False, True):
        case = Case(overlap=overlap, page_size=2, max_num_batched_tokens=5)
        case.add(list(range(7)) * 3, max_tokens=6)
        hashed.clear()
        case.run()
        # One more by `match`, which hashes up to the first page it misses.
        assert len(hashed) == 1 + len(case.kv.tree.nodes) == 1 + (21 + 5) // 2


def test_what_is_not_computed_is_not_published() -> None:
    """Red when a page can be found because it was hashed: its keys and values are not there."""
    case = Case(overlap=True)
    case.add(PROMPT, max_tokens=2)
    case.step()
    case.scheduler.schedule()
    assert case.kv.tree.nodes == {}
    check(case.kv)


def test_pages_hashed_too_early_wait_for_their_tokens() -> None:
    """Red when `commit` publishes all that was hashed, whatever has been computed."""
    kv = KVManager(8, 4)
    request = Case().request(PROMPT)
    request.row = 0
    kv.match(request)
    assert kv.reserve(request, 0, len(PROMPT))
    kv.hash_ahead(request, len(PROMPT))
    for num_computed, num_published in ((3, 0), (5, 1), (7, 1), (13, 3)):
        request.num_computed = num_computed
        kv.commit(request)
        assert len(kv.tree.nodes) == num_published
        check(kv)
    kv.release(request)
    assert kv.match(Case().request([*PROMPT[:12], 0])) == 12


def test_equal_prompts_in_one_step_share_after_it() -> None:
    """Red when a page hashed ahead is published beside an equal one that came first."""
    case = Case(overlap=True)
    requests = [case.add(PROMPT, max_tokens=6) for _ in range(3)]
    case.run()
    assert case.kv.counts.shared_pages >= 6
    assert len({request.output[0] for request in requests}) == 1
    for request in requests:
        assert request.output == expected(request, 6)
    case.assert_all_returned()


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("seed", range(6))
def test_the_tree_is_the_same_with_and_without(
    seed: int, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when hashing ahead changes what is published, under preemption and copies too."""

    def contents(hashes_ahead: bool) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(PrefixTree, "root_key", lambda self, salt, *_: salt.encode())
            if not hashes_ahead:
                patch.setattr("quire.sched.reading.Reading.hash_pages", lambda self: None)
            case = Case(
                num_pages=40, page_size=2, overlap=True, windows=windows, max_num_batched_tokens=9
            )
            rng = random.Random(seed)
            for _ in range(9):
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
                case.add(prompt, max_tokens=rng.randint(1, 8), n=rng.randint(1, 2))
            case.run()
            case.assert_all_returned()
            events = [(e.request_id, tuple(e.tokens), e.finish) for e in case.events]
            nodes = [(n.key, n.tokens, n.pages, n.number) for n in case.kv.tree.nodes.values()]
            return [events, nodes, case.kv.counts]

    assert contents(True) == contents(False)


def test_a_request_without_pages_is_left_alone() -> None:
    """Red when a request that lost its pages between plan and hashing breaks the next step."""
    kv = KVManager(8, 4)
    case = Case()
    kv.hash_ahead(case.request(PROMPT), 12)
    assert kv.look() == {}
