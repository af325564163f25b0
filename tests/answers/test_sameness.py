"""Which questions are one question, and which answers one answer."""

from __future__ import annotations

from itertools import combinations

import pytest

from quire.answers.sameness import asks_the_same, says_the_same
from tests.answers.held_out import HELD_OUT, OTHER_FORM, REWORDED
from tests.answers.pairs import ADVERSARIAL, PARAPHRASES, SAME


@pytest.mark.parametrize(("one", "other"), [*ADVERSARIAL, *HELD_OUT])
def test_what_asks_for_something_else_is_another_question(one: str, other: str) -> None:
    """Red when a rule about what may differ lets a difference through that matters."""
    assert not asks_the_same(one, other) and not asks_the_same(other, one)


@pytest.mark.parametrize(("one", "other"), [*SAME, *OTHER_FORM])
def test_another_form_is_the_same_question(one: str, other: str) -> None:
    """Red when politeness, a final mark or a first letter counts as a difference."""
    assert asks_the_same(one, other) and asks_the_same(other, one)


def test_other_words_are_another_question() -> None:
    """What the documents say of paraphrases: red when the share that is let through changes."""
    pairs = [pair for texts in PARAPHRASES for pair in combinations(texts, 2)]
    assert len(pairs) == 12_000
    assert not any(asks_the_same(*pair) for pair in [*pairs, *REWORDED])


@pytest.mark.parametrize("one", [one for one, _ in [*ADVERSARIAL, *HELD_OUT]])
def test_a_word_more_is_another_question(one: str) -> None:
    """Red when any word can be missing, or stand elsewhere, without notice."""
    words = one.split(" ")
    for at in range(len(words)):
        shorter = " ".join(words[:at] + words[at + 1 :])
        assert not asks_the_same(one, shorter)
        swapped = " ".join([*words[:at], *reversed(words[at : at + 2]), *words[at + 2 :]])
        assert swapped == one or not asks_the_same(one, swapped)


def test_answers_that_say_the_same() -> None:
    assert says_the_same("The capital is Paris.", "the capital is Paris")
    assert says_the_same(
        "You can sort the list with the sorted function.",
        "You can sort a list with the sorted function.",
    )
    assert says_the_same("One.\nTwo.", "One. Two.")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("It takes 5 days.", "It takes 6 days."),
        ("Yes, it is safe.", "Yes, it is not safe."),
        ("Paris", "A long story about something else"),
        ("Germany beat Brazil.", "Brazil beat Germany."),
        ("You can now install it again.", "You can now uninstall it again."),
        ("It is 3.5 m.", "It is 35 m."),
        ("It needs 5 mW.", "It needs 5 MW."),
        ("The answer is C.", "The answer is C++."),
        ("这个药可以吃", "这个药不可以吃"),
        ("if x:\n  a()\nb()", "if x:\n  a()\n  b()"),
    ],
)
def test_answers_that_say_something_else(one: str, other: str) -> None:
    """Red when an entry's record counts an answer as right that says something else."""
    assert not says_the_same(one, other)
