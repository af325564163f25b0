"""A table of step costs that came out wrong heals by the steps that follow, under a played clock.

Turns red when a size that seemed slow at start is never fed again, when one that seemed fast goes
on costing time, when a noisy or a slower machine changes what is drafted, or when tokens follow.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from quire.sched.costs import StepCosts
from quire.sched.costs_in_use import CostsInUse
from quire.spec.depth import Costs
from quire.spec.learned_costs import EVERY
from quire.spec.speculation import Limits, Speculation
from quire.step import StepPlan
from tests.spec.test_never_slower import CPU as TABLE
from tests.spec.test_never_slower import DEPTH, GPU, Headed, Wrong
from tests.unit.case import Case, Ready, expected

Pace = Callable[[int], float]  # by the number of the step, what all steps take longer


def steady(num_step: int) -> float:
    return 1.0


class Played(Case):
    """Steps take what `real` says; the policy was told something else."""

    def __init__(self, real: Costs, told: Costs, proposer: Wrong | Headed, pace: Pace) -> None:
        super().__init__(
            num_pages=2048, page_size=16, max_model_len=4096, max_num_batched_tokens=4096
        )
        head = 0.5 if isinstance(proposer, Headed) else 0.0
        self.drafts = Speculation(proposer, Limits(DEPTH, head=head), told)
        self.core.drafts, self.real, self.pace = self.drafts, real, pace
        self.work = 0.0  # what the steps would have taken on a calm machine

    def execute(self, plan: StepPlan) -> Ready:
        ms = self.real.step.seconds(max(1, plan.num_tokens))
        drafted = [work.num_drafts for work in plan.works if work.num_drafts and not work.drafts]
        if drafted and self.real.draft is not None:
            making = max(drafted) * self.real.draft.seconds(len(drafted))
            self.drafts.counts.seconds += making
            ms += making
        self.work += ms
        self.now += ms * self.pace(len(self.plans))
        return super().execute(plan)

    def step(self) -> list[object]:  # type: ignore[override]
        return [*self.core.step()]  # pages are checked elsewhere

    def ask(self, num: int, num_tokens: int) -> None:
        asked = [self.add([i, 1, 2], num_tokens, ignore_eos=True) for i in range(num)]
        self.run(max_steps=20_000)
        for request in asked:
            assert request.output == expected(request, num_tokens)

    def seconds_of(self, num: int, num_tokens: int) -> float:
        begun = self.now
        self.ask(num, num_tokens)
        return self.now - begun


def right() -> Wrong:
    proposer = Wrong()
    proposer.is_right = True
    return proposer


def distorted(costs: Costs, factors: dict[int, float]) -> Costs:
    step = costs.step
    times = [time * factors.get(n, 1.0) for n, time in zip(step.tokens, step.times, strict=True)]
    return replace(costs, step=StepCosts(step.tokens, tuple(times)))


DRAFT = StepCosts.of([(1, 0.05), (32, 0.3)])  # of a head
CPU = replace(TABLE, draft=DRAFT)
TOO_SLOW = distorted(CPU, {2: 4.0, 4: 4.0, 8: 3.0, 32: 2.0, 64: 1.5})
TOO_FAST = distorted(CPU, {1: 2.0, 2: 2.0, 4: 1.7})


@pytest.mark.parametrize("make", [right, Headed], ids=["right", "head"])
def test_sizes_that_seemed_slow_are_fed_before_long(make: Callable[[], Wrong | Headed]) -> None:
    """The start says that no draft pays, ever."""
    case = Played(CPU, TOO_SLOW, make(), steady)
    case.ask(1, 1500)
    good = Played(CPU, CPU, make(), steady)
    good.ask(1, 400)
    assert good.drafts.counts.num_runs > 50, "drafts pay here"
    # Two seconds later it drafts as if the start had been right.
    assert case.seconds_of(1, 400) < 1.04 * good.seconds_of(1, 400)


def test_sizes_that_seemed_fast_are_left_before_long() -> None:
    """Eight requests, whose drafts cost what they bring: the start says that they are for free."""
    real = Costs(StepCosts.of([(1, 2.0), (8, 9.0), (16, 18.0), (40, 45.0)]), DRAFT)
    told = distorted(real, {8: 3.0, 16: 1.6})
    case, good = (Played(real, costs, Headed(), steady) for costs in (told, real))
    case.ask(8, 300)
    assert good.seconds_of(8, 300) > 0.97 * case.seconds_of(8, 300)


def noisy(seed: int) -> Pace:
    """A tenth of the steps take up to five times as long, and all of them a little longer."""
    rng = random.Random(seed)
    return lambda _: 1 + 0.1 * rng.random() + (rng.random() < 0.1) * rng.expovariate(0.7)


def twice_as_slow(num_step: int) -> float:
    """For half of the time somebody else uses the machine."""
    return 1.0 + (num_step // 150) % 2


@pytest.mark.parametrize("pace", [noisy(1), noisy(2), twice_as_slow])
@pytest.mark.parametrize("num", [1, 2])
def test_noise_does_not_make_drafts_pay_less(pace: Pace, num: int) -> None:
    """Red when a disturbed step, or a slower machine, is taken for an error of the table."""
    proposer = right()
    calm, rough = (Played(CPU, CPU, proposer, how) for how in (steady, pace))
    for case in (calm, rough):
        case.ask(num, 1500)
    assert rough.work <= 1.05 * calm.work


@pytest.mark.parametrize("num", [1, 8])
def test_noise_leaves_wrong_drafts_alone(num: int) -> None:
    case = Played(CPU, CPU, Wrong(), noisy(3))
    case.ask(num, 1000)
    fed = sum(plan.num_tokens for plan in case.plans) / num
    assert fed < 1.08 * 1000


@pytest.mark.parametrize("costs", [CPU, replace(GPU, wait=0.0)], ids=["cpu", "flat"])
@pytest.mark.parametrize("num", [1, 8])
def test_trials_cost_next_to_nothing(costs: Costs, num: int) -> None:
    """Wrong drafts, and a table that was right."""
    told, case = (Played(costs, costs, Wrong(), steady) for _ in range(2))
    told.drafts.learned = None
    assert case.seconds_of(num, 512) <= 1.01 * told.seconds_of(num, 512)


def test_a_step_without_drafts_is_seen_now_and_then() -> None:
    flat = Costs(StepCosts.of([(1, 1.0), (8, 1.2)]))
    case = Played(flat, flat, right(), steady)
    case.ask(1, 5 * 20 * EVERY)
    assert 1 <= sum(plan.num_tokens == 1 for plan in case.plans[1:-1]) < 8
    assert case.drafts.learned is not None and case.drafts.learned.sizes.is_known(1)


# ------------------------------------------------------------ the table alone


REAL = StepCosts.of([(1, 1.0), (2, 1.2), (4, 1.6), (8, 2.4), (16, 4.0)])


@pytest.mark.parametrize("seed", range(5))
def test_the_table_converges_and_is_a_value(seed: int) -> None:
    rng = random.Random(seed)
    factors = [rng.choice((1.0, 1.5, 3.0)) for _ in REAL.tokens]
    start = StepCosts.of(
        (n, t * f) for n, t, f in zip(REAL.tokens, REAL.times, factors, strict=True)
    )
    before, costs, pace = start.times, CostsInUse(start), noisy(seed)
    for at in range(600):
        size = rng.randrange(1, 17)
        costs.learn(size, REAL.seconds(size) * pace(at))
    assert start.times == before
    for size in range(1, 17):  # beside each other, and as they are now
        shape = costs.steady.seconds(size) / costs.steady.seconds(8)
        assert shape == pytest.approx(REAL.seconds(size) / REAL.seconds(8), rel=0.2)
        assert costs.now.seconds(size) == pytest.approx(1.1 * REAL.seconds(size), rel=0.3)
    assert list(costs.now.times) == sorted(costs.now.times)


def test_a_size_alone_says_nothing_about_others() -> None:
    """Red when a slower machine seems to make the one size that is seen slower than the others."""
    costs = CostsInUse(REAL)
    for at in range(500):
        costs.learn(1, 1.0 if at < 100 else 2.0)
    assert costs.steady is costs.start
    assert costs.now.seconds(8) == pytest.approx(2 * REAL.seconds(8), rel=0.05)


def test_steps_that_took_no_time_teach_nothing() -> None:
    costs = CostsInUse(REAL)
    before = costs.now
    for _ in range(100):
        costs.learn(4, 0.0)
    assert costs.now is before and costs.num_steps == 0
