"""POST /v1/responses: OpenAI's own client accepts it, streams and whole answers agree, nothing is
a 5xx."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from hypothesis import given, settings

from quire.server.responses_input import ResponsesFields
from tests.server.fakes import Bench, Event, read_events
from tests.server.shapes import JSON, OUTPUTS, bodies

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "look",
    "description": "Look at it.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
OPTIONAL = tuple(name for name in ResponsesFields.__struct_fields__ if name != "input")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def client(bench: Bench) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key="k",
        max_retries=0,
        http_client=bench.client(),
        _strict_response_validation=True,
    )


def whole(bench: Bench, **body: Any) -> dict[str, Any]:
    reply = bench.post(PATH, {"input": "hi", **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def names(events: list[Event]) -> list[str]:
    """Without repetitions of the same delta."""
    found: list[str] = []
    for event in events:
        name = event.name.removeprefix("response.")
        if not (name.endswith(".delta") and found and found[-1] == name):
            found.append(name)
    return found


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    drop = ("id", "call_id", "created_at", "completed_at")
    output = [{k: v for k, v in item.items() if k not in drop} for item in response["output"]]
    return {k: v for k, v in response.items() if k not in drop} | {"output": output}


# ------------------------------------------------------------ OpenAI's client


def test_the_sdk_reads_a_whole_answer(bench: Bench) -> None:
    """Red when a field the SDK's strict types want is missing or has another type."""
    response = asyncio.run(
        client(bench).responses.create(
            model="tiny", input="hi", instructions="Be kind.", metadata={"a": "b"}, user="me"
        )
    )
    assert response.output_text == "Hello there."
    assert (response.status, response.model, response.metadata) == ("completed", "tiny", {"a": "b"})
    assert response.id.startswith("resp_") and response.output[0].id.startswith("msg_")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + 10


def test_the_sdk_reads_a_stream(bench: Bench) -> None:
    """Red when events are missing, out of order or unlike their types."""
    bench.link.answer = f"<think>hm</think>I look.{CALL}"

    async def work() -> tuple[list[str], Any]:
        async with client(bench).responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_response()

    kinds, response = asyncio.run(work())
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output[2].parsed_arguments == {"at": "sea"}


def test_the_sdk_parses_structured_output(bench: Bench) -> None:
    """Red when text.format does not become a grammar, or the text does not reach the parser."""

    class Point(pydantic.BaseModel):
        x: int

    bench.link.answer = '{"x": 3}'
    response = asyncio.run(
        client(bench).responses.parse(model="tiny", input="hi", text_format=Point)
    )
    assert response.output_parsed == Point(x=3)
    structured = bench.link.submitted[-1].params.structured_outputs
    assert structured is not None and json.loads(str(structured.json))["required"] == ["x"]


def test_a_tool_conversation_goes_round(bench: Bench) -> None:
    """Red when what we answered cannot be sent back to us as input."""

    async def work() -> Any:
        sdk = client(bench)
        bench.link.answer = f"<think>hm</think>I look.{CALL}"
        first = await sdk.responses.create(model="tiny", input="hi", tools=[TOOL])
        items = [item.model_dump(exclude_none=True) for item in first.output]
        call = first.output[2]
        assert call.type == "function_call"
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "blue"})
        bench.link.answer = "It is blue."
        history = [{"role": "user", "content": "hi"}, *items]
        return call, await sdk.responses.create(model="tiny", input=history, tools=[TOOL])

    call, second = asyncio.run(work())
    assert second.output_text == "It is blue."
    turns = bench.link.prompt().split("<s>")
    assert turns[2] == "user: hi|"
    assert turns[3].startswith('assistant: I look. (thought hm)<tool_call>{"name": "look"')
    assert turns[4] == f"tool: blue for {call.call_id}|"


# ------------------------------------------------------------ streams


