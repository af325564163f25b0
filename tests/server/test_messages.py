"""POST /v1/messages: Anthropic's own client accepts it, streams and whole answers agree, nothing is
a 5xx."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pydantic
import pytest
from hypothesis import given, settings

from quire.server.messages_input import MessagesFields
from tests.server.fakes import Bench, Event
from tests.server.shapes import JSON, OUTPUTS, bodies

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "look",
    "description": "Look at it.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
REQUIRED = ("messages", "max_tokens")
OPTIONAL = tuple(name for name in MessagesFields.__struct_fields__ if name not in REQUIRED)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def client(bench: Bench) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url="http://test",
        api_key="k",
        max_retries=0,
        http_client=bench.client(),
        _strict_response_validation=True,
    )


def whole(bench: Bench, **body: Any) -> dict[str, Any]:
    reply = bench.post(PATH, {"messages": HI, "max_tokens": 500, **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def assembled(events: list[Event]) -> dict[str, Any]:
    """The message a client puts together from a stream; checks the order on the way."""
    assert (events[0].name, events[-1].name) == ("message_start", "message_stop")
    assert all(event.name == event.data["type"] for event in events)
    message = dict(events[0].data["message"])
    assert (message["content"], message["stop_reason"]) == ([], None)
    content: list[dict[str, Any]] = message["content"]
    texts: list[str] = []
    is_open = False
    for event in events[1:-1]:
        data = event.data
        if event.name == "content_block_start":
            assert not is_open and data["index"] == len(content)
            content.append(dict(data["content_block"]))
            is_open, texts = True, []
        elif event.name == "content_block_delta":
            assert is_open and data["index"] == len(content) - 1
            key = {
                "text_delta": "text",
                "thinking_delta": "thinking",
                "input_json_delta": "partial_json",
            }[data["delta"]["type"]]
            texts.append(data["delta"][key])
        elif event.name == "content_block_stop":
            assert is_open and data["index"] == len(content) - 1
            is_open, block = False, content[-1]
            key = {"tool_use": "partial_json"}.get(block["type"], block["type"])
            block[key] = "".join(texts)
        elif event.name == "message_delta":
            assert not is_open
            message |= data["delta"]
            message["usage"] = message["usage"] | data["usage"]
        else:
            assert event.name == "ping"
    return message


# ------------------------------------------------------------ Anthropic's client


def test_the_sdk_reads_a_whole_answer(bench: Bench) -> None:
    """Red when a field the SDK's strict types want is missing or has another type."""
    bench.link.num_cached = 5
    message = asyncio.run(
        client(bench).messages.create(model="tiny", max_tokens=50, messages=HI, system="Be kind.")
    )
    assert [block.model_dump() for block in message.content] == [
        {"type": "text", "text": "Hello there.", "citations": None}
    ]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "tiny", "end_turn")
    assert message.id.startswith("msg_") and message.stop_sequence is None
    usage, prompt = message.usage, bench.link.submitted[-1].num_prompt
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (prompt - 5, 5)
    assert usage.output_tokens == 10


def test_the_sdk_reads_a_stream(bench: Bench) -> None:
    """Red when events are missing, out of order or unlike their types."""
    bench.link.answer = f"<think>hm</think>I look.{CALL}"

    async def work() -> Any:
        stream = client(bench).messages.stream(
            model="tiny", max_tokens=500, messages=HI, tools=[TOOL]
        )
        async with stream as events:
            texts = [text async for text in events.text_stream]
            return "".join(texts), await events.get_final_message()

    text, message = asyncio.run(work())
    assert text == "I look."
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].thinking == "hm"
    assert (message.content[2].name, message.content[2].input) == ("look", {"at": "sea"})
    assert message.stop_reason == "tool_use"


def test_the_sdk_parses_structured_output(bench: Bench) -> None:
    """Red when output_config.format does not become a grammar."""

    class Point(pydantic.BaseModel):
        x: int

    bench.link.answer = '{"x": 3}'
    message = asyncio.run(
        client(bench).messages.parse(model="tiny", max_tokens=50, messages=HI, output_format=Point)
    )
    assert message.parsed_output == Point(x=3)
    structured = bench.link.submitted[-1].params.structured_outputs
    assert structured is not None and json.loads(str(structured.json))["required"] == ["x"]


def test_a_tool_conversation_goes_round(bench: Bench) -> None:
    """Red when what we answered cannot be sent back to us."""

    async def work() -> Any:
        sdk = client(bench)
        bench.link.answer = f"<think>hm</think>I look.{CALL}"
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "tools": [TOOL]}
        first = await sdk.messages.create(messages=HI, **asked)
        call = first.content[2]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "blue"}
        bench.link.answer = "It is blue."
        history = [
            *HI,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ]
        return call, await sdk.messages.create(messages=history, **asked)

    call, second = asyncio.run(work())
    assert second.content[0].text == "It is blue."
    turns = bench.link.prompt().split("<s>")
    assert turns[2] == "user: hi|"
    assert turns[3].startswith('assistant: I look. (thought hm)<tool_call>{"name": "look"')
    assert turns[4:6] == [f"tool: blue for {call.id}|", "user: And?|"]


