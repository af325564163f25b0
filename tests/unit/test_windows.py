"""KVManager with windowed layer groups: what is given back when, and what still hits.

The page-content runner asks each group for exactly what its layers would read, so every test here
also turns red when a page leaves while a query can still see it.
"""

from __future__ import annotations

import pytest

from quire.config import SchedConfig
from quire.kv.check import check
from quire.kv.groups import PageNeeds, Window
from quire.kv.manager import KVManager
from quire.kv.prefix import GONE
from quire.params import SamplingParams
from quire.request import Request
from quire.sched.scheduler import Scheduler
from quire.step import StepResult
from tests.unit.case import Case, expected

LONG = [(i * i + 5 * i) % 7 for i in range(40)]  # ten pages of four
BOTH: tuple[Window, ...] = (None, 10)


def cached_tokens(case: Case, prompt: list[int]) -> int:
    request = case.request(prompt)
    found = case.kv.match(request)
    case.kv.release(request)
    return found


def held_columns(case: Case, request: Request, group: int) -> list[int]:
    return [i for i, page in enumerate(case.kv.table(request, group)) if page != GONE]


# ------------------------------------------------------------ the bound


@pytest.mark.parametrize("windows", [(1024,), (None, 1024), (None, 1024, 1024)], ids=str)
@pytest.mark.parametrize("lag", [0, 1], ids=["in-step", "overlap"])
def test_a_long_generation_holds_no_more_than_its_window(
    windows: tuple[Window, ...], lag: int
) -> None:
    """32k tokens, a window of 1k, a pool with room for exactly that: red when a windowed group
    keeps one page more than window + tokens in flight + 1 page, or must preempt to get one."""
    size, chunk, num_prompt, num_tokens = 16, 512, 8000, 32_000
    needs = PageNeeds(size, windows, max_inflight=chunk * (1 + lag))
    bound = -(-(1024 + chunk * (1 + lag)) // size) + 1
    kv = KVManager(needs.of(num_prompt + num_tokens) + 1, size, windows=windows)
    config = SchedConfig(
        max_num_seqs=1, max_num_batched_tokens=chunk, max_model_len=num_prompt + num_tokens
    )
    scheduler = Scheduler(config, kv)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    request = Request.new(1, [i % 251 for i in range(num_prompt)], params)
    scheduler.add(request)
    inflight, most = [], 0
    for step in range(100_000):
        plan = scheduler.schedule()
        if plan.works:
            inflight.append(plan)
            held = kv.look()[request.id]
            spans = [len(t) - f for t, f in zip(held.tables, held.firsts, strict=True)]
            most = max(most, spans[-1])
            assert all(s <= bound for s, w in zip(spans, windows, strict=True) if w is not None)
        if step % 1000 == 0:
            check(kv)
        while len(inflight) > (lag if plan.works else 0):
            plan = inflight.pop(0)
            sampled = [(step % 251,) if work.sample else () for work in plan.works]
            scheduler.commit(plan, StepResult(sampled))
        if not scheduler.has_work and not inflight:
            break
    assert len(request.output) == num_tokens and request.num_preempted == 0
    assert most > 1024 // size, "the window itself must be held"


def test_pages_leave_when_the_last_query_that_sees_them_is_computed() -> None:
    """Red when a window moves a step late or early."""
    case = Case(windows=BOTH)
    request = case.add(LONG[:8], max_tokens=40)
    for _ in range(30):
        case.step()
        # Kept: what the next query sees, and the one position before it.
        first = max(0, request.num_computed - 10) // 4
        assert held_columns(case, request, 1)[0] == first
        assert held_columns(case, request, 0)[0] == 0
    case.run()
    assert request.output == expected(request, 40)
    case.assert_all_returned()


def test_a_chunk_takes_windowed_pages_for_itself_alone() -> None:
    """Red when admission takes pages for a whole long prompt in windowed groups."""
    case = Case(windows=BOTH, max_num_batched_tokens=8)
    request = case.add(LONG, max_tokens=4)
    case.step()
    assert len(case.kv.table(request, 0)) == 10
    assert len(case.kv.table(request, 1)) == 2
    case.run()
    assert request.output == expected(request, 4)


def test_admission_waits_for_what_the_window_will_need() -> None:
    """Red when a prompt is let in whose next chunk has no room: it would be preempted at once."""
    case = Case(windows=BOTH, num_pages=24, max_num_batched_tokens=8)
    first = case.add(LONG, max_tokens=3)  # 11 full and 6 windowed
    case.step()
    second = case.add(LONG[::-1], max_tokens=3)
    case.step()
    assert first.is_running and not second.is_running
    case.run()
    assert [r.output for r in (first, second)] == [expected(r, 3) for r in (first, second)]
    assert case.scheduler.stats().num_preempted == 0


def test_without_prefix_caching_pages_behind_the_window_become_empty() -> None:
    """Red when windows only move with the prefix cache on."""
    case = Case(windows=BOTH, caching=False)
    request = case.add(LONG, max_tokens=4)
    case.step()
    assert held_columns(case, request, 1) == [7, 8, 9]
    assert case.kv.allocator.num_cached == 0
    assert case.kv.allocator.num_live == 13
    case.run()
    assert request.output == expected(request, 4)


# ------------------------------------------------------------ hits


@pytest.mark.parametrize("windows", [BOTH, (10,), (7, 13)], ids=str)
def test_a_hit_needs_only_the_window_at_its_end(windows: tuple[Window, ...]) -> None:
    """Red when old window pages are wanted back, which a long prompt has given away for good."""
    case = Case(windows=windows)
    first = case.add(LONG, max_tokens=1)
    case.run()
    for column, node in enumerate(list(case.kv.tree.nodes.values())):
        for group, window in enumerate(windows):
            if window is not None and column < 6:  # behind any window that ends at page 10
                evict(case, node.pages[group])
    check(case.kv)
    again = case.add([*LONG, 1, 2], max_tokens=5)
    case.step()
    assert again.num_cached == 40
    case.run()
    assert again.output == expected(again, 5)
    assert first.output == expected(first, 1)


def evict(case: Case, page: int) -> None:
    """As if it were the oldest cached page."""
    case.kv.allocator._cached.move_to_end(page, last=False)
    assert case.kv.allocator._cached
    emptied = case.kv.allocator._empty
    case.kv.allocator._empty = []
    assert case.kv.allocator.take() == page
    case.kv.allocator._empty += emptied
    case.kv.allocator.drop(page)


@pytest.mark.parametrize(("gone", "usable"), [(9, 9), (7, 7), (6, 10), (8, 8)])
def test_a_gap_in_the_window_shortens_the_hit(gone: int, usable: int) -> None:
    """Red when a hit ends where the window before it has a hole, or is given up as a whole."""
    case = Case(windows=(None, 10))
    case.add([*LONG, 1], max_tokens=1)
    case.run()
    node = list(case.kv.tree.nodes.values())[gone]
    evict(case, node.pages[1])
    check(case.kv)
    request = case.request([*LONG, 2])
    assert case.kv.match(request) == 4 * usable
    note = "usable: pages of layers that see only a window were evicted"
    assert (f"{usable} of 10 known pages of this prefix are {note}" == request.cache_note) == (
        usable < 10
    )
    case.kv.release(request)
    check(case.kv)


def test_a_gap_is_filled_by_whoever_computes_it_again() -> None:
    """Red when a page lost once is lost for as long as its prefix lives."""
    case = Case(windows=BOTH)
    case.add([*LONG, 1], max_tokens=1)
    case.run()
    nodes = list(case.kv.tree.nodes.values())
    for node in nodes:
        evict(case, node.pages[1])
    assert cached_tokens(case, [*LONG, 2]) == 0
    second = case.add([*LONG, 2], max_tokens=3)
    case.run()
    assert second.num_cached == 0 and second.output == expected(second, 3)
    assert list(case.kv.tree.nodes.values()) == nodes, "the same prefix, the same nodes"
    assert case.kv.counts.shared_pages == 10, "full pages are kept once"
    assert cached_tokens(case, [*LONG, 3]) == 40


def test_an_evicted_full_page_takes_its_window_pages_along() -> None:
    """Red when pages of a prefix that no hit can reach stay cached."""
    case = Case(windows=BOTH, num_pages=40)
    case.add([*LONG, 1], max_tokens=1)
    case.run()
    leaf = list(case.kv.tree.nodes.values())[-1]
    full, windowed = leaf.pages
    cached, empty = case.kv.allocator.num_cached, case.kv.allocator.num_empty
    evict(case, full)
    assert case.kv.allocator.node_of[windowed] is None
    assert not case.kv.allocator.is_cached(windowed)
    assert case.kv.allocator.num_cached == cached - 2
    assert case.kv.allocator.num_empty == empty + 2
    check(case.kv)
    assert cached_tokens(case, [*LONG, 1]) == 36


def test_a_whole_cached_prompt_sees_one_position_further_back() -> None:
    """Its last token is computed again, so the window begins one position earlier. Red when that
    position's page is not asked for: it may be the last of a page that is gone."""
    for length in (36, 37, 38, 39, 40):
        case = Case(windows=(None, 9))
        case.add(LONG[:length], max_tokens=1)
        case.run()
        again = case.add(LONG[:length], max_tokens=6)
        case.run()
        assert again.output == expected(again, 6)
        assert again.num_cached == min(length // 4 * 4, length - 1)
        case.assert_all_returned()


def test_a_window_shorter_than_a_page() -> None:
    """Red when the node that children hang on loses its last page under a running request."""
    case = Case(windows=(1,), num_pages=12, max_num_batched_tokens=6)
    requests = [case.add(LONG[i : i + 20], max_tokens=12) for i in range(4)]
    case.run()
    for request in requests:
        assert request.output == expected(request, 12)
    case.assert_all_returned()
    case.kv.flush()
    assert case.kv.tree.nodes == {}


# ------------------------------------------------------------ siblings


@pytest.mark.parametrize("length", [12, 13, 19, 20])
@pytest.mark.parametrize("windows", [BOTH, (5,), (None, 9, 3)], ids=str)
def test_siblings_share_the_prompt_in_every_group(windows: tuple[Window, ...], length: int) -> None:
    """Red when a child adopts pages its parent gave back, or shares one it then writes."""
    case = Case(windows=windows)
    parent = case.add(LONG[:length], max_tokens=9, n=3)
    siblings = [parent, *parent.children]
    case.step()
    case.step()
    assert [r.num_cached for r in siblings[1:]] == [length - 1] * 2
    case.run()
    assert [r.output for r in siblings] == [expected(r, 9) for r in siblings]
    case.assert_all_returned()


def test_a_sibling_born_late_does_without_its_parent_s_window() -> None:
    """Red when a child forks from a parent whose window has moved past the prompt."""
    case = Case(windows=(None, 6), max_num_seqs=2)
    blocker = case.add([1, 2, 3], max_tokens=14)
    parent = case.add(LONG[:18], max_tokens=30, n=2)
    child = parent.children[0]
    case.run()
    assert [r.output for r in (parent, child)] == [expected(r, 30) for r in (parent, child)]
    assert blocker.output == expected(blocker, 14)
    assert child.num_cached == 16, "whole pages from the tree, not 17 tokens of the parent's"
    case.assert_all_returned()


# ------------------------------------------------------------ check itself


def hole_in_a_table(kv: KVManager) -> None:
    held = next(iter(kv.look().values()))
    kv.allocator.drop(held.tables[1][-1])
    held.tables[1][-1] = GONE


def full_group_gives_back(kv: KVManager) -> None:
    held = next(iter(kv.look().values()))
    kv.allocator.drop(held.tables[0][0])
    held.tables[0][0], held.firsts[0] = GONE, 1


def other_page_than_published(kv: KVManager) -> None:
    held = next(iter(kv.look().values()))
    first = held.firsts[1]
    kv.allocator.drop(held.tables[1][first])
    held.tables[1][first] = kv.allocator.take()


def node_forgets_a_full_page(kv: KVManager) -> None:
    node = next(iter(kv.tree.nodes.values()))
    kv.allocator.node_of[node.pages[0]] = None
    node.pages[0] = GONE


@pytest.mark.parametrize(
    "damage",
    [hole_in_a_table, full_group_gives_back, other_page_than_published, node_forgets_a_full_page],
    ids=lambda damage: damage.__name__,
)
def test_check_sees(damage) -> None:
    case = Case(windows=BOTH)
    case.add(LONG[:21], max_tokens=8)
    case.step()
    check(case.kv)
    damage(case.kv)
    with pytest.raises(AssertionError):
        check(case.kv)