def test_events_of_every_kind_in_order(bench: Bench) -> None:
    """Red when the order of events changes, or their numbering has a gap."""
    bench.link.answer = f"<think>hm</think>I look.{CALL}"
    events = bench.events(PATH, {"input": "hi", "tools": [TOOL]})
    run = ["output_item.added", "content_part.added"]
    end = ["content_part.done", "output_item.done"]
    assert names(events) == [
        *("created", "in_progress"),
        *(*run, "reasoning_text.delta", "reasoning_text.done", *end),
        *(*run, "output_text.delta", "output_text.done", *end),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    assert all(event.name == event.data["type"] for event in events)
    assert events[0].data["response"]["status"] == "in_progress"
    added = [e.data["item"] for e in events if e.name == "response.output_item.added"]
    assert [item.get("content", item.get("arguments")) for item in added] == [[], [], ""]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(OUTPUTS)
def test_stream_and_whole_agree(text: str) -> None:
    """Red when a stream ends in another response than the whole one, or adds up to another."""
    bench = Bench()
    bench.link.answer = text
    body = {"input": "hi", "tools": [TOOL], "max_output_tokens": 60}
    events = bench.events(PATH, body)
    last = events[-1].data["response"]
    assert without_ids(last) == without_ids(whole(bench, **body))
    for index, item in enumerate(last["output"]):
        mine = [e.data for e in events if e.data.get("output_index") == index]
        begun = [d["part"]["text"] for d in mine if d["type"] == "response.content_part.added"]
        begun += [mine[0]["item"].get("arguments", "")]
        deltas = "".join(begun + [data.get("delta", "") for data in mine])
        said = item.get("arguments")
        assert deltas == (said if said is not None else item["content"][0]["text"])
        assert mine[-1]["item"] == item


def test_an_engine_that_dies_fails_the_response(bench: Bench) -> None:
    """Red when a stream just stops, or an error before the first token hides behind a 200."""
    bench.link.dies_after = 5
    events = bench.events(PATH, {"input": "hi"})
    assert events[-1].name == "response.failed"
    failed = events[-1].data["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
    assert failed["output"][0]["status"] == "incomplete"
    bench.link.dies_after = 0
    assert bench.post(PATH, {"input": "hi", "stream": True}).status_code == 503


def test_a_quiet_stream_shows_signs_of_life(bench: Bench) -> None:
    """Red when a request that waits lets proxies believe the connection is dead."""
    bench.link.is_slow = True
    text = bench.post(PATH, {"input": "hi", "stream": True}).text
    assert "\n\n: ping\n\n" in text
    assert names(read_events(text))[-1] == "completed"


def test_a_reader_that_leaves_ends_the_generation(bench: Bench) -> None:
    """Red when an abandoned stream keeps the engine busy."""
    from quire.server.http import EventStream, HttpRequest
    from quire.server.responses import responses

    async def work() -> int:
        request = HttpRequest("POST", PATH, {}, {}, "r", b'{"input": "hi", "stream": true}')
        stream = await responses(request, bench.server)
        assert isinstance(stream, EventStream)
        await anext(stream.chunks)
        assert bench.link.num_open == 1
        await stream.chunks.aclose()  # type: ignore[attr-defined]
        return bench.link.num_open

    assert asyncio.run(work()) == 0


# ------------------------------------------------------------ answers


def test_too_few_tokens_leave_it_incomplete(bench: Bench) -> None:
    """Red when an answer that was cut looks complete."""
    cut = whole(bench, max_output_tokens=3)
    assert cut["status"] == "incomplete" and cut["completed_at"] is None
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["output"][0]["status"] == "incomplete"
    assert names(bench.events(PATH, {"input": "hi", "max_output_tokens": 3}))[-1] == "incomplete"


def test_a_cut_call_says_so(bench: Bench) -> None:
    """Red when half a call can be taken for one to run."""
    bench.link.answer = CALL
    size = len(bench.link.tokenizer.encode(CALL[: CALL.index("sea") + 2], False))
    item = whole(bench, tools=[TOOL], max_output_tokens=size)["output"][0]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    assert item["arguments"].startswith('{"at": "') and not item["arguments"].endswith("}")
    bench.link.answer = CALL[: CALL.index("sea") + 2]  # the model stops there by itself
    answer = whole(bench, tools=[TOOL])
    assert (answer["status"], answer["output"][0]["status"]) == ("incomplete", "incomplete")


def test_reasoning_is_counted_and_can_be_switched_off(bench: Bench) -> None:
    """Red when thoughts are billed as answer, or effort does not reach the template."""
    bench.link.answer = "<think>hm</think>Yes"
    usage = whole(bench)["usage"]
    size = len(bench.link.tokenizer.encode("<think>hm</think>", False))
    assert usage["output_tokens_details"]["reasoning_tokens"] == size
    bench.link.answer = "<thus> yes"  # held back at first: it could become the marker
    assert whole(bench)["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    answer = whole(bench, reasoning={"effort": "none"})
    assert bench.link.prompt().endswith("<think></think>")
    assert answer["reasoning"]["effort"] == "none"


@pytest.mark.parametrize("burst", [1, 4])
def test_logprobs_belong_to_their_text(bench: Bench, burst: int) -> None:
    """Red when logprobs slip against the text, also when several tokens come at once."""
    bench.link.burst = burst
    bench.link.answer = "<think>hm</think>Hello there."
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = whole(bench, **wanted)["output"][1]["content"][0]
    found = part["logprobs"]
    assert "".join(one["token"] for one in found) == part["text"] == "Hello there."
    ids = bench.link.tokenizer.encode("Hello there.", False)
    assert [one["logprob"] for one in found] == [-i / 1000 for i in ids]
    assert [len(one["top_logprobs"]) for one in found] == [2] * len(ids)
    for event in bench.events(PATH, {"input": "hi", **wanted}):
        if event.name == "response.output_text.delta":
            assert "".join(one["token"] for one in event.data["logprobs"]) == event.data["delta"]
    assert whole(bench)["output"][1]["content"][0]["logprobs"] == []
    alone = whole(bench, include=["message.output_text.logprobs"])["output"][1]["content"][0]
    assert [one["top_logprobs"] for one in alone["logprobs"]] == [[]] * len(ids)


def test_cached_tokens_are_told(bench: Bench) -> None:
    bench.link.num_cached = 7
    assert whole(bench)["usage"]["input_tokens_details"]["cached_tokens"] == 7


# ------------------------------------------------------------ requests


def test_system_texts_at_the_beginning_are_one(bench: Bench) -> None:
    """Red when instructions and a developer message are two system turns."""
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Short."}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},
        {"role": "assistant", "content": "What?"},
        {"type": "message", "role": "user", "content": "go"},
    ]
    whole(bench, instructions="Be kind.", input=items)
    assert bench.link.prompt() == (
        "<s>system: Be kind.\n\nShort.|<s>user: hi|<s>assistant: Yes?\nWhat?|<s>user: go|"
        "<s>assistant: "
    )


def test_a_forced_call(bench: Bench) -> None:
    """Red when tool_choice does not bind the output, or the bound output is shown as text."""
    bench.link.answer = '[{"name": "look", "parameters": {"at": "sea"}}]'
    for choice in ("required", {"type": "function", "name": "look"}):
        answer = whole(bench, tools=[TOOL], tool_choice=choice)
        assert [item["type"] for item in answer["output"]] == ["function_call"]
        assert json.loads(answer["output"][0]["arguments"]) == {"at": "sea"}
        assert answer["tool_choice"] == choice
        assert bench.link.submitted[-1].params.structured_outputs is not None


ALLOWED = {
    "type": "allowed_tools",
    "mode": "auto",
    "tools": [{"type": "function", "name": "look"}],
}


def test_allowed_tools_hide_the_others(bench: Bench) -> None:
    other = {**TOOL, "name": "other"}
    whole(bench, tools=[TOOL, other], tool_choice=ALLOWED)
    assert '"look"' in bench.link.prompt() and '"other"' not in bench.link.prompt()


def test_everything_optional_may_be_null(bench: Bench) -> None:
    """Red when a client that writes out its nulls is refused."""
    whole(bench, **dict.fromkeys(OPTIONAL))


def test_unknown_fields_are_ignored_and_named(bench: Bench) -> None:
    reply = bench.post(PATH, {"input": "hi", "shoe_size": 43, "store": False})
    assert reply.status_code == 200
    assert reply.headers["x-quire-warning"] == "ignored unknown fields: shoe_size"
    assert reply.json()["store"] is False


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "some"}, "truncation"),
        ({"input": [IMAGE]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "poet", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": []}, "messages"),
        ({"input": 3}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "name": ["look"]}], "tool_choice": ALLOWED}, "tools[0].name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "shema": {}}}}, "text.format.shema"),
        ({"temperature": "warm"}, "temperature"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 21}, "logprobs"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
    ],
)
def test_what_is_refused(bench: Bench, body: dict[str, Any], param: str) -> None:
    """Red when something we cannot do is silently ignored, or the error does not say where."""
    reply = bench.post(PATH, {"input": "hi", **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert bench.link.submitted == []


def test_an_unknown_model_is_not_found(bench: Bench) -> None:
    reply = bench.post(PATH, {"input": "hi", "model": "gpt-9"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


# ------------------------------------------------------------ fuzz

FUZZED = Bench()
ITEMS = JSON.map(lambda value: {"input": [value]})


@settings(max_examples=250, deadline=None, derandomize=True)
@given(bodies({"input": "hi", "max_output_tokens": 8}, ("input", *OPTIONAL)) | ITEMS | JSON)
def test_no_body_breaks_the_server(body: Any) -> None:
    """Red when some JSON body is a 5xx, or leaves a generation open."""
    reply = FUZZED.post(PATH, body)
    assert reply.status_code in (200, 400, 404), (body, reply.text)
    assert FUZZED.link.num_open == 0 and FUZZED.server.admission.num_open == 0
    FUZZED.link.submitted.clear()


@pytest.mark.parametrize("depth", [60, 700, 990, 5_000])
def test_deep_nesting_is_refused(bench: Bench, depth: int) -> None:
    """Red when a body that is nothing but brackets exhausts the stack."""
    deep = "[" * depth + "]" * depth
    for body in (
        f'{{"input": [{{"type": "function_call_output", "call_id": "c", "output": {deep}}}]}}',
        f'{{"input": "hi", "tools": [{{"type": "function", "name": "f", "parameters": {deep}}}]}}',
        f'{{"input": [{{"role": "user", "content": "hi", "extra": {deep}}}], "shoe": {deep}}}',
    ):
        assert bench.post(PATH, body.encode()).status_code in (200, 400)


def test_text_that_is_no_text_is_refused(bench: Bench) -> None:
    """Red when half a character, which has no bytes, reaches the tokenizer."""
    for body in (b'{"input": "\\ud800"}', b'{"input": [{"role": "user", "content": "\\udc00"}]}'):
        assert bench.post(PATH, body).status_code == 400
