"""Who goes first: waiting-line orders, aging, the batch window, and whom preemption picks."""

from __future__ import annotations

import pytest

from quire.config import SchedConfig
from quire.errors import NotSupported
from quire.request import BACKGROUND
from quire.sched.policies import waiting_line
from tests.unit.case import Case, expected


def service_order(case: Case) -> list[int]:
    """Ids in the order of their first admission."""
    seen = [a.request_id for plan in case.plans for a in plan.admissions]
    return list(dict.fromkeys(seen))


def test_fcfs_goes_by_arrival_then_by_id() -> None:
    """Red when the line orders by submission or looks at priority."""
    case = Case(max_num_seqs=1)
    late = case.add([1], max_tokens=1, arrival=5.0, priority=-9)
    early = case.add([2], max_tokens=1, arrival=1.0, priority=9)
    twin = case.add([3], max_tokens=1, arrival=1.0)
    case.run()
    assert service_order(case) == [early.id, twin.id, late.id]


def test_priority_lower_value_runs_first() -> None:
    """Red when the sign of priority flips, or arrival counts for more than a whole level."""
    case = Case(max_num_seqs=1, policy="priority", priority_aging_s=1000.0)
    low = case.add([1], max_tokens=1, arrival=0.0, priority=2)
    mid = case.add([2], max_tokens=1, arrival=1.0, priority=1)
    high = case.add([3], max_tokens=1, arrival=2.0, priority=-1)
    case.run()
    assert service_order(case) == [high.id, mid.id, low.id]


@pytest.mark.parametrize(("arrival", "old_first"), [(19.9, False), (20.1, True)])
def test_aging_overtakes_exactly_when_the_formula_says(arrival: float, old_first: bool) -> None:
    """Two levels of priority are worth 2 * aging_s = 20 s of waiting, no more and no less."""
    case = Case(max_num_seqs=1, policy="priority", priority_aging_s=10.0)
    old = case.add([1], max_tokens=1, arrival=0.0, priority=2)
    fresh = case.add([2], max_tokens=1, arrival=arrival, priority=0)
    case.now = 25.0
    case.run()
    want = [old.id, fresh.id] if old_first else [fresh.id, old.id]
    assert service_order(case) == want


def test_a_stream_of_urgent_requests_cannot_starve_an_old_one() -> None:
    """Red without aging: the patient request would come last."""
    case = Case(max_num_seqs=1, policy="priority", priority_aging_s=2.0)
    patient = case.add([1], max_tokens=1, priority=3)
    urgent = []
    for tick in range(12):
        case.now = float(tick)
        urgent.append(case.add([2], max_tokens=1, priority=0).id)
        case.step()
    case.run()
    # priority 3 at t=0 equals priority 0 at t=6; the tie goes to the smaller id
    assert service_order(case).index(patient.id) == 6


def test_unknown_policy_names_the_known_ones() -> None:
    """Red when a typo falls back to some order in silence."""
    with pytest.raises(NotSupported, match=r"'lifo'.*'fcfs', 'priority' or 'fair'"):
        waiting_line(SchedConfig(policy="lifo"))


# ------------------------------------------------------------ batch window


def test_admissions_wait_for_company() -> None:
    """Red when the window is ignored, or measured from the newest arrival and so never closes."""
    case = Case(batch_wait_ms=100)
    first = case.add([1, 2])
    assert case.scheduler.schedule().works == ()
    assert case.scheduler.seconds_held() == pytest.approx(0.1)
    case.now = 0.06
    second = case.add([3, 4])
    assert case.scheduler.schedule().works == ()
    assert case.scheduler.seconds_held() == pytest.approx(0.04)
    case.now = 0.1
    assert case.scheduler.seconds_held() == 0.0
    case.step()
    assert set(case.fed()) == {first.id, second.id}


def test_enough_waiting_tokens_close_the_window_early() -> None:
    """Red when batch_wait_tokens counts requests, or is off by one."""
    case = Case(batch_wait_ms=1e6, batch_wait_tokens=5)
    first = case.add([1, 2])
    assert case.scheduler.schedule().works == ()
    second = case.add([3, 4])
    assert case.scheduler.schedule().works == ()
    third = case.add([5])
    case.step()
    assert set(case.fed()) == {first.id, second.id, third.id}


def test_the_window_holds_newcomers_only() -> None:
    """Red when running requests stop while the window is open."""
    case = Case(batch_wait_ms=100)
    first = case.add([1, 2], max_tokens=6)
    case.now = 0.2
    case.step()
    second = case.add([3, 4])
    case.step()
    assert case.fed() == {first.id: 1}
    case.now = 0.31
    case.step()
    assert case.fed() == {first.id: 1, second.id: 2}


def test_a_removed_request_no_longer_counts_for_the_window() -> None:
    """Red when aborting leaves its tokens or its arrival behind."""
    case = Case(batch_wait_ms=100, batch_wait_tokens=4)
    gone = case.add([1, 2, 3])
    case.now = 0.09
    stays = case.add([4])
    case.abort(gone.id)
    assert case.scheduler.waiting.num_tokens == 1
    case.now = 0.12  # past the window of the first, inside that of the second
    assert case.scheduler.schedule().works == ()
    case.now = 0.2
    case.step()
    assert case.fed() == {stays.id: 1}


