"""Anthropic's own Python client against /v1/messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.e2e.harness import Served

ASK: list[Any] = [{"role": "user", "content": "what is the weather?"}]
TOOL: Any = {
    "name": "get_weather",
    "description": "Look out of the window.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[Anthropic]:
    with Anthropic(base_url=served.url, api_key="any", max_retries=0) as made:
        yield made


def test_create(claude: Anthropic) -> None:
    body = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}  # no longer arguments of the client
    message = claude.messages.create(
        model="tiny", max_tokens=9, messages=ASK, system="be brief", extra_body=body
    )
    assert message.role == "assistant" and message.type == "message"
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 9
    assert [block.type for block in message.content] == ["text"]


def test_count_tokens_is_what_create_counts(claude: Anthropic) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": ASK, "system": "x", "tools": [TOOL]}
    counted = claude.messages.count_tokens(**fields)
    used = claude.messages.create(**fields, max_tokens=1).usage
    cached = used.cache_read_input_tokens or 0
    assert counted.input_tokens == used.input_tokens + cached > 20


def test_a_stream_is_the_whole(claude: Anthropic) -> None:
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": ASK}
    body = {"seed": 3}
    whole = claude.messages.create(**fields, extra_body=body)
    with claude.messages.stream(**fields, extra_body=body) as stream:
        joined = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert joined == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_stop_sequences(claude: Anthropic) -> None:
    body = {"seed": 3}
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "messages": ASK}
    text = claude.messages.create(**fields, extra_body=body).content[0].text  # type: ignore[union-attr]
    stop = next(c for c in text[len(text) // 2 :] if c.strip() and c != "\ufffd")
    message = claude.messages.create(**fields, stop_sequences=[stop], extra_body=body)
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == stop
    cut = text[: text.index(stop)]
    assert "".join(b.text for b in message.content if b.type == "text") == cut


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tools(claude: Anthropic, choice: Any) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    message = claude.messages.create(
        model="tiny", max_tokens=1500, messages=ASK, tools=[TOOL], tool_choice=choice
    )
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use" and call.name == "get_weather"
    assert call.input["city"] in ("Paris", "Rome") and 1 <= call.input["days"] <= 9
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]
    turns: Any = [*ASK, {"role": "assistant", "content": message.content}]
    turns.append({"role": "user", "content": results})
    after = claude.messages.create(model="tiny", max_tokens=3, messages=turns, tools=[TOOL])
    assert after.usage.output_tokens == 3


def test_a_streamed_call_parses(claude: Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with claude.messages.stream(
        model="tiny", max_tokens=1500, messages=ASK, tools=[TOOL], tool_choice=choice
    ) as stream:
        pieces = [e.partial_json for e in stream if e.type == "input_json"]
        final = stream.get_final_message()
    (call,) = [block for block in final.content if block.type == "tool_use"]
    assert len(pieces) > 3 and call.input["city"] in ("Paris", "Rome")


def test_the_async_client(served: Served) -> None:
    async def ask() -> int:
        async with (
            anthropic.AsyncAnthropic(base_url=served.url, api_key="any") as client,
            client.messages.stream(model="tiny", max_tokens=6, messages=ASK) as stream,
        ):
            return (await stream.get_final_message()).usage.output_tokens

    assert asyncio.run(ask()) == 6


def test_errors_have_anthropic_s_body(claude: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        claude.messages.create(model="tiny", max_tokens=5, messages=[])
    assert isinstance(bad.value.body, dict)
    assert bad.value.body["type"] == "error"
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="claude-99", max_tokens=5, messages=ASK)
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
