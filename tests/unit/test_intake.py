"""Intake finds everything that is wrong with a request before the engine knows of it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from quire.engine.intake import Intake, Limits
from quire.errors import BadRequest
from quire.params import SamplingParams

LIMITS = Limits(max_model_len=20, vocab_size=128)


class CharTokenizer:
    """Ids are code points; a beginning token of 1, as real tokenizers add."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]


class PlainTokenizer(CharTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text, add_special_tokens=False)


def intake(tokenizer: Any = None, seed: int | None = 0) -> Intake:
    return Intake(tokenizer, LIMITS, eos_ids=[2], seed=seed)


def refused(prompt: Any, params: SamplingParams | None = None, tokenizer: Any = None) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        intake(tokenizer).requests(prompt, params or SamplingParams())
    return caught.value


# ------------------------------------------------------------ prompts


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 3],
        (1, 2, 3),
        {"prompt_token_ids": [1, 2, 3]},
        np.array([1, 2, 3]),
        {"prompt_token_ids": bytearray([1, 2, 3])},
    ],
    ids=["list", "tuple", "mapping", "numpy", "bytearray"],
)
def test_ids_in_every_form(prompt: Any) -> None:
    """Red when a form that vLLM scripts use is no longer understood."""
    text, (request,) = intake().requests(prompt, SamplingParams())
    assert text is None
    assert request.tokens.tolist() == [1, 2, 3]
    assert request.eos_ids == {2}


def test_text_is_encoded_and_given_back() -> None:
    """Red when a text prompt loses its beginning token or its text."""
    for prompt in ("ab", {"prompt": "ab"}):
        text, (request,) = intake(CharTokenizer()).requests(prompt, SamplingParams())
        assert text == "ab"
        assert request.tokens.tolist() == [1, 97, 98]


def test_ids_win_over_text_when_both_are_given() -> None:
    """Red when a rendered chat is encoded a second time."""
    prompt = {"prompt": "ab", "prompt_token_ids": [7, 8]}
    text, (request,) = intake(CharTokenizer()).requests(prompt, SamplingParams())
    assert (text, request.tokens.tolist()) == ("ab", [7, 8])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "no tokens"),
        ({"prompt_token_ids": []}, "no tokens"),
        ([1] * 20, "20 tokens.*max_model_len=20.*room for 19"),
        ([1, 128], "token id 128.*< 128"),
        ([1, -1], "token id -1"),
        ([10**12], f"token id {10**12}"),
        ([1.0, 2.0], "whole numbers"),
        ([1, "2"], "whole numbers"),
        ([True, False], "whole numbers"),
        ([[1, 2]], "whole numbers"),
        (b"\x01\x02", "whole numbers"),
        ({"prompt_token_ids": "12"}, "whole numbers"),
        ({"prompt_token_ids": 5}, "whole numbers"),
        ({"prompt_token_ids": None}, "whole numbers"),
        ({"prompt_token_ids": np.array(5)}, "whole numbers"),
        ({"prompt_token_ids": np.array([[1, 2]])}, "whole numbers"),
        ({"prompt": 5}, "whole numbers"),
        ({"promt": "ab"}, "key 'promt'"),
        ({"prompt_token_ids": [1], "type": "token"}, "key 'type'.*prompt, prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 5}}, "'multi_modal_data': only text"),
        ({"prompt_token_ids": [1], "mm_processor_kwargs": {"a": 1}}, "'mm_processor_kwargs'"),
        ({}, "'prompt' or 'prompt_token_ids'"),
        (5, "whole numbers"),
        (None, "whole numbers"),
    ],
    ids=repr,
)
def test_bad_prompt_is_refused(prompt: Any, words: str) -> None:
    """Red when a bad prompt reaches the scheduler or leaves as a TypeError."""
    error = refused(prompt)
    assert re.search(words, str(error)), str(error)


def test_a_prompt_of_vllm_without_media_is_a_text() -> None:
    """Red when keys that say nothing are refused: scripts fill every field."""
    prompt = {"prompt_token_ids": [5], "multi_modal_data": None, "mm_processor_kwargs": {}}
    _, (request,) = intake().requests(prompt, SamplingParams())
    assert request.tokens.tolist() == [5]


@pytest.mark.parametrize(("count", "want"), [(3, [28, 29, 30]), (30, None), (-1, None)])
def test_the_end_of_a_long_prompt_is_kept(count: int, want: list[int] | None) -> None:
    """Red when a cut prompt loses its end, the question, or is refused as too long."""
    params = SamplingParams(truncate_prompt_tokens=count)
    long, short = list(range(1, 31)), [5, 6]
    if count == 30:
        assert "30 tokens" in str(refused(long, params)), "it is cut to what was asked, not less"
    else:
        _, (request,) = intake().requests(long, params)
        assert request.tokens.tolist() == (want or long[-19:])
    _, (request,) = intake().requests(short, params)
    assert request.tokens.tolist() == short


def test_longest_prompt_that_fits() -> None:
    """Red when the limit moves by one: there must be room for one output token."""
    _, (request,) = intake().requests([1] * 19, SamplingParams(max_tokens=None))
    assert request.max_tokens == 1


