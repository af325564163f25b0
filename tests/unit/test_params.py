"""SamplingParams refuses what cannot be served, naming the parameter and the value."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quire.errors import BadRequest
from quire.params import (
    MAX_BIASED_TOKENS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOPS,
    BeamSearchParams,
    SamplingParams,
)

NAN, INF = float("nan"), float("inf")

BAD: list[tuple[str, Any]] = [
    *(("n", v) for v in (0, -1, MAX_N + 1, 1.5, "2", True, None)),
    *(("max_tokens", v) for v in (0, -1, 1.0, "9", True)),
    *(("min_tokens", v) for v in (-1, 17, 1.0, "1", None, True)),  # max_tokens is 16
    *(("logprobs", v) for v in (-1, MAX_LOGPROBS + 1, 1.0, "1", True)),
    *(("prompt_logprobs", v) for v in (-1, MAX_LOGPROBS + 1, 1.0, "1", True)),
    *(("temperature", v) for v in (-0.1, 101.0, NAN, INF, "1", None)),
    *(("top_p", v) for v in (0.0, -0.1, 1.1, NAN, "1", None)),
    *(("min_p", v) for v in (-0.1, 1.1, NAN, "0", None)),
    *(("top_k", v) for v in (-2, 1.0, "1", None, True, 2**63, 10**30)),
    *(("presence_penalty", v) for v in (-2.1, 2.1, NAN, "0", None)),
    *(("frequency_penalty", v) for v in (-2.1, 2.1, NAN, "0", None)),
    *(("repetition_penalty", v) for v in (0.0, -1.0, 10.1, NAN, "1", None)),
    *(("seed", v) for v in (2**63, -(2**63) - 1, 1.0, "1", True)),
    *(("stop", v) for v in ("", ["a", ""], [1], ["x"] * (MAX_STOPS + 1), 5, [None])),
    *(("stop_token_ids", v) for v in ([-1], [1.0], ["1"], [True], 5, "12")),
    *(("allowed_token_ids", v) for v in ([], [-1], [1.0], ["1"], 5)),
    *(
        ("logit_bias", v)
        for v in (
            {-1: 1.0},
            {"1": 1.0},
            {1: 101.0},
            {1: -101.0},
            {1: NAN},
            {1: "1"},
            {1: None},
            [1, 2],
            dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0),
        )
    ),
    *(("truncate_prompt_tokens", v) for v in (0, -2, 1.0, "1", True)),
    *(("logits_processors", v) for v in ([], [max])),
    *(("extra_args", v) for v in ({}, {"a": 1})),
    *(("bad_words", v) for v in ([""], [1], ["ok", ""], 5, "word")),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: repr(v)[:24])
def test_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    """Red when a check is dropped, or a wrong type escapes as TypeError instead of BadRequest."""
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert f"got {name}=" in str(caught.value)


GOOD: list[dict[str, Any]] = [
    {},
    {"n": MAX_N},
    {"max_tokens": None},
    {"max_tokens": None, "min_tokens": 1000},
    {"min_tokens": 16},
    {"temperature": 0},
    {"temperature": 100.0},
    {"top_p": 1, "top_k": -1, "min_p": 1.0},
    {"top_k": 0},
    {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"stop": "x"},
    {"stop": ["x", "y"]},
    {"stop": []},
    {"stop_token_ids": []},
    {"logit_bias": {}},
    {"logit_bias": {0: -100, 5: 100.0}},
    {"bad_words": []},
    {"truncate_prompt_tokens": 1, "logits_processors": None, "extra_args": None},
    {"truncate_prompt_tokens": -1},
    {"repetition_penalty": 10.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
]


@pytest.mark.parametrize("values", GOOD, ids=repr)
def test_edges_are_accepted(values: dict[str, Any]) -> None:
    """Red when a bound moves inwards: scripts written for vLLM would break."""
    SamplingParams(**values)


def test_greedy_copies_are_refused() -> None:
    """Red when n > 1 at temperature 0 silently computes the same answer n times."""
    with pytest.raises(BadRequest, match="every copy would be the same") as caught:
        SamplingParams(n=2, temperature=0.0)
    assert caught.value.param == "n"


def test_stop_strings_need_text() -> None:
    """Red when stop strings are accepted with detokenize=False and then never match."""
    with pytest.raises(BadRequest, match="stop_token_ids") as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.param == "stop"


def test_bad_request_is_a_value_error() -> None:
    """Red when the tree changes: vLLM raises ValueError here and scripts catch that."""
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1.0)


def test_with_changes_and_checks_again() -> None:
    """Red when with_ skips validation or accepts a misspelt name."""
    params = SamplingParams(temperature=0.5)
    assert params.with_(top_k=3) == SamplingParams(temperature=0.5, top_k=3)
    with pytest.raises(BadRequest, match="top_p"):
        params.with_(top_p=2.0)
    with pytest.raises(BadRequest, match="topk"):
        params.with_(topk=3)


def test_greedy_threshold_and_penalty_flag() -> None:
    """Red when tiny temperatures divide by almost nothing instead of meaning argmax."""
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy
    assert not SamplingParams().has_penalties
    for name, value in (
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
        ("repetition_penalty", 0.9),
    ):
        assert SamplingParams(**{name: value}).has_penalties


def test_fields_are_assigned_and_checked_when_taken() -> None:
    """Red when a script that changes one field fails, or a bad value reaches the engine."""
    params = SamplingParams(max_tokens=16)
    params.min_tokens = 20
    with pytest.raises(BadRequest, match="at most max_tokens=16"):
        params.clone()
    params.max_tokens = 30  # the order of two assignments does not matter
    assert params.clone() == SamplingParams(max_tokens=30, min_tokens=20)


def test_a_clone_shares_nothing() -> None:
    """Red when the engine sees what a caller does to his lists afterwards."""
    params = SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 2.0}, bad_words=["b"])
    taken = params.clone()
    assert taken == params
    params.stop.append("c")
    params.stop_token_ids.append(2)
    params.logit_bias[3] = 1.0
    params.temperature = 0.0
    params.bad_words.append("")
    assert taken.stop == ["a"] and taken.stop_token_ids == [1] and taken.logit_bias == {1: 2.0}
    assert taken.temperature == 1.0
    with pytest.raises(BadRequest, match="bad_words"):
        params.clone()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("beam_width", v) for v in (0, MAX_LOGPROBS, 1.0, True, None)),
        *(("max_tokens", v) for v in (0, -1, None, 1.0)),
        *(("length_penalty", v) for v in (NAN, INF, "1", None)),
    ],
)
def test_bad_beams_are_refused_by_name(name: str, value: Any) -> None:
    """Red when a wish beam search cannot fulfil is found out only in the middle of it."""
    with pytest.raises(BadRequest, match=f"got {name}=") as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, name: value})
    assert caught.value.param == name


NUMERIC = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
NUMERIC += ("repetition_penalty", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens")


def stated_bounds(message: str) -> tuple[float, float, bool]:
    """Low, high and whether the low one is itself allowed, as a message tells them."""
    number = r"(-?[0-9.]+(?:\*\*31 - 1)?)"
    if found := re.search(rf"from {number} to {number}", message):
        return _read(found[1]), _read(found[2]), True
    if found := re.search(rf"in \({number}, {number}\]", message):
        return _read(found[1]), _read(found[2]), False
    found = re.search(rf">= {number}", message)
    assert found, message
    return _read(found[1]), 2**20, True


def _read(text: str) -> float:
    if text.endswith("**31 - 1"):
        return 2**31 - 1
    return float(text) if "." in text else int(text)


@pytest.mark.parametrize("name", NUMERIC)
def test_messages_state_the_limits_that_hold(name: str) -> None:
    """Red when the bounds a message names are refused, or what is beyond them is accepted."""
    others: dict[str, Any] = {} if name == "max_tokens" else {"max_tokens": None}
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**others, **{name: "x"})
    low, high, is_low_allowed = stated_bounds(str(caught.value))
    whole = name in ("n", "top_k", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens")
    step = 1 if whole else 1e-9
    if is_low_allowed:
        SamplingParams(**others, **{name: low})
    SamplingParams(**others, **{name: high})
    SamplingParams(**others, **{name: low + step})
    below = low - step if is_low_allowed else low
    beyond = [high + step] if high != 2**20 else []
    # 0 and -1 are told apart as ways to switch top_k off.
    for value in [*([-2] if name == "top_k" else [below]), *beyond]:
        with pytest.raises(BadRequest):
            SamplingParams(**others, **{name: value})
