"""A model that thinks first: its template opens the thoughts, a token of its own ends them."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

from tests.e2e.conftest import ADMIN_KEY, THINK_END
from tests.e2e.harness import Served

ASK: list[Any] = [{"role": "user", "content": "why?"}]
HEADERS = {"authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture(scope="module")
def thinker(guarded: Served) -> OpenAI:
    return OpenAI(base_url=f"{guarded.url}/v1", api_key=ADMIN_KEY, max_retries=0)


@pytest.fixture(scope="module")
def end_id(guarded: Served) -> int:
    body = {"prompt": THINK_END, "add_special_tokens": False}
    (found,) = guarded.post("/tokenize", body, HEADERS)[1]["tokens"]
    return int(found)


def think(client: OpenAI, end_id: int, **fields: Any) -> ChatCompletion:
    """Sampled so that the thoughts end after some tokens; `bias` says how soon."""
    bias = {str(end_id): fields.pop("bias", 4)}
    body = {"return_token_ids": True, "ignore_eos": True, **fields.pop("extra_body", {})}
    given = {"model": "tiny", "messages": ASK, "max_tokens": 30, "seed": 11, **fields}
    return client.chat.completions.create(**given, logit_bias=bias, extra_body=body)


def test_thoughts_are_told_apart_and_counted(thinker: OpenAI, end_id: int) -> None:
    """Red when a marker shows, thoughts get into the content, or usage counts them wrongly."""
    answer = think(thinker, end_id)
    (choice,) = answer.choices
    at = choice.token_ids.index(end_id)
    assert 0 < at < 29
    message = choice.message
    assert message.reasoning_content and message.content is not None
    assert THINK_END not in message.reasoning_content
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert thought is not None and at + 1 <= thought <= at + 3  # newlines behind the marker


def test_streamed_thoughts_come_first_and_join_to_the_whole(thinker: OpenAI, end_id: int) -> None:
    whole = think(thinker, end_id)
    kinds: list[str] = []
    thoughts = content = ""
    options = {"include_usage": True}
    streamed: Any = think(thinker, end_id, stream=True, stream_options=options)
    usage = None
    for chunk in streamed:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            thought = getattr(choice.delta, "reasoning_content", None) or ""
            said = choice.delta.content or ""
            kinds += ["thought"] * bool(thought) + ["said"] * bool(said)
            thoughts, content = thoughts + thought, content + said
    assert thoughts == whole.choices[0].message.reasoning_content
    assert content == whole.choices[0].message.content
    assert kinds == sorted(kinds, reverse=True) and {"thought", "said"} == set(kinds)
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens_details == whole.usage.completion_tokens_details


def test_thoughts_that_never_end_are_all_thoughts(thinker: OpenAI, end_id: int) -> None:
    answer = think(thinker, end_id, bias=-100)
    assert answer.choices[0].message.content == ""
    assert answer.choices[0].message.reasoning_content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens == 30


def test_thoughts_may_be_left_out(thinker: OpenAI, end_id: int) -> None:
    full = think(thinker, end_id).choices[0].message
    short = think(thinker, end_id, extra_body={"include_reasoning": False}).choices[0].message
    assert short.content == full.content
    assert getattr(short, "reasoning_content", None) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ],
)
def test_thinking_can_be_switched_off(thinker: OpenAI, end_id: int, fields: dict[str, Any]) -> None:
    message = think(thinker, end_id, bias=-100, **fields).choices[0].message
    assert message.content and getattr(message, "reasoning_content", None) is None


def test_a_constrained_answer_does_not_think(thinker: OpenAI, end_id: int) -> None:
    """The grammar holds from the first token, so nothing of it may be taken for thoughts."""
    body = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}
    message = think(thinker, end_id, extra_body=body).choices[0].message
    assert message.content in ("yes", "no")


def test_anthropic_and_responses_see_the_thoughts_too(guarded: Served, thinker: OpenAI) -> None:
    body = {"model": "tiny", "max_tokens": 12, "messages": ASK}
    status, message = guarded.post("/v1/messages", body, HEADERS)
    assert status == 200
    assert message["content"][0]["type"] == "thinking"
    answer = thinker.responses.create(model="tiny", input="why?", max_output_tokens=12)
    assert answer.output[0].type == "reasoning"
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 0
