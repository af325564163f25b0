"""The learned bound on what a real model says to one question in many forms."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from quire.answers.bound import Seen, error_bound
from quire.answers.features import words_of
from quire.answers.sameness import asks_the_same, says_the_same
from quire.llm import LLM
from quire.params import SamplingParams

QUESTIONS = (
    *("What day follows Monday?", "Name a fruit.", "Is a whale a fish?"),
    *("Who wrote Hamlet?", "Name three rivers.", "What is the tallest animal?"),
)
NUM_BLANKS, MAX_TOKENS = 12, 8
Agree = Callable[[str, str], bool]


class Judged(NamedTuple):
    gap: float  # of the first form's answer behind this form
    text: str  # what the model says itself


class Outcome(NamedTuple):
    num_given: int
    num_wrong: int
    stated: float  # the sum of the bounds under which answers were given


@pytest.fixture(scope="module")
def judged(default_model_path: Path) -> list[list[Judged]]:
    """For each question its forms, in the order they are asked; the first is in the cache."""
    llm = LLM(str(default_model_path), device="cpu")
    return [_judge(llm, _forms(question)) for question in QUESTIONS]


def _forms(question: str) -> list[str]:
    body, mark = question[:-1], question[-1]
    small = body[0].lower() + body[1:]
    ends = [end + " " * count for count in range(NUM_BLANKS) for end in (mark, "")]
    forms = [start + end for end in ends for start in (body, small)]
    assert all(asks_the_same(question, form) for form in forms)
    return forms


def _judge(llm: LLM, forms: list[str]) -> list[Judged]:
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    asked = llm.chat([[{"role": "user", "content": form}] for form in forms], greedy)
    first = asked[0].outputs[0]
    said = list(first.token_ids[:-1] if first.finish_reason == "stop" else first.token_ids)
    probe = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    prompts = [[*(one.prompt_token_ids or ()), *said] for one in asked]
    read = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], probe)
    found: list[Judged] = []
    for own, prompt, behind in zip(asked, prompts, read, strict=True):
        gap = 0.0
        for at in range(len(prompt) - len(said), len(prompt)):
            record = (behind.prompt_logprobs or [])[at]
            assert record is not None
            best = max(one.logprob for one in record.values())
            gap = max(gap, best - record[prompt[at]].logprob)
        found.append(Judged(gap, own.outputs[0].text))
    return found


def _begins_alike(count: int) -> Agree:
    return lambda one, other: words_of(one)[:count] == words_of(other)[:count]


def _give(judged: list[list[Judged]], agree: Agree, promise: float) -> Outcome:
    """What the cache does: give below the promise, else make the answer anew and learn."""
    num_given = num_wrong = 0
    stated = 0.0
    for forms in judged:
        cached, seen = forms[0].text, list[Seen]()
        for gap, text in forms[1:]:
            if gap == 0.0:
                continue  # proved
            is_right, bound = agree(text, cached), error_bound(seen, gap)
            if bound <= promise:
                num_given += 1
                num_wrong += not is_right
                stated += bound
            else:
                seen.append(Seen(gap, is_right))
    return Outcome(num_given, num_wrong, stated)


@pytest.mark.skipif(
    not os.environ.get("QUIRE_LONG_TESTS"), reason="a minute of a real model: QUIRE_LONG_TESTS=1"
)
def test_what_is_given_is_wrong_no_more_often_than_stated(judged: list[list[Judged]]) -> None:
    """Red when the bound is too low on the gaps of a real model, whatever counts as the same; or
    when a prefill proves what the model does not say."""
    for forms in judged:
        assert all(one.text == forms[0].text for one in forms if one.gap == 0.0)
    for promise in (0.05, 0.1, 0.2, 0.3):
        for agree in (says_the_same, _begins_alike(1), _begins_alike(2), _begins_alike(3)):
            outcome = _give(judged, agree, promise)
            assert outcome.num_wrong <= outcome.stated <= promise * outcome.num_given
    easy = _give(judged, _begins_alike(2), 0.2)
    assert easy.num_given > 20, easy  # else nothing was tried
