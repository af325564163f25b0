"""A text and a model that both guess: whoever is right is fed, and neither keeps the other away."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.params import SamplingParams
from quire.request import Request, RequestId
from quire.sched.costs import StepCosts
from quire.spec.in_turn import InTurn
from quire.spec.looks import FIRST, LAST, Looks
from quire.spec.neural import Neural
from quire.spec.proposer import NOTHING, Guess
from quire.spec.source import Offer, Source
from quire.spec.suffix import Suffix
from quire.speculative import SpecConfig
from tests.spec.played import CPU, Asked, Played

COSTS = replace(CPU, draft=StepCosts.of([(1, 0.34), (32, 3.0)]))
CONFIG = SpecConfig("suffix+eagle3", suffix_decoding_max_cached_requests=0)
RNG = random.Random(4)
WILD = [RNG.randrange(1000) for _ in range(240)]  # nothing comes twice, or hardly
ROUND = [RNG.randrange(1000) for _ in range(40)] * 6


def time_of(answer: list[int], num_right: int, *, text: bool, model: bool) -> float:
    made = [Suffix(CONFIG)] if text else []
    case = Played(InTurn(made or [Silent()]), 5, COSTS, Neural(CONFIG) if model else None)
    case.num_right = num_right
    case.ask(Asked([1, 2, 3], answer))
    case.run()
    return case.time


class Silent:
    def propose(self, request: Request, most: int) -> Guess:
        return NOTHING

    def forget(self, request: Request) -> None:
        pass


@pytest.mark.parametrize("num_right", [0, 1, 5])
@pytest.mark.parametrize("answer", [WILD, ROUND, WILD[:120] + ROUND[:120]])
def test_two_are_about_as_good_as_the_better_one(answer: list[int], num_right: int) -> None:
    """Red when a wrong model keeps a text from being asked, or drafts of a text that repeats
    nothing keep a model away."""
    both = time_of(answer, num_right, text=True, model=True)
    text = time_of(answer, num_right, text=True, model=False)
    model = time_of(answer, num_right, text=False, model=True)
    plain = time_of(answer, num_right, text=False, model=False)
    assert both < 1.06 * min(text, model, plain)


def test_a_text_that_begins_to_repeat_is_taken_up_where_a_model_failed() -> None:
    answer = WILD[:100] + ROUND[:140]
    alone = time_of(answer, 0, text=False, model=True)
    assert time_of(answer, 0, text=True, model=True) < 0.75 * alone


def test_of_many_requests_a_text_that_does_not_pay_is_asked_rarely() -> None:
    """Red when large batches ask every text every few steps, or few requests do not."""
    rare: dict[bool, int] = {}
    for are_few in (True, False):
        source = Source(Silent(), looks={RequestId(1): Looks()})
        offer = Offer(source, Guess((0.1,), (5,)))
        for step in range(1, 1000):
            if source.looks[RequestId(1)].is_due(step):
                offer.weighed(RequestId(1), pays=False, are_few=are_few)
        rare[are_few] = source.looks[RequestId(1)].every
    assert rare == {True: FIRST, False: LAST}


def test_the_first_that_expects_enough_or_else_who_expects_most() -> None:
    asked: list[int] = []

    class Sure:
        def __init__(self, chance: float, token: int) -> None:
            self.chance, self.token = chance, token

        def propose(self, request: Request, most: int) -> Guess:
            asked.append(self.token)
            return Guess((self.chance,) * most, (self.token,) * most)

        def forget(self, request: Request) -> None:
            pass

    request = Request.new(1, [1], SamplingParams())
    few, more, many = Sure(0.2, 1), Sure(0.3, 2), Sure(0.9, 3)
    assert InTurn([few, more]).propose(request, 4).tokens[0] == 2
    assert InTurn([more, few]).propose(request, 4).tokens[0] == 2
    asked.clear()
    assert InTurn([many, more]).propose(request, 4).tokens[0] == 3
    assert asked == [3]
