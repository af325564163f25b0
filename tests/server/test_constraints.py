"""Constraints on the output: none is dropped without a word, and a cut one leaks nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.fakes import Bench

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
INTEGER = {"type": "integer"}


@pytest.fixture
def bench() -> Bench:
    return Bench()


def schema_of(bench: Bench) -> Any:
    params = bench.link.submitted[-1].params.structured_outputs
    assert params is not None
    return json.loads(str(params.json))


# ------------------------------------------------------------ what is refused

WRONG = [
    ("structured_outputs", {"structural_tag": "{}"}, "structured_outputs.structural_tag", "known:"),
    ("structured_outputs", {"jsn": INTEGER}, "structured_outputs.jsn", "did you mean 'json'?"),
    ("structured_outputs", {"json": INTEGER, "x": 1}, "structured_outputs.x", "json_object"),
    ("structured_outputs", {}, "structured_outputs", "want exactly one of"),
    ("structured_outputs", {"json": None}, "structured_outputs", "want exactly one of"),
    ("structured_outputs", {"json_object": False}, "structured_outputs", "want exactly one of"),
    ("structured_outputs", {"json": {}, "regex": "a"}, "structured_outputs", "want exactly one of"),
    ("response_format", {}, "response_format.type", "want text"),
    ("response_format", {"type": "structural_tag"}, "response_format.type", "want text"),
    ("response_format", {"type": ["text"]}, "response_format.type", "want text"),
    (
        "response_format",
        {"type": "text", "schema": INTEGER},
        "response_format.schema",
        "known: type",
    ),
    (
        "response_format",
        {"type": "json_object", "shema": INTEGER},
        "response_format.shema",
        "did you mean 'schema'?",
    ),
    ("response_format", {"type": "json_object", "schema": 3}, "response_format", "an object"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "n", "scheme": INTEGER}},
        "response_format.json_schema.scheme",
        "did you mean 'schema'?",
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": INTEGER},
        "response_format.json_schema.type",
        "known: name",
    ),
]


@pytest.mark.parametrize(("field", "value", "param", "told"), WRONG, ids=str)
def test_a_constraint_nobody_knows_is_refused(
    bench: Bench, field: str, value: Any, param: str, told: str
) -> None:
    """Red when a key is ignored that would have bound the output, so that nothing binds it."""
    for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"})):
        reply = bench.post(path, {**body, field: value})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == param and told in error["message"]
    assert bench.link.submitted == []


def test_nulls_and_switches_that_are_off_ask_nothing(bench: Bench) -> None:
    """Red when a client that writes out all its fields is refused."""
    off = {"structural_tag": None, "disable_fallback": False, "whitespace_pattern": None}
    wanted = {"json": INTEGER, "regex": None, "json_object": False, **off}
    reply = bench.post(CHAT, {"messages": HI, "structured_outputs": wanted})
    assert reply.status_code == 200, reply.text
    assert schema_of(bench) == INTEGER


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"response_format": {"type": "json_object", "schema": INTEGER}}),
        (CHAT, {"response_format": {"type": "json_schema", "schema": INTEGER, "strict": True}}),
        (CHAT, {"guided_json": INTEGER}),
        (CHAT, {"guided_json": json.dumps(INTEGER)}),
        (RESPONSES, {"text": {"format": {"type": "json_object", "schema": INTEGER}}}),
    ],
    ids=str,
)
def test_every_way_to_give_a_schema_binds(bench: Bench, path: str, body: dict[str, Any]) -> None:
    """Red when a schema beside json_object, or an older name for it, is passed over."""
    given = {"messages": HI} if path == CHAT else {"input": "hi"}
    reply = bench.post(path, {**given, **body})
    assert reply.status_code == 200, reply.text
    assert schema_of(bench) == INTEGER
    assert "x-quire-warning" not in reply.headers


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": HI, "stream_options": {"include_usge": True}}, "include_usge"),
        (RESPONSES, {"input": "hi", "text": {"fromat": {"type": "json_object"}}}, "text.fromat"),
        (
            MESSAGES,
            {"messages": HI, "max_tokens": 4, "output_config": {"formt": {}, "effort": "low"}},
            "output_config.formt",
        ),
    ],
)
def test_unknown_keys_inside_are_named_too(
    bench: Bench, path: str, body: dict[str, Any], named: str
) -> None:
    """Red when only the fields of the body itself are looked at."""
    reply = bench.post(path, body)
    assert reply.status_code == 200, reply.text
    assert named in reply.headers["x-quire-warning"]


# ------------------------------------------------------------ string formats

IBAN = {"type": "object", "properties": {"a": {"type": "string", "format": "iban"}}}
FUNCTION = {"name": "look", "parameters": IBAN}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hi", "structured_outputs": {"json": IBAN}}),
        (
            CHAT,
            {
                "messages": HI,
                "response_format": {"type": "json_schema", "json_schema": {"schema": IBAN}},
            },
        ),
        (
            CHAT,
            {
                "messages": HI,
                "tools": [{"type": "function", "function": FUNCTION}],
                "tool_choice": "required",
            },
        ),
        (
            RESPONSES,
            {"input": "a", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        ),
        (
            MESSAGES,
            {
                "messages": HI,
                "max_tokens": 5,
                "tools": [{"name": "look", "input_schema": IBAN}],
                "tool_choice": {"type": "any"},
            },
        ),
    ],
)
def test_formats_nobody_enforces_are_named(bench: Bench, path: str, body: dict[str, Any]) -> None:
    """Red when a client is not told that a format of its schema binds nothing."""
    bench.link.answer = "[]"
    for stream in (False, True):
        reply = bench.post(path, {**body, "stream": stream})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-quire-warning"] == "ignored unknown string formats: iban"


# ------------------------------------------------------------ a forced call cut short

CALLS = '[{"name": "look", "parameters": {"at": "sea"}}, {"name": "look", "parameters": {}}]'
TOOL = {"name": "look", "parameters": {"type": "object"}}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
FORCED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": HI, **TOOLS, "tool_choice": "required"}, "max_tokens"),
    (
        CHAT,
        {
            "messages": HI,
            **TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "look"}},
        },
        "max_completion_tokens",
    ),
    (
        RESPONSES,
        {"input": "hi", "tools": [{"type": "function", **TOOL}], "tool_choice": "required"},
        "max_output_tokens",
    ),
    (
        MESSAGES,
        {"messages": HI, "tools": [{"name": "look"}], "tool_choice": {"type": "any"}},
        "max_tokens",
    ),
]


def said(body: Any) -> str:
    """All the text an answer, or an event of one, shows as words of the model."""
    if isinstance(body, list):
        return "".join(map(said, body))
    if not isinstance(body, dict):
        return ""
    own = [body.get(key) for key in ("content", "text", "delta")]
    # The deltas of a call's arguments are no words.
    is_call = body.get("type") == "response.function_call_arguments.delta"
    texts = "" if is_call else "".join(text for text in own if isinstance(text, str))
    return texts + "".join(map(said, body.values()))


@pytest.mark.parametrize(("path", "body", "limit"), FORCED)
def test_half_a_forced_call_is_no_content(
    bench: Bench, path: str, body: dict[str, Any], limit: str
) -> None:
    """Red when a call cut by max_tokens before its name is known is shown as text."""
    bench.link.answer = CALLS
    size = len(bench.link.tokenizer.encode(CALLS, False))
    for most in range(1, size, 4):
        answer = bench.post(path, {**body, limit: most}).json()
        assert said(answer) == "", answer
        ends = answer.get("choices", [answer])[0]
        reason = ends.get("finish_reason", ends.get("stop_reason", ends.get("status")))
        assert reason in ("length", "max_tokens", "incomplete")


@pytest.mark.parametrize(("path", "body", "limit"), FORCED)
def test_half_a_forced_call_is_not_streamed(
    bench: Bench, path: str, body: dict[str, Any], limit: str
) -> None:
    """Red when the stream's end flushes what was held back of a call."""
    bench.link.answer = CALLS
    size = len(bench.link.tokenizer.encode(CALLS, False))
    for most in range(1, size, 4):
        reply = bench.post(path, {**body, limit: most, "stream": True})
        lines = [line.removeprefix("data: ") for line in reply.text.split("\n")]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        assert events and said(events) == "", reply.text
        assert any(word in reply.text for word in ('"length"', '"max_tokens"', '"incomplete"'))


def test_a_whole_forced_call_before_the_cut_stays(bench: Bench) -> None:
    """Red when a torn second call takes the first with it."""
    bench.link.answer = CALLS
    size = len(bench.link.tokenizer.encode(CALLS[: CALLS.index(', {"name"') + 8], False))
    path, body, limit = FORCED[0]
    (choice,) = bench.post(path, {**body, limit: size}).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": "sea"}
