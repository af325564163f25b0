"""Hints: the guess is the hint wherever the output follows it, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.commands import requests_of, submit_of
from quire.params import SamplingParams
from quire.request import Request
from quire.spec.hint import Hint
from quire.speculative import SpecConfig, parse_speculative, with_hints
from tests.spec.cases import answer, open_tiny, sampling


def hinted(output: list[int], hint: tuple[int, ...]) -> Request:
    made = Request.new(1, [9, 9, *output], SamplingParams(max_tokens=99))
    made.num_prompt, made.hint = 2, hint
    return made


def guess(output: list[int], hint: tuple[int, ...], most: int = 3) -> tuple[int, ...]:
    return Hint(SpecConfig("hint")).propose(hinted(output, hint), most).tokens


def test_the_place_is_kept_lost_and_found() -> None:
    """Red when a wrong word in the middle ends the use of a hint."""
    hint = (1, 2, 3, 4, 5, 6, 7, 8)
    assert guess([], hint) == (1, 2, 3)
    assert guess([1, 2], hint) == (3, 4, 5)
    assert guess([1, 2, 30], hint) == (4, 5, 6)  # another word in the same place
    assert guess([1, 2, 30, 4], hint) == (5, 6, 7)
    assert guess([1, 2, 30, 31], hint) == ()  # lost
    assert guess([1, 2, 30, 31, 3, 4], hint) == (5, 6, 7)  # words between
    assert guess([30, 31, *range(40, 60), 4, 5, 6], (*range(9, 39), *hint)) == (7, 8)  # far away
    assert guess([1, 2, 3, 4, 5, 6, 7, 8], hint) == ()
    assert guess([1], ()) == ()
    again = (1, 2, 3, 7, 1, 2, 3, 8)
    assert guess([5, 6, 1, 2, 3], again) == (7, 1, 2)  # the first place behind the lost one


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    output=st.lists(st.integers(0, 3), max_size=20), hint=st.lists(st.integers(0, 3), max_size=20)
)
def test_step_by_step_is_all_at_once(output: list[int], hint: list[int]) -> None:
    """Red when a guess depends on how many tokens came at a time."""
    slow = Hint(SpecConfig("hint"))
    for end in range(len(output) + 1):
        found = slow.propose(hinted(output[:end], tuple(hint)), 4)
    assert found.tokens == guess(output, tuple(hint), 4)
    assert len(found.chances) == len(found.tokens)
    slow.forget(hinted(output, tuple(hint)))


def test_hints_cross_the_wire() -> None:
    (found,) = requests_of(submit_of(hinted([], (5, 6, 7))))
    assert found.hint == (5, 6, 7)


def test_hints_come_first() -> None:
    assert with_hints(None) == {"method": "hint"}
    assert with_hints({"method": "suffix"})["method"] == "hint+suffix"
    assert with_hints({"model": "x"}) == {"model": "x", "method": "hint+draft_model"}
    assert with_hints({"method": "hint+ngram"})["method"] == "hint+ngram"
    assert parse_speculative(with_hints({"method": "suffix"})).depth == 48


@pytest.mark.parametrize("kind", ["greedy", "warm", "penalties", "grammar"])
def test_hints_change_nothing_but_the_steps(tmp_path: Path, kind: str) -> None:
    """Red when an answer differs from the one without a hint, or a right hint saves no step."""
    asked = [("the cat sat on the mat, the cat", sampling(kind, 7, ignore_eos=True))]
    plain = answer(open_tiny(tmp_path, "llama"), asked)
    (_, ((tokens, *_),)) = plain[0]  # type: ignore[misc]
    spec = {"method": "hint", "adaptive": False, "num_speculative_tokens": 8}
    llm = open_tiny(tmp_path, "llama", speculative_config=spec)
    core = llm._engine.core
    add, hints = core.add, {"right": tuple(tokens), "wrong": tuple(reversed(tokens))}
    steps = {}
    for name, hint in hints.items():

        def with_hint(request: Request, hint: tuple[int, ...] = hint) -> None:
            request.hint = hint
            add(request)

        core.add = with_hint  # type: ignore[method-assign]
        before = llm.stats().num_steps
        assert answer(llm, asked) == plain
        steps[name] = llm.stats().num_steps - before
    assert steps["right"] <= 1 + -(-len(tokens) // 8) + 1 <= steps["wrong"] + 2
