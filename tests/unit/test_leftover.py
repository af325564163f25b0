"""What is left for the background: steps that are given up or short, and little beside others."""

from __future__ import annotations

import random

import pytest

from quire.config import SchedConfig
from quire.request import BACKGROUND, RequestId
from quire.sched.leftover import KEPT, LOOK_EVERY, Leftover
from quire.step import StepPlan, StepResult
from tests.unit.case import Case, Ready, expected


class Interrupted(Case):
    """Gives up every so many of the steps that may be."""

    every = 2
    num_given_up = 0
    _num_may = 0

    def execute(self, plan: StepPlan) -> Ready:
        if not plan.is_background:
            return super().execute(plan)
        assert all(self.scheduler.running[work.request_id].is_background for work in plan.works), (
            "somebody waits for this step"
        )
        self._num_may += 1
        if self._num_may % self.every:
            return super().execute(plan)
        self.num_given_up += 1
        # All but the works was done: rows were taken, pages copied.
        self.runner.execute(
            StepPlan((), plan.admissions, plan.page_writes, plan.page_copies)
        ).result()
        return Ready(StepResult((), is_given_up=True))


@pytest.mark.parametrize("every", [2, 3])
def test_a_step_given_up_is_as_if_it_had_never_been(every: int) -> None:
    """Red when tokens, pages or counts of a step that was thrown away are kept."""
    draw = random.Random(every)
    case = Interrupted(max_num_seqs=16, max_num_batched_tokens=16, num_pages=48)
    case.every, case.scheduler.leftover.can_stop = every, True
    lines = [
        case.add([draw.randrange(9)] * draw.randint(1, 40), draw.randint(1, 9), priority=BACKGROUND)
        for _ in range(12)
    ]
    for _ in range(20):
        case.step()
    people = [case.add([5] * draw.randint(1, 20), 6) for _ in range(3)]
    case.run()
    assert case.num_given_up > 5
    for request in [*lines, *people]:
        assert request.output == expected(request, request.max_tokens)
    case.assert_all_returned()


def test_halved_each_time_it_gets_on_however_often_people_come() -> None:
    """Red when a chunk of which no half fits between two visitors is begun again forever."""
    leftover = Leftover(SchedConfig(max_num_batched_tokens=512))
    leftover.can_stop, sizes = True, []
    for _ in range(30):  # whatever has more than 40 tokens is interrupted
        size = leftover._by_itself()
        sizes.append(size)
        leftover.learn(size, size * 1e-3, was_given_up=size > 40)
    done = [size for size in sizes if size <= 40]
    assert len(done) > 10 and sum(done) > sum(sizes[5:]) / 2
    for _ in range(30):  # and when nobody comes any more
        leftover.learn(leftover._by_itself(), 0.1, was_given_up=False)
    assert leftover._by_itself() == 512


def test_short_where_it_cannot_be_given_up() -> None:
    """1 ms a token: 50 tokens. Red when a visitor of a GPU waits for a long step of a batch."""
    leftover = Leftover(SchedConfig(max_num_batched_tokens=512))
    for tokens in (16, 512):
        leftover.learn(tokens, tokens * 1e-3, was_given_up=False)
    assert leftover._by_itself() == 50
    patient = Leftover(SchedConfig(max_num_batched_tokens=512, target_gap_ms=100.0))
    for tokens in (16, 512):
        patient.learn(tokens, tokens * 1e-3, was_given_up=False)
    assert patient._by_itself() == 100


@pytest.mark.parametrize(("per_token", "fits"), [(1e-6, 512), (1e-4, 26), (1e-2, 0)])
def test_beside_others_as_much_as_hardly_shows(per_token: float, fits: int) -> None:
    """A step takes 10 ms and so much a token; 2.5 ms more are fine. Red when batches make the
    answers that are being written stutter, or when a GPU's free rows stay empty."""
    leftover = Leftover(SchedConfig(max_num_batched_tokens=512))
    assert leftover._beside(4) == 0, "nothing is known: look first"
    for tokens in (4, 64, 512):
        leftover.learn(tokens, 10e-3 + per_token * tokens, was_given_up=False)
    given = [leftover._beside(4) for _ in range(LOOK_EVERY)]
    assert sum(number == 0 for number in given) >= 1, "now and then it looks again"
    assert max(given) == pytest.approx(max(fits, 1), abs=1)
    assert sum(given) > 0, "it gets on all the same"


def test_rows_and_pages_stay_free_for_those_who_come() -> None:
    """Red when a batch fills all rows, and whoever comes must drive a line out first."""
    case = Case(max_num_seqs=2 * KEPT, num_pages=64)
    case.scheduler.leftover.can_stop = True
    for _ in range(40):
        case.add([1] * 6, 20, priority=BACKGROUND)
    for _ in range(12):
        case.step()
    assert len(case.scheduler.running) <= 2 * KEPT - 2
    assert case.kv.num_available >= 64 // KEPT
    visitor = case.add([2] * 8, 2)
    case.step()
    assert case.fed() == {visitor.id: 8}
    assert case.scheduler.counts.preempted == 0


def test_drafts_are_not_disturbed() -> None:
    """A plan with drafts is never one to give up."""
    from quire.sched.background import is_all_background
    from quire.step import Work

    case = Case()
    line = case.add([1] * 4, priority=BACKGROUND)
    case.step()
    plain = Work(RequestId(line.id), 0, 4, 1, True)
    assert is_all_background([plain], case.scheduler.running)
    assert not is_all_background([plain._replace(num_drafts=1)], case.scheduler.running)
    assert not is_all_background([], case.scheduler.running)
