"""How much of whom goes into a step: decodes first, the token budget, chunks, pages, headroom."""

from __future__ import annotations

import random

import pytest

from tests.unit.case import Case, expected


def test_decodes_come_before_prompt_chunks() -> None:
    """Red when prompts are planned before decodes: streams would stall behind a long prompt."""
    case = Case(max_num_batched_tokens=4)
    first = case.add([1, 2, 3], max_tokens=20)
    case.step()
    second = case.add([4] * 20)
    for _ in range(5):
        case.step()
        assert case.fed() == {first.id: 1, second.id: 3}
        assert case.last_plan.works[0].request_id == first.id


def test_running_prompt_comes_before_a_new_one() -> None:
    """Red when admission takes budget from a prompt that is already half computed."""
    case = Case(max_num_batched_tokens=8)
    first, second = case.add([1] * 12), case.add([2] * 12)
    case.step()
    assert case.fed() == {first.id: 8}
    case.step()
    assert case.fed() == {first.id: 4, second.id: 4}


def test_budget_is_never_exceeded() -> None:
    """Red when a plan holds more tokens than the step may, or a request twice."""
    preempted = 0
    for seed in range(30):
        rng = random.Random(seed)
        budget = rng.choice([8, 13, 32])
        case = Case(num_pages=18, max_num_batched_tokens=budget, overlap=seed % 2 == 1)
        requests = [
            case.add([rng.randrange(7) for _ in range(rng.randint(1, 30))], rng.randint(1, 20))
            for _ in range(8)
        ]
        case.run()
        for plan in case.plans:
            assert plan.num_tokens <= budget
            assert len({work.request_id for work in plan.works}) == len(plan.works)
            assert len({work.row for work in plan.works}) == len(plan.works)
        for request in requests:
            assert request.output == expected(request, request.max_tokens)
        stats = case.scheduler.stats()
        assert stats.num_fed_tokens == sum(plan.num_tokens for plan in case.plans)
        preempted += stats.num_preempted
        case.assert_all_returned()
    assert preempted > 20, "the pool must be tight enough to preempt, or nothing is tested"


def test_a_preempted_request_s_share_goes_to_others_in_the_same_step() -> None:
    """Red when the budget of a work taken out of the plan is lost, or given back twice."""
    case = Case(num_pages=12, max_num_batched_tokens=10, policy="priority", priority_aging_s=1e9)
    victim = case.add([1], max_tokens=30, priority=9)
    case.step()
    grower = case.add([2] * 4, max_tokens=8, priority=0)
    reader = case.add([3] * 40, max_tokens=2, priority=1)
    case.step()
    assert case.fed() == {victim.id: 1, grower.id: 4, reader.id: 5}
    assert case.kv.num_available == 0
    case.step()  # the grower needs a page: the victim, planned already, must leave the plan
    assert victim.num_preempted == 1
    assert case.fed() == {grower.id: 1, reader.id: 9}
    case.run()
    stats = case.scheduler.stats()
    assert stats.num_fed_tokens == sum(plan.num_tokens for plan in case.plans)
    assert victim.output == expected(victim, 30)


def test_chunk_cap_and_where_sampling_happens() -> None:
    """Red when max_chunk is ignored, or when an unfinished prompt draws a token."""
    case = Case(max_chunk=3)
    request = case.add([1] * 10, max_tokens=1)
    case.run()
    works = [work for plan in case.plans for work in plan.works]
    assert [(w.start, w.num_tokens, w.sample) for w in works] == [
        (0, 3, False),
        (3, 3, False),
        (6, 3, False),
        (9, 1, True),
    ]
    assert request.output == expected(request, 1)


def test_chunk_cap_leaves_budget_to_others() -> None:
    """Red when one long prompt takes the whole step although max_chunk limits it."""
    case = Case(max_chunk=3, max_num_batched_tokens=8)
    requests = [case.add([i] * 10) for i in range(3)]
    case.step()
    assert list(case.fed().values()) == [3, 3, 2]
    assert list(case.fed()) == [r.id for r in requests]


def test_without_chunking_a_prompt_enters_whole_or_waits() -> None:
    """Red when chunked_prefill=False still splits a prompt."""
    case = Case(chunked_prefill=False, max_num_batched_tokens=16)
    first, second = case.add([1] * 10, max_tokens=3), case.add([2] * 10, max_tokens=3)
    case.step()
    assert case.fed() == {first.id: 10}
    case.step()
    assert case.fed() == {first.id: 1, second.id: 10}
    case.run()
    assert second.output == expected(second, 3)


def test_rows_limit_how_many_run() -> None:
    """Red when more requests run than there are rows, or a freed row is not used again."""
    case = Case(max_num_seqs=2)
    requests = [case.add([i, i], max_tokens=2) for i in range(5)]
    most = 0
    while case.core.has_work:
        case.step()
        most = max(most, len(case.scheduler.running))
    assert most == 2
    assert all(r.output == expected(r, 2) for r in requests)
    assert {a.row for plan in case.plans for a in plan.admissions} == {0, 1}


def test_admission_reserves_pages_for_the_whole_prompt() -> None:
    """Red when pages are reserved chunk by chunk: two half-admitted prompts could deadlock."""
    case = Case(max_num_batched_tokens=4, page_size=4)
    request = case.add([1] * 18)
    case.step()
    assert case.fed() == {request.id: 4}
    assert len(case.kv.table(request)) == 5


@pytest.mark.parametrize("caching", [True, False])
def test_no_admission_when_the_whole_prompt_does_not_fit(caching: bool) -> None:
    """Red when the first chunk alone decides: the rest of the prompt would preempt someone."""
    case = Case(num_pages=10, max_num_batched_tokens=8, max_model_len=40, caching=caching)
    first = case.add([1] * 20, max_tokens=8)
    for _ in range(3):
        case.step()
    second = case.add([2] * 20)
    case.step()
    assert second.id not in case.fed()
    assert not second.is_running
    assert second.id not in case.kv.holdings()
    case.run()
    assert (first.num_preempted, second.num_preempted) == (0, 0)
    assert second.output == expected(second, 4)


def test_admission_leaves_each_running_request_a_page_to_grow() -> None:
    """Red without headroom: the newcomer takes the last page and is preempted at once."""
    case = Case(num_pages=16, max_model_len=32)
    first = case.add([1] * 27, max_tokens=5)
    second = case.add([2] * 27, max_tokens=5)
    case.step()
    assert len(case.scheduler.running) == 2
    third = case.add([3, 3], max_tokens=1)
    assert case.kv.num_available == 2  # enough for the newcomer, not for the two to grow as well
    case.step()
    assert third.id not in case.fed()
    case.run()
    assert case.scheduler.stats().num_preempted == 0
    assert [r.num_output for r in (first, second, third)] == [5, 5, 1]
