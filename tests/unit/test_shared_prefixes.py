"""Decodes behind one prefix stand side by side, and the plan says so."""

from __future__ import annotations

import pytest

from quire.sched.neighbours import WORTH_SHARING, WORTH_SHARING_AMONG
from tests.unit.case import Case, expected

SIZE = 64
BASE = list(range(1, WORTH_SHARING + 1))
OTHER = [token + 1000 for token in BASE]


def case(windows: tuple[int | None, ...] = (None,)) -> Case:
    limits = {"max_num_batched_tokens": 16384, "max_model_len": 1024, "max_num_seqs": 32}
    return Case(num_pages=400, page_size=SIZE, windows=windows, **limits)


def warm(here: Case, *prefixes: list[int]) -> None:
    for prefix in prefixes:
        here.add([*prefix, 7, 7, 7], 1)
    here.run()


def decode_step(here: Case) -> None:
    """To a step in which everyone decodes, some way into it."""
    for _ in range(3):
        here.step()
    assert all(work.num_tokens == 1 for work in here.last_plan.works)


def test_sharers_become_neighbours() -> None:
    here = case()
    warm(here, BASE, OTHER)
    each = [(BASE, OTHER)[i % 2] for i in range(2 * WORTH_SHARING_AMONG)]
    requests = [here.add([*prefix, 5000 + i], 6) for i, prefix in enumerate(each)]
    decode_step(here)
    assert here.last_plan.shares_prefix
    kinds = [each[work.request_id - requests[0].id] is BASE for work in here.last_plan.works]
    assert kinds in (sorted(kinds), sorted(kinds, reverse=True))
    here.run()
    for request in requests:
        assert request.output == expected(request, 6)


@pytest.mark.parametrize("why", ["too few", "too short", "only windows", "nothing in common"])
def test_otherwise_not(why: str) -> None:
    here = case((128,) if why == "only windows" else (None,))
    prefix = BASE[: SIZE * 2] if why == "too short" else BASE
    warm(here, prefix)
    count = 2 * WORTH_SHARING_AMONG
    for i in range(count):
        apart = why == "nothing in common" or (why == "too few" and i > 2)
        here.add([*([token + 10_000 * (i + 1) for token in prefix] if apart else prefix), i], 6)
    decode_step(here)
    assert len(here.last_plan.works) == count
    assert not here.last_plan.shares_prefix
