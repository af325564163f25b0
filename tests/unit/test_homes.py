"""Homes: each of several ranks keeps the pages of its own requests. No model here."""

from __future__ import annotations

from itertools import pairwise

from quire.kv.allocator import SCRATCH_PAGE
from quire.kv.cache_news import CacheLog
from quire.kv.homes import HomeAllocators
from quire.kv.route_keys import KEY_BYTES
from quire.request import BACKGROUND
from tests.unit.case import Case, expected


def homes_of(case: Case) -> list[int]:
    return [admission.home for plan in case.plans for admission in plan.admissions]


def test_pages_are_numbered_through() -> None:
    """Red when two ranks have a page of the same number, or a number is nobody's."""
    every = HomeAllocators(5, lambda node, page: [], 3)
    taken = [every.of(home).take_many(4) for home in range(3)]
    assert taken == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert (every.num_pages, every.num_live, every.num_available) == (12, 12, 0)
    assert [every.home_of(page) for pages in taken for page in pages] == [0] * 4 + [1] * 4 + [2] * 4
    assert not every.is_cached(SCRATCH_PAGE)


def test_requests_go_where_fewest_pages_are_held() -> None:
    """Red when one rank attends everybody while another has nothing to do."""
    case = Case(num_homes=2, num_pages=16)
    requests = [case.add([i] * (4 + 8 * (i == 1)), 4) for i in range(1, 5)]
    case.run()
    assert homes_of(case) == [0, 1, 1, 1]
    assert [request.output for request in requests] == [expected(r, 4) for r in requests]
    case.assert_all_returned()


def test_a_prefix_is_found_where_it_is() -> None:
    """Red when a hit is looked for on another rank than the one that has its pages."""
    case = Case(num_homes=2)
    long = [1, 2, 3, 4] * 5
    case.add([5] * 9, 2)
    case.add(long, 2)
    case.run()
    assert homes_of(case) == [0, 1]
    again = [case.add([*long, 6], 2), case.add([*[5] * 8, 6], 2)]
    case.run()
    assert homes_of(case)[2:] == [1, 0]
    assert [request.num_cached for request in again] == [20, 8]
    assert [request.cache_note for request in again] == ["", ""]  # nothing of the other ranks


def test_a_short_prefix_does_not_gather_everybody() -> None:
    """Red when all who begin alike, as every chat does, end up on one rank."""
    case = Case(num_homes=2, num_pages=40)
    case.add([1] * 4 + [2] * 12, 1)
    case.run()
    for i in range(6):
        case.add([1] * 4 + [3 + i % 4] * 12, 8)
    case.run()
    homes = homes_of(case)[1:]
    assert min(homes.count(0), homes.count(1)) >= 2


def test_a_long_prefix_is_not_computed_twice() -> None:
    """Red when a burst of requests that find their prefix is dealt to ranks that have it not."""
    case = Case(num_homes=2, num_pages=40)
    prefix = [1, 2, 3, 4] * 10
    case.add(prefix, 1)
    case.run()
    burst = [case.add([*prefix, i], 4) for i in range(5)]
    case.run()
    assert [request.num_cached for request in burst] == [40] * 5


def test_siblings_stay_together() -> None:
    """Red when a sibling is sent where the prompt it shares is not."""
    case = Case(num_homes=2)
    parent = case.add([1, 2, 3, 4, 5], 4, n=4)
    family = [parent, *parent.children]
    case.run()
    assert homes_of(case) == [0] * 4
    assert [request.output for request in family] == [expected(r, 4) for r in family]
    assert case.kv.counts.copied_pages


def test_who_runs_out_of_pages_takes_those_of_its_rank() -> None:
    """Red when a request of another rank is preempted, which frees nothing."""
    case = Case(num_homes=2, num_pages=6, caching=False)
    requests = [case.add([i], 20) for i in range(1, 5)]
    case.run()
    assert case.scheduler.counts.preempted
    for plan in case.plans:
        homes = [
            request.home for w in plan.works for request in requests if request.id == w.request_id
        ]
        assert len(homes) == len(plan.works)
    assert [request.output for request in requests] == [expected(r, 20) for r in requests]
    case.assert_all_returned()


def test_twice_the_pages_hold_twice_the_requests() -> None:
    """Red when the pages of a second rank serve nobody."""
    case = Case(num_homes=2, num_pages=8, caching=False, max_num_seqs=4)
    for i in range(1, 5):
        case.add([i] * 8, 7)
    case.run()
    assert max(len(plan.works) for plan in case.plans) == 4
    assert not case.scheduler.counts.preempted
    assert case.scheduler.stats().pages_total == 16


def test_a_background_request_of_another_rank_may_stay() -> None:
    """Red when somebody is sent away for pages that are of no use to the newcomer."""
    case = Case(num_homes=2, num_pages=6, caching=False)
    behind = [case.add([i] * 12, 10, priority=BACKGROUND) for i in (1, 2)]
    for _ in range(3):
        case.step()
    ahead = case.add([3] * 16, 2)
    case.run()
    assert ahead.num_preempted == 0
    assert sum(request.num_preempted for request in behind) == 1


def test_works_of_a_rank_are_neighbours() -> None:
    """Red when a rank's rows lie apart: they are taken out of a step as one slice."""
    case = Case(num_homes=3, num_pages=12, max_num_batched_tokens=9)
    for i in range(8):
        case.add([i % 5] * (3 + 2 * i), 6)
    while case.core.has_work:
        case.step()
        running = case.scheduler.running
        works = [w for w in case.last_plan.works if w.request_id in running]
        assert all(
            running[a.request_id].home <= running[b.request_id].home for a, b in pairwise(works)
        )


def test_a_router_hears_of_a_prefix_once() -> None:
    """Red when a router is told that a prefix is gone while another rank has it."""
    case = Case(num_homes=2, num_pages=8)
    log = CacheLog(case.kv.tree, case.kv.page_size)
    for _ in range(2):
        case.add([1, 2, 3, 4, 5], 12)
    case.step()
    case.run()
    assert sorted(homes_of(case)) == [0, 1]
    news = log.since(log.epoch, 0)
    added = str(news["added"])
    size = 2 * KEY_BYTES
    keys = [added[i : i + size] for i in range(0, len(added), size)]
    assert len(set(keys)) == len(keys)
    before = log.next
    case.kv.allocator.of(0).flush()
    assert str(log.since(log.epoch, before)["removed"]) == ""
    case.kv.allocator.of(1).flush()
    assert log.since(log.epoch, before)["removed"]
