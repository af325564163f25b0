"""Requests of the last priority take what others leave, whatever the policy."""

from __future__ import annotations

import pytest

from quire.config import SchedConfig
from quire.engine.core import EngineCore
from quire.kv.manager import KVManager
from quire.params import SamplingParams
from quire.request import BACKGROUND, Request
from quire.sched.scheduler import Scheduler
from tests.doubles import PageContentRunner

PAGE, PAGES, ROWS = 4, 32, 4


def core_of(policy: str) -> EngineCore:
    config = SchedConfig(
        max_num_seqs=ROWS, max_num_batched_tokens=16, max_model_len=64, policy=policy
    )
    runner = PageContentRunner(PAGES, PAGE, ROWS, 16)
    now = iter(range(1_000_000))
    scheduler = Scheduler(config, KVManager(PAGES, PAGE), clock=lambda: float(next(now)))
    scheduler.leftover.can_stop = True  # steps of the background are of any length
    return EngineCore(scheduler, runner, overlap=False)


def request(id: int, length: int, priority: int = 0, max_tokens: int = 20) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request.new(id, [id % 7] * length, params, priority=priority, arrival=float(id))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_newcomer_has_the_step_to_itself(policy: str) -> None:
    """Red when a line of a batch lengthens the step that reads somebody's prompt."""
    core = core_of(policy)
    for id in range(1, 6):  # more than there are rows
        core.add(request(id, 12, BACKGROUND))
    for _ in range(6):
        core.step()
    assert len(core.scheduler.running) == ROWS
    core.add(request(100, 10, max_tokens=12))
    core.step()  # makes way
    core.step()
    assert [work.request_id for work in core.last_plan.works] == [100]
    beside = set()
    for _ in range(10):  # while it writes, others run along
        core.step()
        beside |= {work.request_id for work in core.last_plan.works}
    assert beside > {100}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_pages_are_given_back_and_everyone_ends(policy: str) -> None:
    """Red when a batch that holds all pages keeps others waiting, or is never taken up again."""
    core, ended = core_of(policy), {}
    for id in range(1, 5):
        core.add(request(id, 20, BACKGROUND, max_tokens=30))
    for _ in range(8):
        core.step()
    core.add(request(100, 50, max_tokens=10))
    for step in range(400):
        for event in core.step():
            if event.finish is not None:
                ended[event.request_id] = step
    assert set(ended) == {1, 2, 3, 4, 100}
    assert ended[100] == min(ended.values())
