"""Depth, costs and survival: never deeper than pays, and back to none where drafts are wrong."""

from __future__ import annotations

import itertools
import random

import pytest

from quire.request import RequestId
from quire.runner.step_times import padded
from quire.sched.costs import StepCosts
from quire.spec.depth import WORTH, Candidate, Costs, best_depths
from quire.spec.survival import Survival

FLAT = StepCosts.of([(1, 1.0), (64, 1.3)])  # reading weights is all that counts
STEEP = StepCosts.of([(1, 1.0), (64, 64.0)])  # every token costs a step


def rate(depths: tuple[int, ...], chances: list[list[float]], others: int, costs: Costs) -> float:
    """Tokens a second of these depths, by the book."""
    tokens, num = float(len(chances) + others), len(chances) + others
    for depth, own in zip(depths, chances, strict=True):
        survival = 1.0
        for chance in own[:depth]:
            survival *= chance
            tokens += survival
        num += depth
    seconds = costs.step.seconds(num)
    if costs.draft is not None:
        for place in range(max(depths)):
            seconds += costs.draft.seconds(sum(depth > place for depth in depths))
    return tokens / seconds


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_made", [True, False])
def test_depths_are_the_best_there_are(seed: int, is_made: bool) -> None:
    """Red when another choice of depths gives more tokens a second, by more than a hair."""
    rng = random.Random(seed)
    step = StepCosts.of([(1, 1.0), (4, 1.0 + rng.random()), (16, 2 + 4 * rng.random())])
    draft = None if is_made else StepCosts.of([(1, 0.05), (8, 0.1)])
    costs, others = Costs(step, draft), rng.randrange(3)
    chances = [[rng.random() ** 0.3 for _ in range(3)] for _ in range(3)]
    found = best_depths([Candidate(own, is_made) for own in chances], others, costs)
    best = max(
        rate(depths, chances, others, costs) for depths in itertools.product(range(4), repeat=3)
    )
    # Drafts of a model come in whole rounds, which one pass in order of survival may miss.
    slack = 1 / WORTH if is_made else 0.97 / WORTH
    assert rate(tuple(found), chances, others, costs) >= slack * best - 1e-9


def test_nothing_is_drafted_where_every_token_costs_a_step() -> None:
    """Red when drafts that cannot pay are fed."""
    assert best_depths([Candidate([0.99] * 4)], 0, Costs(STEEP)) == [0]
    assert best_depths([Candidate([0.9] * 4)], 0, Costs(FLAT)) == [4]
    # Drawing may cost more than the step itself.
    drawn = Candidate([0.9] * 4, is_drawn=True)
    assert best_depths([drawn], 0, Costs(FLAT, draw=9.0)) == [0]


def test_drafts_pay_for_the_wait_for_results() -> None:
    """Red when a step with drafts is weighed against one that waits for its result in vain."""
    one = Candidate([0.2])
    assert best_depths([one], 0, Costs(FLAT)) == [1]
    assert best_depths([one], 0, Costs(FLAT, wait=0.3)) == [0]
    assert best_depths([Candidate([0.9])], 0, Costs(FLAT, wait=0.3)) == [1]


def test_sizes_that_are_padded_take_as_long() -> None:
    costs = StepCosts.of(padded([(1, 5.0), (2, 6.0), (4, 7.0), (8, 9.0)]))
    assert [costs.seconds(n) for n in range(1, 9)] == [5, 6, 7, 7, 9, 9, 9, 9]
    assert costs.less(6.0).times == (0, 0, 1, 1, 3, 3)


def test_costs_never_fall() -> None:
    """Red when noise in a measurement makes more tokens cheaper, or a disturbed size those above
    it dearer."""
    costs = StepCosts.of([(4, 3.0), (1, 2.0), (2, 5.0)])
    assert [costs.seconds(n) for n in (1, 2, 3, 4, 9)] == [2.0, 3.0, 3.0, 3.0, 3.0]


def test_wrong_drafts_are_soon_given_up_and_tried_again_later() -> None:
    """Red when an always-wrong proposer keeps its depth, or is never given another chance."""
    survival, id = Survival(), RequestId(1)
    own, depths = (0.8,) * 8, []
    costs = Costs(StepCosts.of([(1, 1.0), (9, 2.0)]))
    for _ in range(400):
        (depth,) = best_depths([Candidate(survival.chances(id, own))], 0, costs)
        depths.append(depth)
        survival.fade([id])
        if depth:
            survival.learn(id, own[:depth], 0)
    assert sum(depths[20:]) < 0.06 * 380, depths
    assert sum(depths[200:]) > 0


def test_right_drafts_are_trusted() -> None:
    """Red when a perfect proposer is not used to its full depth."""
    survival, id = Survival(), RequestId(1)
    own = (0.4,) * 8
    costs = Costs(StepCosts.of([(1, 1.0), (9, 2.5)]))
    for _ in range(30):
        (depth,) = best_depths([Candidate(survival.chances(id, own))], 0, costs)
        survival.learn(id, own[:depth], depth)
        survival.fade([id])
    assert depth == 8


@pytest.mark.parametrize("seed", range(20))
def test_what_is_soon_said_is_what_weighing_would_say(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when drafts that would pay are not weighed."""
    rng = random.Random(seed)
    times = sorted(1 + 3 * rng.random() for _ in range(3))
    step = StepCosts.of(zip((1, rng.randrange(2, 9), 16), times, strict=True))
    costs = Costs(step, StepCosts.of([(1, 0.05), (8, 0.1)]), draw=0.02 * rng.random())
    candidates = [
        Candidate([rng.random() for _ in range(4)], rng.random() < 0.5, rng.random() < 0.5)
        for _ in range(rng.randrange(1, 7))
    ]
    found = [best_depths(candidates, num_others, costs) for num_others in range(4)]
    monkeypatch.setattr("quire.spec.depth._can_pay", lambda *_: True)
    weighed = [best_depths(candidates, num_others, costs) for num_others in range(4)]
    assert found == weighed
