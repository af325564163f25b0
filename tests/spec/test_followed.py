"""Following a text that is written again with edits: steps are counted, on texts that are played.

Turns red when a place that an edit moved is not found at once, when a name that became another is
not written as the other from then on, or when that is done where it was wrong.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.spec.followed import Followed, trust
from quire.spec.hint import Hint
from quire.spec.in_turn import InTurn
from quire.spec.matches import MOST, Matches
from quire.spec.proposer import Guess
from quire.spec.replaced import ALIKE, LONGEST, Replaced
from quire.spec.suffix import Suffix
from quire.speculative import SpecConfig
from tests.spec.played import CPU, Asked, Played, played

LETTER = """Dear Anna, thank you very much for the book about the sea. Anna, you know how much I
love the coast, and every chapter made me think of our summers there. The pictures of the old
harbour are wonderful. When Anna the younger saw the drawings of whales, she would not give the book
back. I hope that you, Anna, will visit us soon and read it with her. With love to Anna and all of
her family."""
CODE = """def total(prices, tax): result = 0.0 for price in prices: if price < 0: raise
ValueError("a price is negative") result += price return result * (1 + tax) def average(prices): if
not prices: raise ValueError("there are no prices") return sum(prices) / len(prices) def
cheapest(prices, count): return sorted(prices)[:count]"""
HINTS = SpecConfig("hint")


def tokens_of(text: str) -> list[int]:
    """Words and marks by their letters: the same in every run."""
    return [
        sum(b << 7 * i for i, b in enumerate(w.encode()[:4])) for w in re.findall(r"\w+|\W", text)
    ]


def gain(hint: str, answer: str, prompt: Sequence[int] = (1, 2, 3)) -> float:
    asked = Asked(prompt, tokens_of(answer), tokens_of(hint))
    plain = (len(asked.answer) - 1) * CPU.step.seconds(1)
    return plain / played(Hint(HINTS), 48, asked).time


@pytest.mark.parametrize(
    ("hint", "answer", "least"),
    [
        pytest.param(LETTER, LETTER, 5.0, id="the same"),
        pytest.param(LETTER, LETTER.replace("Anna", "Peter"), 4.0, id="a name"),
        pytest.param(LETTER, LETTER.replace("Anna", "Mr. van der Berg"), 3.0, id="a longer name"),
        pytest.param(LETTER.replace("Anna", "Mr. van der Berg"), LETTER, 3.0, id="a shorter name"),
        pytest.param(CODE, CODE.replace("prices", "item.costs"), 3.0, id="a variable"),
        pytest.param(CODE, CODE.replace("(prices", "(prices: list"), 2.5, id="words put in"),
        pytest.param(LETTER, LETTER.replace("the book", "it"), 3.5, id="words left out"),
        pytest.param(LETTER[200:] + LETTER[:200], LETTER, 3.0, id="halves in turn"),
    ],
)
def test_edits_cost_few_steps(hint: str, answer: str, least: float) -> None:
    assert gain(hint, answer) > least


@pytest.mark.parametrize(
    ("text", "old", "new", "least"),
    [(LETTER, "Anna", "Mr. van der Berg", 2.5), (CODE, "prices", "item.costs", 2.5)],
)
def test_a_prompt_that_is_written_again(text: str, old: str, new: str, least: float) -> None:
    """Red when a prompt is not followed as a hint is."""
    answer = tokens_of(text.replace(old, new))
    config = SpecConfig("suffix")
    case = played(Suffix(config), config.depth, Asked([*tokens_of(text), 1, 2, 3], answer))
    assert (len(answer) - 1) * CPU.step.seconds(1) / case.time > least


def test_where_the_hint_ends_the_answer_is_followed() -> None:
    """Red when an answer that repeats itself gets no guess behind its hint."""
    assert gain(LETTER[:60], LETTER[:60] + CODE[:150] + CODE[:150]) > 1.5


@pytest.mark.parametrize("method", ["hint", "suffix", "hint+suffix"])
def test_texts_that_never_repeat_cost_next_to_nothing(method: str) -> None:
    """Red when wrong guesses from look-alikes are fed again and again."""
    rng = random.Random(3)
    hint, answer = ([rng.choice(range(60)) for _ in range(300)] for _ in range(2))
    made = [{"hint": Hint, "suffix": Suffix}[part](SpecConfig(part)) for part in method.split("+")]
    case = played(InTurn(made), 48, Asked(hint[:100], answer, hint))
    assert 299 * CPU.step.seconds(1) / case.time > 0.97


class Wrong:
    def propose(self, request: object, most: int) -> Guess:
        return Guess((0.8,) * most, (-5,) * most)

    def forget(self, request: object) -> None:
        pass


def test_guesses_that_are_always_wrong() -> None:
    case = played(Wrong(), 24, Asked([1, 2, 3], range(120)))
    assert 119 * CPU.step.seconds(1) / case.time >= 0.97


# ------------------------------------------------------------ the proposer itself


texts = st.lists(st.integers(0, 3), max_size=40)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(hint=texts, prompt=texts, output=texts, most=st.integers(1, 9))
def test_guesses_are_texts_with_chances(
    hint: list[int], prompt: list[int], output: list[int], most: int
) -> None:
    """Red when more is guessed than was asked for, from nowhere, or without a chance."""
    followed = Followed(hint, prompt)
    known = {*hint, *prompt}
    for token in output:
        found = followed.guess(most)
        assert len(found.tokens) == len(found.chances) <= most
        assert known >= set(found.tokens)
        assert all(0.0 < chance < 1.0 for chance in found.chances)
        followed.move(token)
        known.add(token)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(text=st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_matches_are_those_there_are(text: list[int]) -> None:
    """Red when a length is too long, or in a text this short a place is missed or cut short."""
    found = Matches(text).lengths
    for place in range(1, len(text)):
        run = 0
        while run < place and text[place - 1 - run] == text[len(text) - 1 - run]:
            run += 1
        assert found.get(place, 0) == run
    assert len(text) not in found


def test_a_token_that_is_everywhere_costs_no_more() -> None:
    matches = Matches([1, 2] * 5000)
    assert len(matches.lengths) <= MOST
    matches.add(1, near=500)
    assert len(matches.lengths) <= MOST and max(matches.lengths.values()) > 100
    ahead = Matches()
    ahead.load([7, *range(100, 108)] * 500)
    ahead.add(7, near=900)
    assert (
        min(place for place in ahead.lengths if place > 900) == 901 and len(ahead.lengths) <= MOST
    )


def test_what_was_replaced_is_replaced_until_it_is_not() -> None:
    text, replaced = [5, 6, 1, 2, 7, 1, 2], Replaced()
    replaced.learn(text, 1, 5, [6, 9, 9, 7])
    span = replaced.at(text, 5)
    assert span is not None and (span.num_old, span.new, span.is_proven) == (2, (9, 9), False)
    replaced.judge(text, 5, is_right=True)
    assert (span := replaced.at(text, 2)) is not None and span.is_proven
    replaced.judge(text, 5, is_right=False)
    assert replaced.at(text, 5) is None
    replaced.learn(text, 2, 2, [8])  # put in behind 5, 6
    assert (span := replaced.at([5, 6, 4], 2)) is not None and (span.num_old, span.new) == (0, (8,))
    replaced.judge([5, 6, 4], 2, is_right=False)
    assert replaced.at([5, 6, 4], 2) is None
    replaced.learn(list(range(50)), 0, 50, [])  # much was left out, and stays where it stands else
    assert all(replaced.at(list(range(50)), place) is None for place in range(50))
    for last in range(20):
        replaced.learn([3, last], 0, 2, [last + 100] * LONGEST)
    assert sum(replaced.at([3, last], 0) is not None for last in range(20)) == ALIKE


def test_trust_rises_with_the_match() -> None:
    chances = [trust(length) for length in range(1, 99)]
    assert chances == sorted(chances) and chances[0] > 0 and chances[-1] < 1


def test_a_batch_costs_no_more_than_its_requests() -> None:
    """Red when moving along and guessing takes a request longer the more there are, or longer than
    a fraction of a step: some 20 us each, taken loosely as others use the machine as well."""
    rng = random.Random(1)
    hint = [rng.choice(range(200)) for _ in range(2000)]
    followed = [Followed(hint, hint[:500]) for _ in range(256)]
    output = [token if rng.random() < 0.95 else 201 for token in hint[:20]]
    begun = time.process_time()
    for token in output:
        for one in followed:
            one.move(token)
            one.guess(16)
    assert (time.process_time() - begun) / (256 * len(output)) < 500e-6


def test_a_batch_is_drafted_for_as_far_as_that_pays() -> None:
    """Red when many requests with hints take longer than without."""
    case, plain = Played(Hint(HINTS), 48), Played(None, 0)
    answers = [tokens_of(LETTER.replace("Anna", name)) for name in ("Peter", "Maria", "Jo", "Li")]
    for one in (case, plain):
        for answer in answers * 4:
            one.ask(Asked([1, 2, 3], answer, tokens_of(LETTER)))
        one.run()
    assert plain.time / case.time > 1.02 and case.num_steps < plain.num_steps