def test_the_sdk_counts_tokens(bench: Bench) -> None:
    """Red when the count is not what the same message then costs."""

    async def work() -> tuple[int, int]:
        sdk = client(bench)
        asked: dict[str, Any] = {"model": "tiny", "messages": HI, "system": "x", "tools": [TOOL]}
        counted = await sdk.messages.count_tokens(**asked)
        message = await sdk.messages.create(max_tokens=5, **asked)
        return counted.input_tokens, message.usage.input_tokens

    counted, cost = asyncio.run(work())
    assert counted == cost > 0
    assert len(bench.link.submitted) == 1  # counting generates nothing


def test_errors_have_anthropics_body(bench: Bench) -> None:
    """Red when the SDK cannot tell what kind of error it got."""
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        asyncio.run(
            client(bench).messages.create(
                model="tiny", messages=HI, max_tokens=1, extra_body={"max_tokens": None}
            )
        )
    with pytest.raises(anthropic.NotFoundError):
        asyncio.run(client(bench).messages.create(model="claude", messages=HI, max_tokens=1))
    error = bench.post(PATH, {"messages": HI}).json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"


# ------------------------------------------------------------ streams


@settings(max_examples=200, deadline=None, derandomize=True)
@given(OUTPUTS)
def test_stream_and_whole_agree(text: str) -> None:
    """Red when a stream adds up to another message than the whole one."""
    bench = Bench()
    bench.link.answer = text
    body = {"messages": HI, "tools": [TOOL], "max_tokens": 60}
    streamed, message = assembled(bench.events(PATH, body)), whole(bench, **body)
    for block in streamed["content"]:
        partial = block.pop("partial_json", "")
        if partial and message["stop_reason"] != "max_tokens":
            block["input"] = json.loads(partial)
        block.pop("id", None)
    for block in message["content"]:
        block.pop("id", None)
        if message["stop_reason"] == "max_tokens" and block["type"] == "tool_use":
            block["input"] = {}
    assert {**streamed, "id": ""} == {**message, "id": ""}


def test_an_engine_that_dies_is_an_error_event(bench: Bench) -> None:
    """Red when a stream just stops, or an error before the first token hides behind a 200."""
    bench.link.dies_after = 5
    events = bench.events(PATH, {"messages": HI, "max_tokens": 50})
    assert events[-1].name == "error"
    assert events[-1].data["error"]["type"] == "overloaded_error"
    bench.link.dies_after = 0
    reply = bench.post(PATH, {"messages": HI, "max_tokens": 50, "stream": True})
    assert (reply.status_code, reply.json()["type"]) == (503, "error")


def test_a_quiet_stream_shows_signs_of_life(bench: Bench) -> None:
    """Red when a request that waits lets proxies believe the connection is dead."""
    bench.link.is_slow = True
    events = bench.events(PATH, {"messages": HI, "max_tokens": 50})
    assert [event.name for event in events[:4]] == [
        "message_start",
        "ping",
        "ping",
        "content_block_start",
    ]


# ------------------------------------------------------------ answers


def test_stop_reasons(bench: Bench) -> None:
    """Red when a client cannot tell why the answer ended."""
    assert whole(bench)["stop_reason"] == "end_turn"
    assert whole(bench, max_tokens=3)["stop_reason"] == "max_tokens"
    stopped = whole(bench, stop_sequences=["the"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "the")
    assert stopped["content"][0]["text"] == "Hello "
    bench.link.answer = CALL
    assert whole(bench, tools=[TOOL])["stop_reason"] == "tool_use"


def test_a_cut_call_is_closed_and_says_so(bench: Bench) -> None:
    """Red when half a call is not an object, or can be taken for a whole one."""
    bench.link.answer = CALL
    size = len(bench.link.tokenizer.encode(CALL[: CALL.index("sea") + 2], False))
    message = whole(bench, tools=[TOOL], max_tokens=size)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"]["at"] in ("s", "se")
    bench.link.answer = CALL[: CALL.index("sea") + 2]  # the model stops there by itself
    assert whole(bench, tools=[TOOL])["stop_reason"] == "max_tokens"


# ------------------------------------------------------------ requests


def test_turns_of_one_role_are_one(bench: Bench) -> None:
    """Red when neighbours of one role reach templates that want roles to alternate."""
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    system = [
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "y"},
    ]
    whole(bench, messages=turns, system=system)
    assert bench.link.prompt() == (
        "<s>system: x\ny|<s>user: a\nb|<s>assistant: c|<s>user: d|<s>assistant: "
    )