def test_the_background_has_no_part_in_the_window() -> None:
    """Red when a line of a batch that has waited long switches the window off for newcomers, or
    one that came just now holds back a step that could take it."""
    case = Case(batch_wait_ms=100, max_num_seqs=1)
    batch = [case.add([i], max_tokens=9, priority=BACKGROUND) for i in (1, 2)]
    assert case.scheduler.seconds_held() == 0.0
    case.step()
    assert case.fed() == {batch[0].id: 1}
    case.now = 5.0
    case.add([3, 4])
    assert case.scheduler.seconds_held() == pytest.approx(0.1)
    case.now = 5.2
    assert case.scheduler.seconds_held() == 0.0


# ------------------------------------------------------------ preemption


def crowd(policy: str, priorities: list[int], overlap: bool = False) -> tuple[Case, list]:
    """Requests whose prompts fit together and whose outputs do not."""
    case = Case(
        num_pages=13, max_model_len=44, policy=policy, priority_aging_s=1e9, overlap=overlap
    )
    requests = [
        case.add([i + 1] * 11, max_tokens=20, arrival=float(i), priority=p)
        for i, p in enumerate(priorities)
    ]
    case.step()
    assert len(case.scheduler.running) == len(requests)
    return case, requests


def first_victim(case: Case, requests: list) -> object:
    while case.core.has_work:
        case.step()
        for request in requests:
            if request.num_preempted:
                return request
    raise AssertionError("nobody was preempted")


@pytest.mark.parametrize("overlap", [False, True])
def test_fcfs_preempts_the_youngest(overlap: bool) -> None:
    """Red when the victim is whoever ran out of pages, or the oldest."""
    case, requests = crowd("fcfs", [0, 0, 0], overlap)
    assert first_victim(case, requests) is requests[2]
    case.run()
    assert requests[0].num_preempted == 0, "the most deserving request must never be preempted"
    assert all(r.output == expected(r, 20) for r in requests)
    case.assert_all_returned()


@pytest.mark.parametrize("overlap", [False, True])
def test_priority_preempts_the_least_urgent(overlap: bool) -> None:
    """Red when preemption ignores the policy the line uses."""
    case, requests = crowd("priority", [5, 0, 1], overlap)
    assert first_victim(case, requests) is requests[0]
    case.run()
    assert requests[1].num_preempted == 0
    assert all(r.output == expected(r, 20) for r in requests)
    case.assert_all_returned()


def test_equal_arrivals_preempt_the_higher_id() -> None:
    """Red when ties are broken by dict order, which changes with preemptions."""
    case = Case(num_pages=9, max_model_len=32)
    first, second = (case.add([i] * 11, max_tokens=20, arrival=0.0) for i in (1, 2))
    assert first_victim(case, [first, second]) is second


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    """Red when freed pages go to a newcomer and the preempted row is reused in the same plan."""
    case, requests = crowd("fcfs", [0, 0, 0])
    before = 0
    while case.core.has_work:
        case.step()
        now = sum(r.num_preempted for r in requests)
        if now > before:
            assert case.last_plan.admissions == ()
        before = now
    assert before > 0


def test_preempted_request_finds_its_own_pages_again() -> None:
    """Red when release forgets published pages: a preempted request would start from nothing."""
    case = Case(num_pages=8, page_size=4, max_model_len=32)
    old, young = case.add([1] * 12, max_tokens=12), case.add([2] * 12, max_tokens=12)
    first_victim(case, [old, young])
    assert young.num_computed == 0 and not young.is_running
    num_known = young.num_known
    while not young.is_running:
        case.step()
    (start,) = [w.start for w in case.last_plan.works if w.request_id == young.id]
    # old needed pages meanwhile and took the deepest of young's; the rest was still there
    assert start >= 4
    assert start % 4 == 0 or start == num_known - 1
    case.run()
    assert young.output == expected(young, 12)
    assert young.num_cached == 0, "num_cached tells of the first admission only"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("chunked", [True, False])
def test_no_livelock_in_a_pool_that_fits_one_request(
    page_size: int, overlap: bool, chunked: bool
) -> None:
    """Red when a full-prompt hit needs more pages than the pool has, or two evict each other."""
    case = Case(
        num_pages=-(-16 // page_size),
        page_size=page_size,
        max_model_len=16,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        overlap=overlap,
        chunked_prefill=chunked,
    )
    requests = []
    for length in (15, 12, 8, 12, 15, 1, 8, 15):
        requests.append(case.add([length % 7] * length, max_tokens=16))
    family = case.add([6] * 12, max_tokens=16, n=3)
    requests += [family, *family.children]
    case.run(max_steps=3000)
    for request in requests:
        assert request.output == expected(request, 16 - request.num_prompt)
        assert case.finishes(request.id) == ["length"]
    case.assert_all_returned()


def test_longest_contexts_come_first_in_a_step_of_decodes() -> None:
    """Red when the longest request is the last that the device begins with."""
    case = Case()
    for prompt in ([1, 2, 3], list(range(10, 19)), [4, 5, 6, 7, 8]):
        case.add(prompt, max_tokens=4)
    case.run()
    decodes = [plan for plan in case.plans if len(plan.works) == 3 and not plan.admissions]
    assert decodes
    for plan in decodes:
        starts = [work.start for work in plan.works]
        assert starts == sorted(starts, reverse=True)
