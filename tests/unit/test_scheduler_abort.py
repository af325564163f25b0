"""Abort in every state of a request: one final event, everything given back, others go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.request import Request
from tests.unit.case import Case, expected

PROMPT = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]


def waiting(case: Case) -> Request:
    return case.add(PROMPT)


def mid_prompt(case: Case) -> Request:
    request = case.add(PROMPT)
    case.step()
    assert 0 < request.num_computed + request.num_inflight < request.num_prompt
    return request


def decoding(case: Case) -> Request:
    request = case.add(PROMPT, max_tokens=20)
    while request.num_output < 2:
        case.step()
    return request


def preempted(case: Case) -> Request:
    request = case.add(PROMPT, max_tokens=20)
    while request.num_output < 2:
        case.step()
    case.scheduler._preempt(request, {})
    assert not request.is_running and request.num_output
    return request


def unborn_child(case: Case) -> Request:
    """In flight as far as its caller knows, and in no list of the scheduler's."""
    parent = case.add(PROMPT, n=3)
    case.step()
    return parent.children[1]


def child_of_a_waiting_parent(case: Case) -> Request:
    return case.add(PROMPT, n=2).children[0]


def born_child(case: Case) -> Request:
    parent = case.add(PROMPT, n=2, max_tokens=20)
    child = parent.children[0]
    while parent.children:
        case.step()
    return child


STATES = [
    waiting,
    mid_prompt,
    decoding,
    preempted,
    unborn_child,
    child_of_a_waiting_parent,
    born_child,
]


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
def test_abort_in_every_state(reach: Callable[[Case], Request], overlap: bool) -> None:
    """Red when some state is forgotten: no event, two events, a leak, or a disturbed neighbour."""
    case = Case(max_num_batched_tokens=6, overlap=overlap)
    neighbour = case.add([5, 5, 5], max_tokens=30)
    request = reach(case)
    num_output = request.num_output
    (event,) = case.abort(request.id)
    assert (event.request_id, event.finish, tuple(event.tokens)) == (request.id, "abort", ())
    assert case.abort(request.id) == []
    case.run()
    assert case.finishes(request.id) == ["abort"]
    assert request.num_output == num_output, "tokens after the final event"
    assert neighbour.output == expected(neighbour, 30)
    ended = [e.request_id for e in case.events if e.finish]
    assert len(set(ended)) == len(ended)
    assert case.scheduler.stats().num_finished == len(ended)
    case.assert_all_returned()


def test_abort_of_a_finished_or_unknown_request_says_nothing() -> None:
    """Red when a late abort makes a second final event or raises."""
    case = Case()
    request = case.add([1, 2], max_tokens=1)
    case.run()
    assert case.abort(request.id) == []
    assert case.abort(999) == []
    assert case.finishes(request.id) == ["length"]


@pytest.mark.parametrize("num_steps", [0, 1], ids=["waiting", "mid-prompt"])
def test_children_outlive_an_aborted_parent(num_steps: int) -> None:
    """Red when the children of an aborted parent are dropped: they would never end."""
    case = Case(max_num_batched_tokens=6)
    parent = case.add(PROMPT, n=3)
    children = list(parent.children)
    for _ in range(num_steps):
        case.step()
    case.abort(parent.id)
    case.run()
    assert case.finishes(parent.id) == ["abort"]
    for child in children:
        assert case.finishes(child.id) == ["length"]
        assert child.output == expected(child, 4)
    case.assert_all_returned()


def test_abort_while_the_step_is_in_flight_frees_the_row_for_the_next_plan() -> None:
    """Red when a result that comes back late is credited to the row's new owner."""
    case = Case(max_num_seqs=1, overlap=True)
    first = case.add([1, 2, 3], max_tokens=20)
    case.step()
    case.step()
    assert first.num_inflight, "one step must be in the air"
    second = case.add([4, 5, 6], max_tokens=5)
    case.abort(first.id)
    case.step()
    assert second.is_running and second.row == 0
    case.run()
    assert second.output == expected(second, 5)
    assert [e.finish for e in case.events if e.request_id == first.id][-1] == "abort"
    case.assert_all_returned()


def test_abort_takes_its_planned_copy_along() -> None:
    """Red when a copy into a page that went back still happens: it could hit its next owner."""
    case = Case()
    case.add([1] * 8, max_tokens=1)
    case.run()
    hit = case.request([1] * 8)
    case.scheduler.add(hit)
    cached = case.kv.match(hit)
    hit.row = 0
    assert case.kv.reserve(hit, cached, 8)
    case.kv.release(hit)
    _, copies = case.kv.take_edits()
    assert copies == ()


def test_abort_reason_is_passed_on() -> None:
    """Red when a stop string's abort is reported as the caller's."""
    case = Case()
    request = case.add([1, 2])
    (event,) = case.scheduler.abort(request.id, "stop")
    assert event.finish == "stop"
