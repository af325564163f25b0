"""Fair queueing among keys: shares by weight, arrival inside a key, and nobody locked out."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.params import SamplingParams
from quire.request import Request
from quire.sched.fair import FairLine
from tests.unit.case import Case, expected

PARAMS = SamplingParams(max_tokens=1)


def waiting(id: int, tenant: str, cost: int, weight: float = 1.0, arrival: float = 0.0) -> Request:
    request = Request.new(id, [1] * cost, PARAMS, arrival=arrival)
    request.tenant, request.weight = tenant, weight
    return request


def start(line: FairLine) -> Request:
    """Pop as the scheduler does: a request that started says so."""
    request = line.pop()
    request.timing.scheduled = 0.0
    return request


# ------------------------------------------------------------ the line alone

keys = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 2.0, 3.0, 8.0]), st.integers(1, 40)),
    min_size=2,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(keys=keys, data=st.data())
def test_service_stays_within_one_request_of_the_weights(
    keys: list[tuple[float, int]], data: st.DataObject
) -> None:
    """While all keys wait, service over weight differs by at most one request of either.

    Red when a weight multiplies where it should divide, or rounds let a key run ahead."""
    line, id = FairLine(), 0
    dearest = {str(k): 0.0 for k in range(len(keys))}
    for k, (weight, most) in enumerate(keys):
        for _ in range(30):
            id += 1
            cost = data.draw(st.integers(1, most))
            dearest[str(k)] = max(dearest[str(k)], cost / weight)
            line.push(waiting(id, str(k), cost, weight, arrival=float(id)))
    served: dict[str, float] = defaultdict(float)
    left = dict.fromkeys(dearest, 30)
    while all(left.values()):
        request = start(line)
        left[request.tenant] -= 1
        served[request.tenant] += len(request.tokens) / request.weight
        for one in dearest:
            for other in dearest:
                bound = max(dearest[one], dearest[other])
                assert served[one] - served[other] <= bound + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_request_is_served_once_and_in_order_inside_its_key(data: st.DataObject) -> None:
    """Pushes, pops, aborts and ends in any order. Red when a key's line is lost or overtaken."""
    line, id, now = FairLine(), 0, 0.0
    inside: dict[int, Request] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["push", "push", "pop", "remove"]))
        if action == "push":
            id, now = id + 1, now + data.draw(st.sampled_from([0.0, 1.0]))
            tenant = data.draw(st.sampled_from("abc"))
            inside[id] = waiting(id, tenant, data.draw(st.integers(1, 9)), arrival=now)
            line.push(inside[id])
        elif inside and action == "pop":
            assert next(r.id for r in line) == line.peek().id
            popped = start(line)
            older = [r for r in inside.values() if r.tenant == popped.tenant and r.id < popped.id]
            assert not older
            del inside[popped.id]
            line.ended(popped)
        elif inside:
            gone = inside.pop(data.draw(st.sampled_from(sorted(inside))))
            line.remove(gone)
        assert len(line) == len(inside) and {r.id for r in line} == set(inside)
        assert line.num_tokens == sum(len(r.tokens) for r in inside.values())


@settings(max_examples=40, deadline=None)
@given(crowd=st.integers(1, 50), cost=st.integers(1, 30), debts=st.integers(0, 20))
def test_a_key_that_comes_back_is_next(crowd: int, cost: int, debts: int) -> None:
    """Idling earns no credit and no penalty. Red when a newcomer starts from zero (it would then
    hold the line until it caught up) or behind those who wait."""
    line, id = FairLine(), 0
    for _ in range(debts + crowd):
        id += 1
        line.push(waiting(id, "many", cost, arrival=float(id)))
    for _ in range(debts):
        line.ended(start(line))
    for _ in range(3):
        id += 1
        line.push(waiting(id, "few", cost, arrival=1000.0 + id))
    first = [start(line).tenant for _ in range(2)]
    assert "few" in first
    assert first != ["few", "few"] or debts == 0


def test_the_answer_is_paid_for_too() -> None:
    """Red when only prompts count: a key with long answers would get more than its share."""
    line = FairLine()
    for id in range(1, 9):
        line.push(waiting(id, "long" if id % 2 else "short", 4, arrival=float(id)))
    first = start(line)
    assert first.tenant == "long"
    first.tokens.extend([2] * 8)  # its answer
    line.ended(first)
    assert [start(line).tenant for _ in range(4)] == ["short", "short", "short", "long"]


def test_what_the_cache_gave_costs_nothing() -> None:
    """Red when a key pays for a prompt that nobody computed."""
    line = FairLine()
    for id in range(1, 7):
        line.push(waiting(id, "ab"[id % 2], 10, arrival=float(id)))
    order = [line.pop(num_cached=10 if id % 2 else 0).tenant for id in range(1, 5)]
    assert order == ["b", "a", "b", "b"]