def test_the_answer_goes_on_from_a_prefill(bench: Bench) -> None:
    """Red when a last turn of the assistant's is closed before the answer."""
    whole(bench, messages=[*HI, {"role": "assistant", "content": "I am"}])
    assert bench.link.prompt() == "<s>user: hi|<s>assistant: I am"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
def test_a_forced_call(bench: Bench, choice: dict[str, Any]) -> None:
    """Red when tool_choice does not bind the output, or the bound output is shown as text."""
    bench.link.answer = '[{"name": "look", "parameters": {"at": "sea"}}]'
    message = whole(bench, tools=[TOOL], tool_choice=choice | {"disable_parallel_tool_use": True})
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert message["stop_reason"] == "tool_use"
    structured = bench.link.submitted[-1].params.structured_outputs
    assert structured is not None and json.loads(str(structured.json))["maxItems"] == 1


def test_no_tools_are_shown_when_none_may_be_used(bench: Bench) -> None:
    choice = {"type": "none"}
    cost = whole(bench, tools=[TOOL], tool_choice=choice)["usage"]["input_tokens"]
    assert "tools:" not in bench.link.prompt()
    counted = bench.post(COUNT, {"messages": HI, "tools": [TOOL], "tool_choice": choice})
    assert counted.json() == {"input_tokens": cost}


def test_thinking_can_be_switched_off(bench: Bench) -> None:
    whole(bench, thinking={"type": "disabled"})
    assert bench.link.prompt().endswith("<think></think>")
    whole(bench, thinking={"type": "enabled", "budget_tokens": 1024})
    assert "<think>" not in bench.link.prompt()


def test_sampling_fields_arrive(bench: Bench) -> None:
    whole(bench, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop_sequences=["@"])
    params = bench.link.submitted[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert params.stop_strings == ("@",)


def test_everything_optional_may_be_null(bench: Bench) -> None:
    """Red when a client that writes out its nulls is refused."""
    whole(bench, **dict.fromkeys(OPTIONAL))


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (user({"type": "image", "source": {}}), "messages[0].content[0].type"),
        (user({"type": "document", "source": {}}), "messages[0].content[0].type"),
        (user({"type": "text", "text": 3}), "messages[0].content[0].text"),
        (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        (user("hi"), "messages[0].content[0]"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web"}]}, "tools[0].type"),
        ({"tools": [{"name": "bad name"}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": 3}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)
def test_what_is_refused(bench: Bench, body: dict[str, Any], said: str) -> None:
    """Red when something we cannot do is silently ignored, or the error does not say where."""
    reply = bench.post(PATH, {"messages": HI, "max_tokens": 5, **body})
    assert reply.status_code == 400, reply.text
    assert said in reply.json()["error"]["message"]
    assert bench.link.submitted == []


# ------------------------------------------------------------ fuzz

FUZZED = Bench()
WORKING = {"messages": HI, "max_tokens": 8}
BLOCKS = JSON.map(lambda value: {**WORKING, "messages": [{"role": "user", "content": [value]}]})
CALLS = JSON.map(
    lambda value: {
        **WORKING,
        "messages": [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": value}}],
            },
            *HI,
        ],
    }
)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(bodies(WORKING, (*REQUIRED, *OPTIONAL)) | BLOCKS | CALLS | JSON)
def test_no_body_breaks_the_server(body: Any) -> None:
    """Red when some JSON body is a 5xx, or leaves a generation open."""
    for path in (PATH, COUNT):
        reply = FUZZED.post(path, body)
        assert reply.status_code in (200, 400, 404), (body, reply.text)
    assert FUZZED.link.num_open == 0 and FUZZED.server.admission.num_open == 0
    FUZZED.link.submitted.clear()


@pytest.mark.parametrize("depth", [60, 700, 990, 5_000])
def test_deep_nesting_is_refused(bench: Bench, depth: int) -> None:
    """Red when a body that is nothing but brackets exhausts the stack."""
    deep = "[" * depth + "]" * depth
    call = f'{{"type": "tool_use", "id": "c", "name": "f", "input": {{"a": {deep}}}}}'
    for messages, rest in (
        (f'{{"role": "assistant", "content": [{call}]}}, {json.dumps(HI[0])}', '"a": 1'),
        (json.dumps(HI[0]), f'"tools": [{{"name": "f", "input_schema": {{"a": {deep}}}}}]'),
        (json.dumps(HI[0]), f'"thinking": {{"type": {deep}}}'),
    ):
        body = f'{{"max_tokens": 5, "messages": [{messages}], {rest}}}'
        assert bench.post(PATH, body.encode()).status_code == 400


def test_text_that_is_no_text_is_refused(bench: Bench) -> None:
    """Red when half a character, which has no bytes, reaches the tokenizer."""
    for text in ('"\\ud800"', '[{"type": "text", "text": "\\udc00x"}]'):
        body = f'{{"max_tokens": 5, "messages": [{{"role": "user", "content": {text}}}]}}'
        assert bench.post(PATH, body.encode()).status_code == 400