def test_empty_text_is_refused_unless_a_beginning_token_makes_it_a_prompt() -> None:
    """Red when an empty prompt is served from nothing."""
    assert "no tokens" in str(refused("", tokenizer=PlainTokenizer()))
    _, (request,) = intake(CharTokenizer()).requests("", SamplingParams())
    assert request.tokens.tolist() == [1]


def test_text_without_a_tokenizer_says_what_to_do() -> None:
    """Red when skip_tokenizer_init meets a text prompt with anything but clear advice."""
    for prompt in ("ab", {"prompt": "ab"}):
        error = refused(prompt)
        assert "skip_tokenizer_init" in str(error) and "prompt_token_ids" in str(error)


# ------------------------------------------------------------ params against the model


@pytest.mark.parametrize(
    "params",
    [{"stop_token_ids": [128]}, {"allowed_token_ids": [3, 128]}, {"logit_bias": {128: 1.0}}],
    ids=lambda p: next(iter(p)),
)
def test_token_ids_beyond_the_vocabulary_are_refused(params: dict[str, Any]) -> None:
    """Red when an id outside the logits gets as far as an index on the device."""
    error = refused([1], SamplingParams(**params))
    assert error.param == next(iter(params))
    assert "128" in str(error)


def test_wishes_that_need_text_are_refused_without_a_tokenizer() -> None:
    """Red when stop strings or bad words are ignored in silence."""
    assert refused([1], SamplingParams(stop="x")).param == "stop"
    assert refused([1], SamplingParams(bad_words=["x"])).param == "bad_words"


def test_bad_words_are_spelt_at_the_start_and_after_a_space() -> None:
    """Red when only one of the spellings is banned."""
    _, (request,) = intake(CharTokenizer()).requests("a", SamplingParams(bad_words=["hi"]))
    assert request.params.bad_word_ids == ((104, 105), (32, 104, 105))


@pytest.mark.parametrize("priority", ["high", None, float("nan")])
def test_priority_must_be_a_number_that_can_be_ordered(priority: Any) -> None:
    """Red when a bad priority gets into the waiting line's heap and breaks its order."""
    with pytest.raises(BadRequest, match="priority"):
        intake().requests([1], SamplingParams(), priority)


def test_max_tokens_is_cut_to_the_context() -> None:
    """Red when a request may outgrow its row."""
    for asked, want in ((None, 15), (4, 4), (15, 15), (400, 15)):
        _, (request,) = intake().requests([1] * 5, SamplingParams(max_tokens=asked))
        assert request.max_tokens == want


# ------------------------------------------------------------ copies and seeds


def test_copies_hang_under_the_first() -> None:
    """Red when copies are submitted on their own and compute the prompt n times."""
    _, made = intake().requests([1, 2], SamplingParams(n=3, prompt_logprobs=1))
    assert made[0].children == made[1:]
    assert len({request.id for request in made}) == 3
    assert [r.params.prompt_logprobs for r in made] == [1, None, None]


def test_seeds() -> None:
    """Red when copies repeat each other, a seed is ignored, or no seed means the same for all."""
    take = intake()
    _, seeded = take.requests([1], SamplingParams(n=3, seed=7))
    assert [r.seed for r in seeded] == [7, 8, 9]
    _, free = take.requests([1], SamplingParams(n=3))
    _, more = take.requests([1], SamplingParams())
    assert len({r.seed for r in (*free, *more)}) == 4
    _, edge = take.requests([1], SamplingParams(n=2, seed=2**63 - 1))
    assert [r.seed for r in edge] == [2**63 - 1, -(2**63)]


def test_engine_seed_decides_unseeded_requests() -> None:
    """Red when two engines with one seed differ, or two seeds agree."""
    first, again, other = (
        [intake(seed=s).requests([1], SamplingParams())[1][0].seed] for s in (3, 3, 4)
    )
    assert first == again != other


def test_without_a_seed_nothing_repeats() -> None:
    """Red when two servers, or one started twice, draw the same for the same requests."""
    seeds = [
        request.seed
        for _ in range(2)
        for request in intake(seed=None).requests([1], SamplingParams(n=3))[1]
    ]
    assert len(set(seeds)) == 6
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    _, given = intake(seed=None).requests([1], SamplingParams(n=2, seed=7))
    assert [request.seed for request in given] == [7, 8]


def test_salt_comes_from_the_prompt() -> None:
    """Red when cache_salt is dropped on the way."""
    prompt = {"prompt_token_ids": [1], "cache_salt": "tenant"}
    _, (request,) = intake().requests(prompt, SamplingParams())
    assert request.cache_salt == "tenant"


@pytest.mark.parametrize(
    "changes",
    [
        {"allowed_token_ids": [ord("a")], "bad_words": ["a"]},
        {"allowed_token_ids": [2], "min_tokens": 1},  # only the end is allowed, and not yet
        {"allowed_token_ids": [2, 7], "stop_token_ids": [7], "min_tokens": 3},
    ],
)
def test_what_is_allowed_must_not_all_be_banned(changes: dict[str, Any]) -> None:
    """Red when such a request reaches the sampler, which would draw what nobody allowed."""
    error = refused("hello", SamplingParams(**changes), PlainTokenizer())
    assert error.param == "allowed_token_ids"


def test_some_of_the_allowed_may_be_banned() -> None:
    params = SamplingParams(allowed_token_ids=[2, 9], min_tokens=1)
    assert intake().requests([5], params)