# ------------------------------------------------------------ in the scheduler


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [2048, 40])
def test_a_thousand_requests_of_one_key_do_not_hold_up_one_of_another(
    overlap: bool, num_pages: int
) -> None:
    """Rows or pages are all taken by one key: the other's request runs within three steps.

    Red when a full house waits for somebody to end."""
    case = Case(policy="fair", num_pages=num_pages, overlap=overlap)
    crowd = [case.add([i % 7] * 9, max_tokens=40, tenant="many") for i in range(1000)]
    for _ in range(12):
        case.step()
    one = case.add([3] * 9, max_tokens=5, tenant="one")
    for _ in range(3):
        case.step()
    assert one.is_running
    assert sum(r.num_preempted for r in crowd) <= 3
    while one.num_output < 5:
        case.step()
    assert one.output == expected(one, 5) and one.num_preempted == 0


def test_a_long_prompt_shares_its_steps_with_a_newcomer() -> None:
    """Red when chunks of one key's prompt take whole steps while another key has nothing."""
    case = Case(policy="fair", max_num_batched_tokens=8, max_model_len=256, num_pages=128)
    long = case.add([1] * 200, max_tokens=1, tenant="long")
    case.step()
    short = case.add([2] * 4, max_tokens=1, tenant="short")
    case.step()
    assert case.fed() == {long.id: 4, short.id: 4}
    case.step()
    assert case.fed() == {long.id: 8}


def test_nobody_loses_an_only_request_to_a_newcomer() -> None:
    """Red when displacement goes on among keys that hold one row each: they would take turns for
    ever."""
    case = Case(policy="fair", max_num_seqs=2)
    held = [case.add([1] * 5, max_tokens=20, tenant=t) for t in "ab"]
    case.step()
    third = case.add([2] * 5, max_tokens=2, tenant="c")
    case.run()
    assert all(r.num_preempted == 0 for r in held)
    assert third.output == expected(third, 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_room_that_was_made_is_kept_for_whom_it_was_made(overlap: bool) -> None:
    """Red when the request that made room takes it back, because its key was served less: it would
    leave and come back with every step, until the other one of its key ends."""
    case = Case(policy="fair", max_num_seqs=2, num_pages=200, max_model_len=400, overlap=overlap)
    case.add([1, 2, 3], max_tokens=50, tenant="served", ignore_eos=True)
    case.run()
    rich = [case.add([i] * 2, 300, tenant="rich", ignore_eos=True) for i in (1, 2)]
    for _ in range(5):
        case.step()
    newcomer = case.add([3, 3], 5, tenant="served", ignore_eos=True)
    for _ in range(8):
        case.step()
    assert newcomer.output == expected(newcomer, 5)
    assert [r.num_preempted for r in rich] == [0, 1]


def test_a_promise_ends_with_the_line_it_was_made_to() -> None:
    """Red when a key that left, and comes back later, is still let in before others."""
    line = FairLine()
    line.push(waiting(1, "rich", 9))
    line.push(waiting(2, "rich", 9))
    running = {r.id: r for r in (start(line), start(line))}
    gone = waiting(3, "new", 9, arrival=1.0)
    line.push(gone)
    assert line.displaced(running) is running[2]
    line.push(waiting(4, "other", 9))
    assert line.peek() is gone and next(iter(line)) is gone
    line.remove(gone)
    line.push(waiting(5, "new", 9, arrival=2.0))
    assert line.peek().id == 4


def test_the_displaced_request_is_the_last_one_of_the_richest_key() -> None:
    """Red when the victim is chosen by arrival alone, or the weight of its key is ignored."""
    case = Case(policy="fair", max_num_seqs=6)
    rich = [case.add([1] * 3, max_tokens=30, tenant="rich", weight=4.0) for _ in range(3)]
    poor = [case.add([2] * 3, max_tokens=30, tenant="poor") for _ in range(3)]
    case.step()
    assert all(r.is_running for r in rich + poor)
    case.add([3] * 3, max_tokens=2, tenant="new")
    case.step()
    assert [r.num_preempted for r in rich + poor] == [0, 0, 0, 0, 0, 1]
    case.run()
    assert all(r.output == expected(r, 30) for r in rich + poor)
    case.assert_all_returned()


def test_pages_run_out_and_the_first_to_start_is_never_preempted() -> None:
    """Red when victims follow accounts that change while requests run: they could take turns."""
    case = Case(policy="fair", num_pages=13, max_model_len=44)
    requests = [case.add([i] * 11, max_tokens=20, tenant="ab"[i % 2]) for i in range(3)]
    case.run()
    assert requests[0].num_preempted == 0 and sum(r.num_preempted for r in requests) > 0
    assert all(r.output == expected(r, 20) for r in requests)
    case.assert_all_returned()


def test_weights_share_the_steps_of_a_backlog() -> None:
    """Red when a weight does not reach the scheduler: 3 to 1 within a few requests."""
    case = Case(policy="fair", max_num_seqs=2, num_pages=64)
    for _ in range(40):
        case.add([1] * 4, max_tokens=4, tenant="three", weight=3.0)
        case.add([2] * 4, max_tokens=4, tenant="one")
    while sum(r.tenant == "three" for r in case.scheduler.waiting) > 4:
        case.step()
    left = sum(r.tenant == "one" for r in case.scheduler.waiting)
    assert 40 - left == pytest.approx(36 / 3, abs=3)
