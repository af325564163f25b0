"""When a generation ends, and what its last event says."""

from __future__ import annotations

from typing import Any

import pytest

from quire.params import SamplingParams
from quire.request import Request
from quire.sched.finish import Finish, finish_of
from tests.unit.case import Case, expected

EOS, STOP, PLAIN = 2, 5, 6

# (output so far, parameters, what finish_of must say); max_tokens 4, context 10, prompt of 3
TABLE: list[tuple[list[int], dict[str, Any], Finish | None]] = [
    ([PLAIN], {}, None),
    ([EOS], {}, Finish("stop")),
    ([EOS], {"ignore_eos": True}, None),
    ([STOP], {}, None),
    ([STOP], {"stop_token_ids": [STOP]}, Finish("stop", STOP)),
    ([STOP], {"stop_token_ids": [STOP], "ignore_eos": True}, Finish("stop", STOP)),
    ([EOS], {"stop_token_ids": [EOS], "ignore_eos": True}, Finish("stop", EOS)),
    ([PLAIN] * 3, {}, None),
    ([PLAIN] * 4, {}, Finish("length")),
    ([PLAIN] * 3 + [EOS], {}, Finish("stop")),
    ([EOS], {"min_tokens": 2}, None),
    ([PLAIN, EOS], {"min_tokens": 2}, Finish("stop")),
    ([STOP], {"min_tokens": 2, "stop_token_ids": [STOP]}, None),
    ([PLAIN, STOP], {"min_tokens": 2, "stop_token_ids": [STOP]}, Finish("stop", STOP)),
    ([PLAIN] * 4, {"min_tokens": 4}, Finish("length")),
]


@pytest.mark.parametrize(("output", "params", "want"), TABLE)
def test_finish_table(output: list[int], params: dict[str, Any], want: Finish | None) -> None:
    """Red when eos, stop ids, ignore_eos, min_tokens or length change meaning or precedence."""
    request = Request.new(
        1, [7, 8, 9, *output], SamplingParams(max_tokens=4, **params), eos_ids=[EOS]
    )
    request.num_prompt = 3
    assert finish_of(request, max_model_len=10) == want


def test_context_ends_a_request_even_if_more_tokens_were_asked_for() -> None:
    """Red when max_model_len is checked one token late: the page table has no column for it."""
    request = Request.new(1, range(9), SamplingParams(max_tokens=50))
    request.num_prompt = 7
    assert finish_of(request, max_model_len=10) is None
    request.tokens.append(1)
    assert finish_of(request, max_model_len=10) == Finish("length")


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_exactly_max_tokens_are_drawn(max_tokens: int, overlap: bool) -> None:
    """Red when the engine draws a token nobody asked for, even one that is thrown away."""
    case = Case(overlap=overlap)
    request = case.add([1, 2, 3], max_tokens=max_tokens)
    case.run()
    assert sum(work.sample for plan in case.plans for work in plan.works) == max_tokens
    assert request.output == expected(request, max_tokens)
    assert case.finishes(request.id) == ["length"]


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_the_context_is_used_to_its_last_place(overlap: bool) -> None:
    """Red when a request stops one token short of max_model_len or runs over it."""
    case = Case(max_model_len=16, overlap=overlap)
    request = case.add([1] * 9, max_tokens=50)
    case.run()
    assert len(request.tokens) == 16
    assert request.output == expected(request, 7)
    assert sum(work.sample for plan in case.plans for work in plan.works) == 7


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_eos_is_reported_and_nothing_follows_it(overlap: bool) -> None:
    """Red when the token in flight behind an eos reaches the caller."""
    case = Case(overlap=overlap)
    probe = case.request([1, 2, 3])
    outputs = expected(probe, 12)
    eos = outputs[5]
    want = outputs[: outputs.index(eos) + 1]
    request = case.add([1, 2, 3], max_tokens=12, eos_ids=[eos])
    case.run()
    assert request.output == want
    final = case.events[-1]
    assert (final.finish, final.stop_reason, list(final.tokens)) == ("stop", None, [eos])
    assert [t for e in case.events for t in e.tokens] == want


def test_stop_token_is_named_in_the_final_event() -> None:
    """Red when stop_reason is lost on the way from finish_of to the event."""
    case = Case()
    outputs = expected(case.request([1, 2, 3]), 12)
    stop = outputs[4]
    case.add([1, 2, 3], max_tokens=12, stop_token_ids=[stop])
    case.run()
    assert (case.events[-1].finish, case.events[-1].stop_reason) == ("stop", stop)


def test_runner_is_told_what_to_ban_before_min_tokens() -> None:
    """Red when eos or stop ids can be drawn before min_tokens, or are banned without it."""
    case = Case()
    case.add([1, 2], eos_ids=[3], stop_token_ids=[4], min_tokens=2)
    case.add([1, 2], eos_ids=[3], stop_token_ids=[4])
    case.step()
    first, second = case.last_plan.admissions
    assert sorted(first.banned_until_min) == [3, 4]
    assert second.banned_until_min == ()


def test_every_token_is_in_exactly_one_event() -> None:
    """Red when preemption or overlap repeats or loses a token in the events."""
    for overlap in (False, True):
        case = Case(num_pages=12, max_model_len=40, overlap=overlap)
        requests = [case.add([i + 1] * 9, max_tokens=20) for i in range(3)]
        case.run()
        assert case.scheduler.stats().num_preempted > 0
        for request in requests:
            told = [t for e in case.events if e.request_id == request.id for t in e.tokens]
            assert told == request.output == expected(request, 20)


def test_times_are_the_clock_s() -> None:
    """Red when preemption or a later token overwrites the first readings."""
    case = Case(max_num_batched_tokens=4)
    case.now = 1.0
    request = case.add([1] * 8, max_tokens=3)
    for now in (2.0, 3.0, 4.0, 5.0):
        case.now = now
        case.step()
    timing = request.timing
    assert (timing.arrival, timing.scheduled) == (1.0, 2.0)
    assert (timing.first_token, timing.last_token) == (3.0, 5.0)
